/* A fuzzer's input, taken from its begin on: numbers, and bytes to write somewhere. */
#ifndef INPUT_H
#define INPUT_H

#include <stdint.h>
#include <string.h>

struct input {
    const uint8_t *at;
    size_t left;
};

/* The next bytes, at most 8, as a number; what is beyond the end is 0. */
static inline uint64_t next(struct input *in, size_t bytes)
{
    uint64_t value = 0;
    bytes = bytes < in->left ? bytes : in->left;
    memcpy(&value, in->at, bytes);
    in->at += bytes;
    in->left -= bytes;
    return value;
}

/* Writes up to `most` of the next bytes somewhere into `size` bytes, at least one, at `to`. */
static inline void scribble(struct input *in, void *to, size_t size, size_t most)
{
    size_t at = next(in, 2) % size, count = next(in, 1) % (most + 1);
    count = count < in->left ? count : in->left;
    count = count < size - at ? count : size - at;
    memcpy((char *)to + at, in->at, count);
    in->at += count;
    in->left -= count;
}

#endif
