/*
 * Fuzzes native/gadei_json.h as the C client uses it: any bytes as a reply of the control socket, and
 * any text through json_quote and back. Beyond what the sanitizers see: texts are ended inside
 * their room and are one line, and a number or truth that was not found is not taken for one.
 */
#include <assert.h>
#include <stdint.h>
#include <stdlib.h>

#include "gadei_json.h"

static void check_text(const struct json_field *field)
{
    const char *text = field->to;
    if (!field->found)
        return; /* the caller does not look at it */
    assert(memchr(text, 0, field->room));
    for (; *text; text++)
        assert((unsigned char)*text >= 0x20);
}

/* Reads it as a reply, with room for little and for much. */
static void read_text(const char *text, size_t length)
{
    char job[64], id[33], tiny[1], kind[2], error[511];
    uint64_t row, generation;
    int ok;
    struct json_field fields[] = {
        {"ok", TRUTH, &ok, 0, 0},           {"job", TEXT, job, sizeof job, 0},
        {"job_id", TEXT, id, sizeof id, 0}, {"row", NUMBER, &row, 0, 0},
        {"kind", TEXT, kind, sizeof kind, 0}, {"generation", NUMBER, &generation, 0, 0},
        {"error", TEXT, error, sizeof error, 0}, {"x", TEXT, tiny, sizeof tiny, 0},
    };
    const size_t count = sizeof fields / sizeof *fields;
    (void)json_read(text, length, fields, count);
    for (size_t i = 0; i < count; i++) {
        assert(fields[i].found >= 0 && fields[i].found <= (fields[i].kind == TEXT ? 2 : 1));
        if (fields[i].kind == TEXT)
            check_text(&fields[i]);
    }
    assert(!fields[0].found || ok == 0 || ok == 1);
}

/* What json_quote makes is read back as the same text, control characters as blanks. */
static void round_trip(const char *text, size_t length)
{
    char *quoted = malloc(6 * length + 3), *object = malloc(6 * length + 16);
    char *back = malloc(length + 1);
    struct json_field field = {"t", TEXT, back, length + 1, 0};
    assert(quoted && object && back);
    json_quote(text, length, quoted);
    assert(strlen(quoted) <= 6 * length + 2);
    int size = sprintf(object, "{\"t\":%s}", quoted);
    assert(json_read(object, (size_t)size, &field, 1) && field.found == 1);
    for (size_t i = 0; i < length; i++)
        assert(back[i] == ((unsigned char)text[i] < 0x20 ? ' ' : text[i]));
    assert(!back[length]);
    free(quoted);
    free(object);
    free(back);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char *text = malloc(size ? size : 1); /* exactly: a byte too far is seen */
    assert(text);
    memcpy(text, data, size);
    read_text(text, size);
    if (!memchr(text, 0, size)) /* a name is a C string */
        round_trip(text, size);
    free(text);
    return 0;
}
