/*
 * The part of JSON that a learner's requests and their replies need: it reads wanted members of one
 * object, bounded and checked, and quotes a string. Text becomes one line: control characters turn
 * into blanks. Nothing is allocated.
 */
#ifndef GADEI_JSON_H
#define GADEI_JSON_H

#include <stdint.h>
#include <stdio.h>
#include <string.h>

#define JSON_DEPTH 32

struct json_reader {
    const char *at, *end;
};

enum json_kind { TEXT, NUMBER, TRUTH };

/* A member wanted of an object. TEXT: `to` is char[room]; NUMBER: uint64_t; TRUTH: int. */
struct json_field {
    const char *key;
    enum json_kind kind;
    void *to;
    size_t room;
    int found;
};

static inline void skip_blanks(struct json_reader *in)
{
    while (in->at < in->end && strchr(" \t\r\n", *in->at) && *in->at)
        in->at++;
}

static inline int take(struct json_reader *in, char wanted)
{
    skip_blanks(in);
    if (in->at == in->end || *in->at != wanted)
        return 0;
    in->at++;
    return 1;
}

static inline int take_word(struct json_reader *in, const char *word)
{
    size_t length = strlen(word);
    if ((size_t)(in->end - in->at) < length || memcmp(in->at, word, length))
        return 0;
    in->at += length;
    return 1;
}

static inline int take_hex4(struct json_reader *in, uint32_t *value)
{
    *value = 0;
    for (int i = 0; i < 4; i++) {
        if (in->at == in->end)
            return 0;
        char c = *in->at++;
        uint32_t digit = c >= '0' && c <= '9'   ? (uint32_t)(c - '0')
                         : c >= 'a' && c <= 'f' ? (uint32_t)(c - 'a') + 10
                         : c >= 'A' && c <= 'F' ? (uint32_t)(c - 'A') + 10
                                                : 16;
        if (digit == 16)
            return 0;
        *value = *value << 4 | digit;
    }
    return 1;
}

/* After "\u": a code point as UTF-8; half a surrogate pair becomes U+FFFD. Returns its length. */
static inline size_t take_code_point(struct json_reader *in, char out[4])
{
    uint32_t code, low;
    if (!take_hex4(in, &code))
        return 0;
    if (code >= 0xd800 && code < 0xe000) {
        struct json_reader ahead = *in;
        if (code < 0xdc00 && take_word(&ahead, "\\u") && take_hex4(&ahead, &low) &&
            low >= 0xdc00 && low < 0xe000) {
            *in = ahead;
            code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
        } else {
            code = 0xfffd;
        }
    }
    if (code < 0x20)
        code = ' '; /* what we keep is one line and ends at its first NUL */
    if (code < 0x80) {
        out[0] = (char)code;
        return 1;
    }
    size_t length = code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
    for (size_t i = length - 1; i > 0; i--, code >>= 6)
        out[i] = (char)(0x80 | (code & 0x3f));
    out[0] = (char)((0xf00u >> length & 0xffu) | code);
    return length;
}

/* A string, cut where it does not fit into `to` of `room` bytes (0: skipped). Returns 0 if it is
 * malformed, 1 if it is whole, 2 if it was cut. */
static inline int take_string(struct json_reader *in, char *to, size_t room)
{
    size_t used = 0;
    int cut = 0;
    if (!take(in, '"'))
        return 0;
    for (;;) {
        char part[4];
        size_t length = 1;
        if (in->at == in->end)
            return 0;
        part[0] = *in->at++;
        if (part[0] == '"')
            break;
        if ((unsigned char)part[0] < 0x20)
            return 0;
        if (part[0] == '\\') {
            if (in->at == in->end)
                return 0;
            part[0] = *in->at++;
            if (part[0] == 'u') {
                length = take_code_point(in, part);
                if (!length)
                    return 0;
            } else if (part[0] && strchr("bfnrt", part[0])) {
                part[0] = ' ';
            } else if (part[0] != '"' && part[0] != '\\' && part[0] != '/') {
                return 0;
            }
        }
        if (!cut && used + length < room) {
            memcpy(to + used, part, length);
            used += length;
        } else {
            cut = room != 0;
        }
    }
    if (room)
        to[used] = '\0';
    return cut ? 2 : 1;
}

static inline int take_number(struct json_reader *in, uint64_t *value)
{
    skip_blanks(in);
    const char *begin = in->at;
    *value = 0;
    for (; in->at < in->end && *in->at >= '0' && *in->at <= '9'; in->at++) {
        uint64_t digit = (uint64_t)(*in->at - '0');
        if (*value > (UINT64_MAX - digit) / 10)
            return 0;
        *value = *value * 10 + digit;
    }
    return in->at > begin; /* what follows, a point or an exponent, is not a comma: refused there */
}

static inline int skip_value(struct json_reader *in, int depth)
{
    skip_blanks(in);
    if (in->at == in->end || depth > JSON_DEPTH)
        return 0;
    char first = *in->at;
    if (first == '"')
        return take_string(in, NULL, 0);
    if (first == '{' || first == '[') {
        char close = first == '{' ? '}' : ']';
        in->at++;
        if (take(in, close))
            return 1;
        do {
            if (first == '{' && (!take_string(in, NULL, 0) || !take(in, ':')))
                return 0;
            if (!skip_value(in, depth + 1))
                return 0;
        } while (take(in, ','));
        return take(in, close);
    }
    if (take_word(in, "true") || take_word(in, "false") || take_word(in, "null"))
        return 1;
    const char *begin = in->at;
    while (in->at < in->end && *in->at && strchr("+-.0123456789eE", *in->at))
        in->at++;
    return in->at > begin;
}

static inline int take_field(struct json_reader *in, struct json_field *field)
{
    skip_blanks(in);
    switch (field->kind) {
    case TEXT:
        field->found = take_string(in, field->to, field->room);
        break;
    case NUMBER:
        field->found = take_number(in, field->to);
        break;
    case TRUTH:
        *(int *)field->to = take_word(in, "true");
        field->found = *(int *)field->to || take_word(in, "false");
        break;
    }
    return field->found;
}

/* Reads one object with nothing after it; members that are not wanted are skipped. 0 if it is
 * malformed. A text has `found` 1 if it is whole, 2 if it was cut. */
static inline int json_read(const char *text, size_t length, struct json_field *fields,
                            size_t count)
{
    struct json_reader in = {text, text + length};
    if (!take(&in, '{'))
        return 0;
    if (!take(&in, '}')) {
        do {
            char key[32];
            struct json_field *wanted = NULL;
            int known = take_string(&in, key, sizeof key);
            if (!known || !take(&in, ':'))
                return 0;
            for (size_t i = 0; i < count && known == 1; i++)
                if (!strcmp(key, fields[i].key))
                    wanted = &fields[i];
            if (wanted ? !take_field(&in, wanted) : !skip_value(&in, 0))
                return 0;
        } while (take(&in, ','));
        if (!take(&in, '}'))
            return 0;
    }
    skip_blanks(&in);
    return in.at == in.end;
}

/* A JSON string of the text's first `length` bytes; `out` holds 6 for each and 3 more. */
static inline void json_quote(const char *text, size_t length, char *out)
{
    *out++ = '"';
    for (size_t i = 0; i < length; i++) {
        unsigned char c = (unsigned char)text[i];
        if (c < 0x20 || c == '"' || c == '\\')
            out += sprintf(out, "\\u%04x", c);
        else
            *out++ = (char)c;
    }
    *out++ = '"';
    *out = '\0';
}

#endif
