/* See ps_product.h. */
#include "ps_product.h"

#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__GLIBC__)
/* One build serves old and new processors; the loader (glibc's can) picks. */
#define CLONES __attribute__((target_clones("default", "avx2", "avx512f")))
#else
#define CLONES
#endif

#define LANES 16

typedef float floats __attribute__((vector_size(4 * LANES)));

/* The factors that are not zero, by the tensor's row. */
struct terms {
    uint32_t *starts; /* index of each row's first term; one more than there are rows */
    uint32_t *vector; /* of each term: which row of values */
    float *factor;
};

CLONES static void count_terms(uint32_t *restrict counts, const float *restrict factors,
                               uint64_t rows)
{
    for (uint64_t r = 0; r < rows; r++)
        counts[r] += factors[r] != 0.0f; /* true for a NaN, which must reach the check */
}

static int gather(struct terms *terms, const struct ps_gradient *gradient, uint64_t rows)
{
    uint64_t count = gradient->count, most = UINT32_MAX;
    *terms = (struct terms){NULL, NULL, NULL};
    if (count && rows > most / count)
        return PS_NO_MEMORY;
    /* Row r's count goes to starts[r + 2]. Their sums put the row's begin at starts[r + 1]. Filling
     * moves that entry to the row's end, which is the next row's begin. */
    terms->starts = calloc(rows + 2, sizeof *terms->starts);
    if (!terms->starts)
        return PS_NO_MEMORY;
    for (uint64_t i = 0; i < count; i++)
        count_terms(terms->starts + 2, gradient->factors + i * rows, rows);
    for (uint64_t r = 1; r <= rows; r++)
        terms->starts[r + 1] += terms->starts[r];
    uint64_t total = terms->starts[rows + 1];
    terms->vector = malloc((total + 1) * sizeof *terms->vector);
    terms->factor = malloc((total + 1) * sizeof *terms->factor);
    if (!terms->vector || !terms->factor)
        return PS_NO_MEMORY;
    for (uint64_t i = 0; i < count; i++) {
        const float *factors = gradient->factors + i * rows;
        for (uint64_t r = 0; r < rows; r++) {
            if (factors[r] != 0.0f) {
                uint32_t at = terms->starts[r + 1]++;
                terms->vector[at] = (uint32_t)i;
                terms->factor[at] = factors[r];
            }
        }
    }
    return 0;
}

static void release(struct terms *terms)
{
    free(terms->starts);
    free(terms->vector);
    free(terms->factor);
}

/* Computes one row of the gradient: the sum of its terms, in their order. */
CLONES static void add_up(float *row, const struct terms *terms, uint64_t r, const float *values,
                          uint64_t width)
{
    uint64_t whole = width - width % LANES;
    uint32_t begin = terms->starts[r], end = terms->starts[r + 1];
    for (uint64_t k = 0; k < whole; k += LANES) {
        floats sum = {};
        for (uint32_t t = begin; t < end; t++) {
            floats value;
            memcpy(&value, values + terms->vector[t] * width + k, sizeof value);
            sum += terms->factor[t] * value;
        }
        memcpy(row + k, &sum, sizeof sum);
    }
    for (uint64_t k = whole; k < width; k++) {
        row[k] = 0.0f;
        for (uint32_t t = begin; t < end; t++)
            row[k] += terms->factor[t] * values[terms->vector[t] * width + k];
    }
}

static int write_rows(struct ps_payload *payload, struct ps_block *block,
                      const struct ps_gradient *gradient, const struct ps_shape *shape,
                      const struct terms *terms)
{
    uint64_t rows = shape->rows, width = shape->width, named = 0;
    uint64_t size = width * ps_width_of(payload->dtype);
    for (uint64_t r = 0; r < rows; r++)
        named += terms->starts[r] != terms->starts[r + 1];
    int listed = payload->skips_zeros && size >= PS_LEAST_ROW && named <= rows - rows / 4;
    block->form = listed ? PS_ROWS : PS_DENSE;
    block->rows = listed ? named : 0;
    block->indices_at = payload->end;
    block->values_at = listed ? payload->end + ps_rounded(named * 8) : payload->end;
    float *row = malloc(width * sizeof *row);
    if (!row)
        return PS_NO_MEMORY;
    int64_t *indices = (int64_t *)(void *)(payload->at + block->indices_at);
    char *to = payload->at + block->values_at;
    for (uint64_t r = 0; r < rows; r++) {
        if (listed && terms->starts[r] == terms->starts[r + 1])
            continue;
        if (listed)
            *indices++ = (int64_t)r;
        add_up(row, terms, r, gradient->values, width);
        payload->squares += ps_copy(payload->dtype, to, row, width,
                                    shape->residue ? shape->residue + r * width : NULL);
        to += size;
    }
    free(row);
    payload->end = block->values_at + ps_rounded((listed ? named : rows) * size);
    return 0;
}

int ps_write_product(struct ps_payload *payload, struct ps_block *block,
                     const struct ps_gradient *gradient, const struct ps_shape *shape)
{
    struct terms terms;
    int result = gather(&terms, gradient, shape->rows);
    if (!result)
        result = write_rows(payload, block, gradient, shape, &terms);
    release(&terms);
    return result;
}

CLONES static void add_times(float *restrict to, const float *restrict row, float factor,
                             uint64_t width)
{
    for (uint64_t k = 0; k < width; k++)
        to[k] += factor * row[k];
}

void ps_sparse_product(float *to, const float *factors, const float *matrix, uint64_t count,
                       uint64_t rows, uint64_t width)
{
    memset(to, 0, count * width * sizeof *to);
    for (uint64_t i = 0; i < count; i++)
        for (uint64_t r = 0; r < rows; r++)
            if (factors[i * rows + r] != 0.0f)
                add_times(to + i * width, matrix + r * width, factors[i * rows + r], width);
}
