/* C structs of the lists of ps_layout.h, which includes this file; the compiler checks the offsets. */
#ifndef PS_STRUCTS_H
#define PS_STRUCTS_H

#include <assert.h>
#include <stddef.h>
#include <stdint.h>

#define PS_DECLARE(tag, at, type, name, dims, writer, meaning) ps_##type name dims;
#define PS_PADDING(at, bytes) uint8_t pad_##at[bytes];
#define PS_STRUCT(tag, FIELDS, size) typedef struct tag { FIELDS(PS_DECLARE, PS_PADDING, tag) } tag;
PS_STRUCTS(PS_STRUCT)

#define PS_IS_AT(tag, at, type, name, dims, writer, meaning) \
    static_assert(offsetof(struct tag, name) == (at), #tag "." #name);
#define PS_NOTHING(at, bytes)
#define PS_HAS_SIZE(tag, FIELDS, size) \
    FIELDS(PS_IS_AT, PS_NOTHING, tag) static_assert(sizeof(struct tag) == (size), #tag);
PS_STRUCTS(PS_HAS_SIZE)

#undef PS_DECLARE
#undef PS_PADDING
#undef PS_STRUCT
#undef PS_IS_AT
#undef PS_HAS_SIZE

#endif
