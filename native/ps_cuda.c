/* See ps_cuda.h. */
#include "ps_cuda.h"

#include <stdlib.h>
#include <string.h>

/* As in learners/cuda/kernels.cu. */
enum { THREADS = 256, ITEMS = 224, AHEAD = 2, CHUNK_BYTES = 32 };
enum { FEW = 2048 };          /* rows named, which each block lists in its own memory */
enum { MANY_THREADS = 1024 }; /* of the one block that lists more */
enum { ROWS_BLOCKS = 132 };   /* that add up few rows; more take longer on an H200 */
enum { MOST_BLOCKS = 1024 };  /* that add up many rows, or gather */
#define SKIPPED (~0ull)

struct item {
    uint64_t from, to;
};

struct rows_args {
    uint64_t indices, values, count, rows, width, padding, keys, heads, listed, found, parts, part_count,
        to, residue;
    uint32_t wire, whole;
    uint64_t narrow;
};

struct whole_args {
    uint64_t chunks, residue, staging, parts, rows, dense;
    uint32_t wire, first;
    struct item items[ITEMS];
};

struct copy_args {
    uint64_t from, to, count;
};

struct stage_args {
    uint64_t loss, loss_to;
    uint32_t rows_blocks, whole_blocks;
    struct rows_args rows;
    struct whole_args whole;
    struct copy_args copy;
};

struct gather_args {
    uint64_t table, indices, to, rows, width, count, narrow;
};

static_assert(sizeof(struct stage_args) <= 4096, "the most that a kernel takes");

static uint64_t least(uint64_t a, uint64_t b) { return a < b ? a : b; }

static const struct ps_tensor *tensor_of(const struct ps_cuda *cuda, uint64_t number)
{
    const struct ps_weights *weights = cuda->of.weights;
    return (const struct ps_tensor *)((const char *)weights + weights->table_at) + number;
}

static uint64_t width_of(const struct ps_cuda *cuda) { return ps_width_of((uint32_t)cuda->of.wire); }

/* -- the context --------------------------------------------------------------------------------- */

int ps_cuda_begin(struct ps_cuda *cuda)
{
    uint64_t tensors = cuda->of.weights->tensors + 1;
    cuda->given = calloc(tensors, sizeof *cuda->given);
    cuda->to = calloc(tensors, sizeof *cuda->to);
    cuda->blocks = calloc(tensors, sizeof *cuda->blocks);
    cuda->ranges = calloc(tensors, sizeof *cuda->ranges);
    if (!cuda->given || !cuda->to || !cuda->blocks || !cuda->ranges)
        return PS_NO_MEMORY;
    return cuda->of.driver.get_context(&cuda->context);
}

void ps_cuda_end(struct ps_cuda *cuda)
{
    free(cuda->given);
    free(cuda->to);
    free(cuda->blocks);
    free(cuda->ranges);
}

int ps_cuda_enter(const struct ps_cuda *cuda, int *pushed)
{
    void *current = NULL;
    int failed = cuda->of.driver.get_context(&current);
    if (!failed && current != cuda->context) {
        failed = cuda->of.driver.push_context(cuda->context);
        *pushed = !failed;
    }
    return failed;
}

void ps_cuda_leave(const struct ps_cuda *cuda, int pushed)
{
    void *current;
    if (pushed)
        cuda->of.driver.pop_context(&current);
}

#define TRY(call)             \
    do {                      \
        int failed = (call);  \
        if (failed)           \
            return failed;    \
    } while (0)

/* -- push ---------------------------------------------------------------------------------------- */

static int launch(const struct ps_cuda *cuda, void *kernel, uint64_t blocks, unsigned threads,
                  void *stream, void *argument)
{
    return cuda->of.driver.launch(kernel, (unsigned)blocks, 1, 1, threads, 1, 1, 0, stream, &argument,
                                  NULL);
}

/* The place of each tensor in a dense frame, and the frame's size. */
static void lay_out_dense(struct ps_cuda *cuda)
{
    const struct ps_weights *weights = cuda->of.weights;
    for (uint64_t i = 0; i < weights->trained; i++)
        cuda->to[i] = tensor_of(cuda, i)->start * width_of(cuda);
    cuda->begin = 0;
    cuda->landed.kind = PS_DENSE;
    cuda->landed.blocks = 0;
    cuda->landed.bytes = weights->parameters * width_of(cuda);
}

/* The same of a frame of rows, and its blocks. A block has room for as many rows as may turn out to be
 * named; how many is known only on the device. */
static void lay_out_rows(struct ps_cuda *cuda)
{
    uint64_t at = cuda->begin = ps_first_block(cuda->of.weights), width = width_of(cuda);
    uint32_t blocks = 0;
    for (uint64_t i = 0; i < cuda->of.weights->trained; i++) {
        const struct ps_gradient *one = &cuda->given[i];
        cuda->to[i] = SKIPPED;
        if (!one->values && !one->indices && !one->count && !one->factors)
            continue;
        const struct ps_shape shape = ps_shape_of(tensor_of(cuda, i), NULL);
        uint64_t rows = least(one->count, shape.rows), listed = ps_rounded(8 * rows);
        uint64_t values = ps_rounded(width * rows * shape.width);
        struct ps_block *block = &cuda->blocks[blocks++];
        *block = (struct ps_block){.tensor = (uint32_t)i, .indices_at = at, .values_at = at};
        if (one->indices && ps_has_room(&shape, listed + values)) {
            block->form = PS_ROWS;
            block->rows = rows;
            block->values_at += listed;
            at += listed + values;
            continue;
        }
        block->form = PS_DENSE;
        if (!one->indices)
            cuda->to[i] = at;
        at += ps_rounded(width * shape.rows * shape.width);
    }
    cuda->landed.kind = PS_ROWS;
    cuda->landed.blocks = blocks;
    cuda->landed.bytes = at;
}

static uint64_t sums_at(const struct ps_cuda *cuda, uint64_t word)
{
    return cuda->of.outgoing[cuda->now].sums + 8 * word;
}

/* Where the parts of the sum of squares of a tensor begin among the sums on the device. */
static uint64_t parts_at(const struct ps_cuda *cuda, uint64_t tensor)
{
    return sums_at(cuda, PS_SUMS_ROWS + cuda->of.weights->tensors + cuda->of.first_chunk[tensor]);
}

/* The parts of a step that are not launched yet. */
struct pending {
    uint64_t loss;     /* its address, or 0 */
    uint32_t block;    /* of the frame, from which on rows are not staged */
    uint64_t tensor;   /* from which on whole tensors are not */
    uint64_t range;    /* of weights, from which on they are not copied */
    uint64_t to, from; /* of that copy */
};

/* Some rows of the next tensor that has rows, at the place of its block in the frame. *blocks: of the
 * kernel that does them. */
static int take_rows(const struct ps_cuda *cuda, struct pending *pending, void *stream,
                     struct rows_args *args, uint32_t *blocks)
{
    const struct ps_outgoing *out = &cuda->of.outgoing[cuda->now];
    const struct ps_block *block = &cuda->blocks[pending->block], *end = cuda->blocks + cuda->landed.blocks;
    while (block < end && !cuda->given[block->tensor].indices)
        block++;
    pending->block = (uint32_t)(block - cuda->blocks) + (block < end);
    if (block == end)
        return 0;
    const struct ps_gradient *given = &cuda->given[block->tensor];
    const struct ps_tensor *tensor = tensor_of(cuda, block->tensor);
    const struct ps_shape shape = ps_shape_of(tensor, NULL);
    const uint64_t *chunk = &cuda->of.first_chunk[block->tensor], count = given->count;
    int whole = block->form == PS_DENSE, many = count > FEW;
    if (whole && tensor->count)
        TRY(cuda->of.driver.set(out->buffer + block->values_at, 0, width_of(cuda) * tensor->count,
                                stream));
    *args = (struct rows_args){
        .indices = (uint64_t)given->indices,
        .values = (uint64_t)given->values,
        .count = count,
        .rows = shape.rows,
        .width = shape.width,
        .padding = (uint64_t)given->factors >> 1, /* see CudaLink.push_from */
        .keys = many ? cuda->lists : 0,
        .heads = many ? cuda->lists + 8 * cuda->listable : 0,
        .listed = whole ? 0 : out->buffer + block->indices_at,
        .found = sums_at(cuda, PS_SUMS_ROWS + block->tensor),
        .parts = parts_at(cuda, block->tensor),
        .part_count = chunk[1] - chunk[0],
        .to = out->buffer + block->values_at,
        .residue = cuda->of.residue ? cuda->of.residue + 4 * tensor->start : 0,
        .wire = (uint32_t)cuda->of.wire,
        .whole = (uint32_t)whole,
        .narrow = (uint64_t)given->factors & 1,
    };
    uint64_t pieces = count * ((shape.width + THREADS - 1) / THREADS);
    pieces = least(least(pieces, args->part_count), many ? MOST_BLOCKS : ROWS_BLOCKS);
    *blocks = pieces ? (uint32_t)pieces : 1; /* one at least writes `found` */
    return many ? launch(cuda, cuda->of.kernels.list_rows, 1, MANY_THREADS, stream, args) : 0;
}

/* The next whole tensors without one that has rows between them; in a dense frame, those that are not
 * given are zero. Returns the blocks of the kernel that do them. */
static uint32_t take_whole(const struct ps_cuda *cuda, struct pending *pending, struct whole_args *args)
{
    const uint64_t trained = cuda->of.weights->trained, *chunk = cuda->of.first_chunk;
    const struct ps_outgoing *out = &cuda->of.outgoing[cuda->now];
    uint64_t first = pending->tensor, end;
    while (first < trained && cuda->given[first].indices)
        first++;
    for (end = first; end < trained && end < first + ITEMS && !cuda->given[end].indices; end++) {
        args->items[end - first].from = (uint64_t)cuda->given[end].values;
        args->items[end - first].to = cuda->to[end];
    }
    pending->tensor = end;
    args->chunks = cuda->of.chunks + chunk[first] * CHUNK_BYTES;
    args->residue = cuda->of.residue;
    args->staging = out->buffer;
    args->parts = parts_at(cuda, first);
    args->rows = sums_at(cuda, PS_SUMS_ROWS);
    args->dense = cuda->landed.kind == PS_DENSE;
    args->wire = (uint32_t)cuda->of.wire;
    args->first = (uint32_t)first;
    return (uint32_t)(chunk[end] - chunk[first]);
}

/* The next range of weights. Returns the blocks of the kernel that copy it. */
static uint32_t take_copy(const struct ps_cuda *cuda, struct pending *pending, struct copy_args *args)
{
    const uint64_t *range = cuda->ranges[pending->range], each = AHEAD * THREADS;
    if (!pending->to || pending->range == cuda->range_count)
        return 0;
    pending->range++;
    *args = (struct copy_args){
        .from = pending->from + range[0],
        .to = pending->to + range[0],
        .count = (range[1] - range[0]) / 16,
    };
    return (uint32_t)((args->count + each - 1) / each);
}

static int launch_pending(const struct ps_cuda *cuda, struct pending pending, void *stream)
{
    struct stage_args args = {.loss = pending.loss, .loss_to = sums_at(cuda, PS_SUMS_LOSS)};
    for (;;) {
        args.rows_blocks = 0;
        TRY(take_rows(cuda, &pending, stream, &args.rows, &args.rows_blocks));
        args.whole_blocks = take_whole(cuda, &pending, &args.whole);
        uint32_t copying = take_copy(cuda, &pending, &args.copy);
        uint32_t blocks = args.rows_blocks + args.whole_blocks + copying;
        if (!blocks)
            return 0;
        TRY(launch(cuda, cuda->of.kernels.stage, blocks, THREADS, stream, &args));
    }
}

int ps_cuda_stage(struct ps_cuda *cuda, void *stream, uint64_t loss, uint64_t to, uint64_t from)
{
    const struct ps_outgoing *out = &cuda->of.outgoing[cuda->now];
    const uint64_t weights = sizeof(float) * cuda->of.weights->elements;
    uint64_t most = 0;
    int rows = 0, mixed = 0, aliased = to && loss - to < weights;
    for (uint64_t i = 0; i < cuda->of.weights->trained; i++) {
        rows |= cuda->given[i].indices != NULL;
        mixed |= (uint64_t)cuda->given[i].values - out->buffer < out->bytes;
        aliased |= to && (uint64_t)cuda->given[i].values - to < weights;
        most = cuda->given[i].count > most ? cuda->given[i].count : most;
    }
    if (rows && mixed) /* in a frame of rows no tensor lies where gradients() has it */
        return PS_MIXED;
    if (rows && most > FEW && most > cuda->listable)
        return PS_CROWDED;
    cuda->landed.loss_there = loss != 0;
    if (rows)
        lay_out_rows(cuda);
    else
        lay_out_dense(cuda);
    const struct pending all = {.loss = loss, .to = aliased ? 0 : to, .from = from};
    TRY(launch_pending(cuda, all, stream));
    if (aliased) /* the blocks of a launch are in no order */
        TRY(ps_cuda_copy(cuda, to, from, stream));
    return cuda->of.driver.record(cuda->of.staged, stream);
}

static int transfer(const struct ps_cuda *cuda, struct ps_learner *learner, const struct ps_facts *facts,
                    char *payload, struct ps_landing *landing)
{
    const struct ps_driver *driver = &cuda->of.driver;
    const struct ps_outgoing *out = &cuda->of.outgoing[cuda->now];
    struct ps_landed landed = cuda->landed;
    uint64_t chunks = cuda->of.first_chunk[cuda->of.weights->trained];
    uint64_t sums = PS_SUMS_ROWS + cuda->of.weights->tensors + chunks;
    void *push = cuda->of.push;
    memcpy(payload, cuda->blocks, landed.blocks * sizeof *cuda->blocks);
    TRY(driver->wait(push, cuda->of.staged, 0));
    if (landed.bytes > cuda->begin)
        TRY(driver->to_host((uint64_t)payload + cuda->begin, out->buffer + cuda->begin,
                            landed.bytes - cuda->begin, push));
    out->landed[PS_SUMS_BAD] = PS_NOT_LANDED;
    TRY(driver->to_host((uint64_t)out->landed, out->sums, 8 * sums, push));
    landed.sums = out->landed;
    landed.parts = chunks;
    return ps_frame_land(learner, landing, &landed, facts);
}

/* The event comes even if a call has failed: a part of the frame may be on its way into the slot. */
static int record_published(const struct ps_cuda *cuda)
{
    return cuda->of.driver.record(cuda->of.published, cuda->of.push);
}

int ps_cuda_transfer(struct ps_cuda *cuda, struct ps_learner *learner, const struct ps_facts *facts,
                     char *payload)
{
    int result = transfer(cuda, learner, facts, payload, &cuda->landing[cuda->now]);
    if (result)
        record_published(cuda);
    return result;
}

int ps_cuda_publish(struct ps_cuda *cuda, struct ps_learner *learner)
{
    int result = cuda->of.driver.call(cuda->of.push, ps_land, &cuda->landing[cuda->now]);
    int failed = record_published(cuda);
    if (result)
        return result;
    cuda->now = !cuda->now;
    cuda->failed = failed;
    ps_frame_counted(learner);
    return 0;
}

/* -- pull ---------------------------------------------------------------------------------------- */

int ps_cuda_fill(struct ps_cuda *cuda, uint64_t to, void *stream)
{
    for (uint64_t i = 0; i < cuda->range_count; i++) {
        uint64_t begin = cuda->ranges[i][0], bytes = cuda->ranges[i][1] - begin;
        if (bytes)
            TRY(cuda->of.driver.to_device(to + begin, cuda->of.source + begin, bytes, stream));
    }
    return 0;
}

int ps_cuda_copy(struct ps_cuda *cuda, uint64_t to, uint64_t from, void *stream)
{
    const struct pending copy = {
        .block = cuda->landed.blocks, /* no gradient */
        .tensor = cuda->of.weights->trained,
        .to = to,
        .from = from,
    };
    return launch_pending(cuda, copy, stream);
}

int ps_cuda_pull(struct ps_cuda *cuda, uint64_t to, void *stream)
{
    const struct ps_driver *driver = &cuda->of.driver;
    TRY(driver->record(cuda->of.read, stream));
    TRY(driver->wait(cuda->of.pull, cuda->of.read, 0));
    TRY(ps_cuda_fill(cuda, to, cuda->of.pull));
    return driver->record(cuda->of.arrived, cuda->of.pull);
}

int ps_cuda_gather(struct ps_cuda *cuda, uint64_t tensor, uint64_t indices, uint64_t count, uint64_t to,
                   uint64_t narrow, void *stream)
{
    const struct ps_tensor *found = tensor_of(cuda, tensor);
    const struct ps_shape shape = ps_shape_of(found, NULL);
    struct gather_args args = {cuda->of.source + 4 * found->start, indices, to, shape.rows,
                               shape.width, count, narrow};
    if (!count || !found->count)
        return 0;
    uint64_t blocks = least((count * shape.width + THREADS - 1) / THREADS, MOST_BLOCKS);
    return launch(cuda, cuda->of.kernels.gather, blocks, THREADS, stream, &args);
}
