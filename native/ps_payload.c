/* Writes the payload of every frame. A dense payload holds all tensors in their places. A payload
 * of rows holds blocks one after the other, each with some rows of a tensor or with all of it. Rows
 * may come in any order and repeated, as a mini-batch names them: they are sorted, repeated ones are
 * added up, and values are converted while they are copied into the slot. */
#include "ps_learner.h"
#include "ps_product.h"

#include <stdlib.h>
#include <string.h>

#define FEW 256 /* rows that are sorted without allocating memory */

struct row {
    uint64_t number;
    uint64_t given; /* place in what the caller gave */
};

#define rounded ps_rounded
#define width_of ps_width_of

/* Sorts by number. Rows of the same number keep their order, so that their sum is reproducible. */
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

/* Sorts many rows, one byte of the number at a time, the lowest first. scratch: room for as many
 * rows. Returns the sorted rows, which lie in `rows` or in `scratch`. */
static struct row *sort_many(struct row *rows, struct row *scratch, uint64_t count,
                             uint64_t largest)
{
    for (unsigned shift = 0; shift < 64 && largest >> shift; shift += 8) {
        uint64_t first[257] = {0};
        for (uint64_t i = 0; i < count; i++)
            first[(rows[i].number >> shift & 255) + 1]++;
        for (unsigned byte = 0; byte < 256; byte++)
            first[byte + 1] += first[byte];
        for (uint64_t i = 0; i < count; i++)
            scratch[first[rows[i].number >> shift & 255]++] = rows[i];
        struct row *sorted = scratch;
        scratch = rows;
        rows = sorted;
    }
    return rows;
}

static void copy(struct ps_payload *payload, uint64_t at, const float *values, uint64_t count,
                 float *residue)
{
    payload->squares += ps_copy(payload->dtype, payload->at + at, values, count, residue);
}

/* Writes all of a tensor. */
static void write_all(struct ps_payload *payload, struct ps_block *block, const float *values,
                      const struct ps_shape *shape)
{
    uint64_t count = shape->rows * shape->width;
    block->form = PS_DENSE;
    block->rows = 0;
    block->indices_at = block->values_at = payload->end;
    copy(payload, payload->end, values, count, shape->residue);
    payload->end += rounded(count * width_of(payload->dtype));
}

/* Returns the values of one row. If it was given several times, adds them up in `sum`. */
static const float *add_up(const float *values, uint64_t width, const struct row *rows,
                           uint64_t count, float *sum)
{
    const float *first = values + rows[0].given * width;
    if (count == 1)
        return first;
    memcpy(sum, first, width * sizeof *sum);
    for (uint64_t i = 1; i < count; i++) {
        const float *next = values + rows[i].given * width;
        for (uint64_t k = 0; k < width; k++)
            sum[k] += next[k];
    }
    return sum;
}

static void write_sorted(struct ps_payload *payload, struct ps_block *block,
                         const struct ps_gradient *gradient, const struct ps_shape *shape,
                         const struct row *rows, float *sum)
{
    uint64_t distinct = 0, width = shape->width, size = width * width_of(payload->dtype);
    for (uint64_t i = 0; i < gradient->count; i++)
        distinct += !i || rows[i].number != rows[i - 1].number;
    uint64_t listed = rounded(distinct * 8) + rounded(distinct * size);
    uint64_t whole = rounded(shape->rows * size);
    int dense = distinct == shape->rows || !ps_has_room(shape, listed);
    block->form = dense ? PS_DENSE : PS_ROWS;
    block->rows = dense ? 0 : distinct;
    block->indices_at = payload->end;
    block->values_at = dense ? payload->end : payload->end + rounded(distinct * 8);
    int64_t *indices = (int64_t *)(void *)(payload->at + block->indices_at);
    if (dense)
        memset(payload->at + block->values_at, 0, whole);
    for (uint64_t i = 0, row = 0, same; i < gradient->count; i += same, row++) {
        uint64_t number = rows[i].number;
        for (same = 1; i + same < gradient->count && rows[i + same].number == number;)
            same++;
        const float *from = add_up(gradient->values, width, rows + i, same, sum);
        if (!dense)
            indices[row] = (int64_t)number;
        copy(payload, block->values_at + (dense ? number : row) * size, from, width,
             shape->residue ? shape->residue + number * width : NULL);
    }
    payload->end += dense ? whole : listed;
}

/* Whether a listed row is outside the tensor; *bad: its place in the list. */
static int is_bad(const struct ps_gradient *gradient, uint64_t rows, uint64_t *bad)
{
    for (uint64_t i = 0; i < gradient->count; i++) {
        if (gradient->indices[i] < 0 || (uint64_t)gradient->indices[i] >= rows) {
            *bad = i;
            return 1;
        }
    }
    return 0;
}

static int write_listed(struct ps_payload *payload, struct ps_block *block,
                        const struct ps_gradient *gradient, const struct ps_shape *shape,
                        uint64_t *bad)
{
    struct row few[2 * FEW], *rows = few;
    uint64_t count = gradient->count, largest = 0;
    if (is_bad(gradient, shape->rows, bad))
        return PS_BAD_ROW;
    if (count > FEW)
        rows = malloc(2 * count * sizeof *rows);
    float *sum = malloc(shape->width * sizeof *sum);
    if (!rows || !sum) {
        if (rows != few)
            free(rows);
        free(sum);
        return PS_NO_MEMORY;
    }
    for (uint64_t i = 0; i < count; i++) {
        rows[i] = (struct row){(uint64_t)gradient->indices[i], i};
        largest = rows[i].number > largest ? rows[i].number : largest;
    }
    const struct row *sorted = rows;
    if (count <= 32)
        sort_few(rows, count);
    else
        sorted = sort_many(rows, rows + count, count, largest);
    write_sorted(payload, block, gradient, shape, sorted, sum);
    if (rows != few)
        free(rows);
    free(sum);
    return 0;
}

/* -- rows that are zero ------------------------------------------------------------------------ */

static int is_zero(const float *values, uint64_t count)
{
    uint32_t seen = 0, bits;
    for (uint64_t i = 0; i < count && !seen; i += 64) { /* most rows differ from zero at once */
        uint64_t end = count - i < 64 ? count : i + 64;
        for (uint64_t k = i; k < end; k++) {
            memcpy(&bits, values + k, sizeof bits);
            seen |= bits << 1; /* either zero */
        }
    }
    return !seen;
}

/* Writes the rows of a whole tensor that are not zero, if that leaves out at least a quarter of
 * them. Otherwise writes nothing and returns 0. */
static int write_nonzero_rows(struct ps_payload *payload, struct ps_block *block,
                              const float *values, const struct ps_shape *shape)
{
    uint64_t rows = shape->rows, width = shape->width, most = rows - rows / 4, kept = 0;
    uint64_t size = width * width_of(payload->dtype);
    int64_t *indices = (int64_t *)(void *)(payload->at + payload->end);
    if (rows < 4 || size < PS_LEAST_ROW)
        return 0;
    for (uint64_t i = 0; i < rows; i++) {
        if (is_zero(values + i * width, width))
            continue;
        if (kept == most)
            return 0;
        indices[kept++] = (int64_t)i;
    }
    block->form = PS_ROWS;
    block->rows = kept;
    block->indices_at = payload->end;
    block->values_at = payload->end + rounded(kept * 8);
    for (uint64_t i = 0; i < kept; i++) {
        uint64_t first = (uint64_t)indices[i] * width;
        copy(payload, block->values_at + i * size, values + first, width,
             shape->residue ? shape->residue + first : NULL);
    }
    payload->end += rounded(kept * 8) + rounded(kept * size);
    return 1;
}

/* Writes a block and describes it, except for its tensor. If all rows are named, or so many single
 * values that listing them needs more room than the whole tensor, the block holds the whole tensor;
 * rows that are not named then get gradient zero. Returns 0, PS_BAD_ROW or PS_NO_MEMORY. */
static int write_block(struct ps_payload *payload, struct ps_block *block,
                       const struct ps_gradient *gradient, const struct ps_shape *shape,
                       uint64_t *bad)
{
    if (gradient->factors)
        return ps_write_product(payload, block, gradient, shape);
    if (gradient->indices)
        return write_listed(payload, block, gradient, shape, bad);
    if (!payload->skips_zeros || !write_nonzero_rows(payload, block, gradient->values, shape))
        write_all(payload, block, gradient->values, shape);
    return 0;
}

/* -- frames ------------------------------------------------------------------------------------ */

static const struct ps_tensor *table_of(const struct ps_weights *weights)
{
    return (const struct ps_tensor *)((const char *)weights + weights->table_at);
}

uint64_t ps_first_block(const struct ps_weights *weights)
{
    return rounded(weights->tensors * sizeof(struct ps_block));
}

struct ps_shape ps_shape_of(const struct ps_tensor *tensor, float *residue)
{
    /* A tensor without values counts as one row without values, and so does one whose values are
     * not float32 count as one row. */
    uint64_t rows = tensor->dims && tensor->shape[0] && !strcmp(tensor->dtype, "F32") ? tensor->shape[0] : 1;
    return (struct ps_shape){rows, tensor->count / rows, residue ? residue + tensor->start : NULL};
}

/* Whether so many rows begin with a zero that leaving them out may save a quarter of the frame. */
static int looks_sparse(const struct ps_learner *learner, const struct ps_gradient *gradients)
{
    const struct ps_weights *weights = learner->weights;
    uint64_t zeros = 0;
    for (uint64_t i = 0; i < weights->trained; i++) {
        struct ps_shape shape = ps_shape_of(table_of(weights) + i, NULL);
        uint64_t size = shape.width * width_of(learner->dtype);
        if (!gradients[i].values || shape.rows < 4 || size < PS_LEAST_ROW)
            continue;
        for (uint64_t row = 0; row < shape.rows; row++)
            zeros += gradients[i].values[row * shape.width] == 0.0f ? shape.width : 0;
    }
    return zeros > weights->parameters / 4;
}

void ps_frame_begin(struct ps_learner *learner, char *payload, enum ps_frame_kind kind)
{
    const struct ps_weights *weights = learner->weights;
    learner->writing = (struct ps_writing){
        .payload = {.at = payload,
                    .dtype = learner->dtype,
                    .skips_zeros = learner->skips_zeros,
                    .residue = learner->residue,
                    .end = kind == PS_DENSE ? weights->parameters * width_of(learner->dtype)
                                            : ps_first_block(weights)},
        .kind = kind,
    };
}

double ps_frame_dense(struct ps_learner *learner, uint64_t number, const float *values)
{
    const struct ps_weights *weights = learner->weights;
    const struct ps_tensor *tensor = table_of(weights) + number;
    const struct ps_payload *payload = &learner->writing.payload;
    uint64_t width = width_of(payload->dtype), at = tensor->start, end = at + tensor->count;
    uint64_t next = number + 1 < weights->trained ? tensor[1].start : weights->parameters;
    double squares = 0.0;
    if (values)
        squares = ps_copy(payload->dtype, payload->at + at * width, values, tensor->count,
                          payload->residue ? payload->residue + at : NULL);
    /* An earlier frame may have left values in the padding. */
    uint64_t from = values ? end : at;
    memset(payload->at + from * width, 0, (next - from) * width);
    return squares;
}

int ps_frame_append(struct ps_learner *learner, uint64_t number,
                    const struct ps_gradient *gradient, double *squares, uint64_t *bad)
{
    struct ps_writing *writing = &learner->writing;
    struct ps_payload payload = writing->payload;
    const struct ps_tensor *tensor = table_of(learner->weights) + number;
    struct ps_shape shape = ps_shape_of(tensor, payload.residue);
    struct ps_block block = {.tensor = (uint32_t)number};
    payload.squares = 0.0;
    int result = write_block(&payload, &block, gradient, &shape, bad);
    if (result)
        return result;
    memcpy(payload.at + writing->blocks++ * sizeof block, &block, sizeof block);
    *squares = tensor->role == PS_BUFFER ? 0.0 : payload.squares; /* of any bits: it is assigned */
    payload.squares = writing->payload.squares + *squares;
    writing->payload = payload;
    return 0;
}

static int by_tensor(const void *one, const void *other)
{
    uint32_t a = ((const struct ps_block *)one)->tensor;
    uint32_t b = ((const struct ps_block *)other)->tensor;
    return a < b ? -1 : a > b;
}

void ps_sort_blocks(char *payload, uint32_t blocks)
{
    qsort(payload, blocks, sizeof(struct ps_block), by_tensor);
}

/* Appends a gradient of zero, for optimizers whose momentum or decay moves a tensor without one. */
static void append_zeros(struct ps_writing *writing, const struct ps_tensor *tensor,
                         uint64_t number)
{
    struct ps_payload *payload = &writing->payload;
    uint64_t bytes = tensor->count * width_of(payload->dtype);
    struct ps_block block = {.tensor = (uint32_t)number, .form = PS_DENSE};
    block.indices_at = block.values_at = payload->end;
    memset(payload->at + payload->end, 0, bytes);
    memcpy(payload->at + writing->blocks++ * sizeof block, &block, sizeof block);
    payload->end += rounded(bytes);
}

int ps_frame_whole(struct ps_learner *learner, char *payload, const struct ps_gradient *gradients,
                   uint64_t *number, uint64_t *bad)
{
    const struct ps_tensor *table = table_of(learner->weights);
    const uint64_t trained = learner->weights->trained;
    int rows = 0, products = 0, result = 0;
    double squares;
    learner->writing.kind = 0;
    for (uint64_t i = 0; i < trained; i++) {
        products |= gradients[i].factors != NULL;
        rows |= gradients[i].indices != NULL;
        /* Checked before anything is written, because writing uses up the residue. */
        *number = i;
        if (gradients[i].indices && !gradients[i].factors &&
            is_bad(&gradients[i], ps_shape_of(&table[i], NULL).rows, bad))
            return PS_BAD_ROW;
    }
    int in_blocks = rows || products || (learner->skips_zeros && looks_sparse(learner, gradients));
    ps_frame_begin(learner, payload, in_blocks ? PS_ROWS : PS_DENSE);
    learner->writing.sorted = 1;
    for (uint64_t i = 0; i < trained && !result; i++) {
        *number = i;
        if (!in_blocks)
            learner->writing.payload.squares += ps_frame_dense(learner, i, gradients[i].values);
        else if (gradients[i].values)
            result = ps_frame_append(learner, i, &gradients[i], &squares, bad);
        else if (!rows && !learner->skips_zeros)
            append_zeros(&learner->writing, &table[i], i);
    }
    if (result)
        learner->writing.kind = 0;
    return result;
}

void ps_frame_assign(struct ps_learner *learner, char *payload, const struct ps_gradient *values,
                     uint64_t stream, uint32_t flags, uint64_t steps)
{
    const struct ps_weights *weights = learner->weights;
    double squares;
    uint64_t bad;
    learner->writing = (struct ps_writing){
        .payload = {.at = payload, .dtype = PS_FLOAT32, .end = ps_first_block(weights)},
        .kind = PS_ASSIGN,
        .sorted = 1,
        .flags = flags,
        .stream = stream,
        .steps = steps,
    };
    for (uint64_t i = 0; i < weights->tensors; i++) {
        struct ps_gradient whole = {.values = values[i].values};
        if (whole.values)
            ps_frame_append(learner, i, &whole, &squares, &bad); /* cannot fail */
    }
}
