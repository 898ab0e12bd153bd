/* Blocks of a rows frame: gradients of some rows of a tensor, or of all of it, one after the other
 * in the payload. Rows may come in any order and repeated, as a mini-batch names them; here they are
 * put in order and added up, and copied and converted on the way into the slot. */
#include "ps_ring.h"

#include <stdlib.h>
#include <string.h>

#define FEW 256 /* rows that are sorted without asking for memory */

struct row {
    uint64_t number;
    uint64_t given; /* place in what the caller gave */
};

static uint64_t rounded(uint64_t bytes)
{
    return (bytes + 63) & ~63ull;
}

static uint64_t width_of(uint32_t dtype)
{
    return dtype == PS_FLOAT32 ? 4 : 2;
}

/* By number; rows of one number keep their order, so that their sum does not depend on chance. */
static void sort_few(struct row *rows, uint64_t count)
{
    for (uint64_t i = 1; i < count; i++) {
        struct row one = rows[i];
        uint64_t j = i;
        for (; j && rows[j - 1].number > one.number; j--)
            rows[j] = rows[j - 1];
        rows[j] = one;
    }
}

/* The same for many, a byte at a time from the lowest on. spare: as long as rows. Returns where the
 * sorted ones are. */
static struct row *sort_many(struct row *rows, struct row *spare, uint64_t count, uint64_t largest)
{
    for (unsigned shift = 0; shift < 64 && largest >> shift; shift += 8) {
        uint64_t first[257] = {0};
        for (uint64_t i = 0; i < count; i++)
            first[(rows[i].number >> shift & 255) + 1]++;
        for (unsigned byte = 0; byte < 256; byte++)
            first[byte + 1] += first[byte];
        for (uint64_t i = 0; i < count; i++)
            spare[first[rows[i].number >> shift & 255]++] = rows[i];
        struct row *sorted = spare;
        spare = rows;
        rows = sorted;
    }
    return rows;
}

int ps_write_block(uint32_t dtype, char *payload, uint64_t *at, struct ps_block *block,
                   const float *values, uint64_t count)
{
    block->form = PS_DENSE;
    block->rows = 0;
    block->indices_at = block->values_at = *at;
    int found = ps_copy(dtype, payload + *at, values, count);
    *at += rounded(count * width_of(dtype));
    return found;
}

/* The values of one row, those of repeated ones added up: in `sum` if there are several. */
static const float *add_up(const struct ps_rows *given, const struct row *rows, uint64_t count,
                           float *sum)
{
    const float *first = given->values + rows[0].given * given->width;
    if (count == 1)
        return first;
    memcpy(sum, first, given->width * sizeof *sum);
    for (uint64_t i = 1; i < count; i++) {
        const float *next = given->values + rows[i].given * given->width;
        for (uint64_t k = 0; k < given->width; k++)
            sum[k] += next[k];
    }
    return sum;
}

static int write_sorted(uint32_t dtype, char *payload, uint64_t *at, struct ps_block *block,
                        const struct ps_rows *given, const struct row *rows, float *sum)
{
    uint64_t distinct = 0, size = given->width * width_of(dtype);
    for (uint64_t i = 0; i < given->count; i++)
        distinct += !i || rows[i].number != rows[i - 1].number;
    uint64_t listed = rounded(distinct * 8) + rounded(distinct * size);
    uint64_t whole = rounded(given->rows * size);
    /* A slot has room for the numbers of all rows, but not where a row is a single value. */
    int crowded = given->width == 1 && listed > rounded(given->rows * 4) + 64;
    int dense = distinct == given->rows || crowded;
    block->form = dense ? PS_DENSE : PS_ROWS;
    block->rows = dense ? 0 : distinct;
    block->indices_at = *at;
    block->values_at = dense ? *at : *at + rounded(distinct * 8);
    *at += dense ? whole : listed;
    int64_t *indices = (int64_t *)(void *)(payload + block->indices_at);
    char *values = payload + block->values_at;
    if (dense)
        memset(values, 0, given->rows * size);
    int found = 0;
    for (uint64_t i = 0, row = 0, same; i < given->count; i += same, row++) {
        for (same = 1; i + same < given->count && rows[i + same].number == rows[i].number;)
            same++;
        const float *from = add_up(given, rows + i, same, sum);
        if (!dense)
            indices[row] = (int64_t)rows[i].number;
        found |= ps_copy(dtype, values + (dense ? rows[i].number : row) * size, from, given->width);
    }
    return found;
}

int ps_write_rows(uint32_t dtype, char *payload, uint64_t *at, struct ps_block *block,
                  const struct ps_rows *given, uint64_t *bad)
{
    struct row few[2 * FEW], *rows = few;
    uint64_t largest = 0;
    for (uint64_t i = 0; i < given->count; i++) {
        if (given->indices[i] < 0 || (uint64_t)given->indices[i] >= given->rows) {
            *bad = i;
            return PS_BAD_ROW;
        }
    }
    if (given->count > FEW)
        rows = malloc(2 * given->count * sizeof *rows);
    float *sum = malloc(given->width * sizeof *sum);
    if (!rows || !sum) {
        if (rows != few)
            free(rows);
        free(sum);
        return PS_NO_MEMORY;
    }
    for (uint64_t i = 0; i < given->count; i++) {
        rows[i] = (struct row){(uint64_t)given->indices[i], i};
        largest = rows[i].number > largest ? rows[i].number : largest;
    }
    const struct row *sorted = rows;
    if (given->count <= 32)
        sort_few(rows, given->count);
    else
        sorted = sort_many(rows, rows + given->count, given->count, largest);
    int found = write_sorted(dtype, payload, at, block, given, sorted, sum);
    if (rows != few)
        free(rows);
    free(sum);
    return found;
}
