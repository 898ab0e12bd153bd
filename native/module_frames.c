/* How a gradient gets into a slot of the ring and is published; see module.h. */
#include "module.h"

#include <stdlib.h>

#include "ps_land.h"
#include "ps_product.h"

#define WRITE_WITH_GIL (1u << 14) /* values; below, handing the GIL over costs more than the copy */

static PyObject *publish_frame(struct ps_ring *ring, const struct ps_control *control,
                               struct ps_frame frame)
{
    return PyLong_FromUnsignedLongLong(ps_publish_frame(ring, control, frame));
}

METHOD(publish)
{
    UNUSED;
    if (count != 15) {
        PyErr_SetString(PyExc_TypeError, "takes 15 arguments");
        return NULL;
    }
    uint64_t arg[10];
    if (numbers(args, 10, 10, arg) < 0)
        return NULL;
    double real[5];
    for (int i = 0; i < 5; i++) {
        real[i] = PyFloat_AsDouble(args[10 + i]);
        if (real[i] == -1.0 && PyErr_Occurred())
            return NULL;
    }
    return publish_frame(RING, CONTROL, (struct ps_frame){
        .clock = arg[2],
        .version = arg[3],
        .dtype = (uint32_t)arg[4],
        .kind = (uint32_t)arg[5],
        .blocks = (uint32_t)arg[6],
        .payload_bytes = arg[7],
        .batch = arg[8],
        .samples = (uint32_t)arg[9],
        .squares = real[0],
        .rate_scale = (float)real[1],
        .loss = real[2],
        .started = real[3],
        .finished = real[4],
    });
}

METHOD(copy)
{
    UNUSED;
    TAKES(5)
    if (arg[0] < PS_FLOAT32 || arg[0] > PS_FLOAT16) {
        PyErr_SetString(PyExc_ValueError, "unknown dtype code");
        return NULL;
    }
    double squares;
    Py_BEGIN_ALLOW_THREADS
    squares = ps_copy((uint32_t)arg[0], (void *)arg[1], (const float *)arg[2], arg[3],
                      (float *)arg[4]);
    Py_END_ALLOW_THREADS
    return PyFloat_FromDouble(squares);
}

/* IndexError(number of the tensor, row). */
static PyObject *bad_row(uint64_t tensor, int64_t row)
{
    PyObject *where = Py_BuildValue("(KL)", (unsigned long long)tensor, (long long)row);
    if (where)
        PyErr_SetObject(PyExc_IndexError, where);
    Py_XDECREF(where);
    return NULL;
}

#define HEAD 5 /* arguments of write before the gradients' */
#define FEW_TENSORS 64

static struct ps_gradient gradient_of(const uint64_t *arg)
{
    return (struct ps_gradient){(const float *)arg[0], (const int64_t *)arg[1], arg[2],
                                (const float *)arg[3]};
}

/* The gradients of all tensors: four arguments each, or the address of one flat array. */
static int take_gradients(const struct ps_weights *weights, PyObject *const *args,
                          Py_ssize_t count, struct ps_gradient *gradients)
{
    const struct ps_tensor *table =
        (const struct ps_tensor *)((const char *)weights + weights->table_at);
    uint64_t flat, arg[4];
    if (count == 1) {
        if (numbers(args, 1, 1, &flat) < 0)
            return -1;
        for (uint64_t i = 0; i < weights->tensors; i++)
            gradients[i] = (struct ps_gradient){.values = (const float *)flat + table[i].start};
        return 0;
    }
    if ((uint64_t)count != 4 * weights->tensors) {
        PyErr_SetString(PyExc_TypeError, "takes four numbers for each tensor");
        return -1;
    }
    for (uint64_t i = 0; i < weights->tensors; i++) {
        if (numbers(args + 4 * i, 4, 4, arg) < 0)
            return -1;
        gradients[i] = gradient_of(arg);
    }
    return 0;
}

/* A frame's payload from the arguments that tell the gradients; -1 with an exception set. */
static int write_slot(const struct ps_weights *weights, uint32_t dtype, char *payload, int spare,
                      float *left, PyObject *const *args, Py_ssize_t count,
                      struct ps_written *written)
{
    struct ps_gradient few[FEW_TENSORS], *gradients = few;
    if (weights->tensors > FEW_TENSORS && !(gradients = malloc(weights->tensors * sizeof *few))) {
        PyErr_NoMemory();
        return -1;
    }
    int result = 0, taken = take_gradients(weights, args, count, gradients);
    uint64_t work = weights->elements;
    for (uint64_t i = 0; i < weights->tensors && !taken; i++)
        work += gradients[i].count * (gradients[i].factors ? weights->elements : 1);
    if (!taken && work < WRITE_WITH_GIL) {
        result = ps_write_frame(weights, dtype, payload, gradients, spare, left, written);
    } else if (!taken) {
        Py_BEGIN_ALLOW_THREADS
        result = ps_write_frame(weights, dtype, payload, gradients, spare, left, written);
        Py_END_ALLOW_THREADS
    }
    if (result == PS_BAD_ROW)
        bad_row(written->tensor, gradients[written->tensor].indices[written->bad]);
    if (result == PS_NO_MEMORY)
        PyErr_NoMemory();
    if (gradients != few)
        free(gradients);
    return taken || result ? -1 : 0;
}

METHOD(write_frame)
{
    UNUSED;
    uint64_t arg[HEAD];
    if (count < HEAD + 1) {
        PyErr_SetString(PyExc_TypeError, "takes six arguments or more");
        return NULL;
    }
    if (numbers(args, HEAD, HEAD, arg) < 0)
        return NULL;
    struct ps_written written;
    if (write_slot((const struct ps_weights *)arg[0], (uint32_t)arg[1], (char *)arg[4], (int)arg[2],
                   (float *)arg[3], args + HEAD, count - HEAD, &written) < 0)
        return NULL;
    return Py_BuildValue("(IIKd)", written.kind, written.blocks, (unsigned long long)written.bytes,
                         written.squares);
}

#define PUSH_HEAD 13 /* arguments of push before the gradients' */

/* claim, write and publish in one, where nothing need be waited for. */
METHOD(push)
{
    UNUSED;
    uint64_t arg[10];
    double real[3];
    if (count < PUSH_HEAD + 1) {
        PyErr_SetString(PyExc_TypeError, "takes 14 arguments or more");
        return NULL;
    }
    if (numbers(args, 10, 10, arg) < 0)
        return NULL;
    for (int i = 0; i < 3; i++) {
        real[i] = PyFloat_AsDouble(args[10 + i]);
        if (real[i] == -1.0 && PyErr_Occurred())
            return NULL;
    }
    struct ps_ring *ring = RING;
    int result = ps_wait_grant(ring, CONTROL, arg[6], 0);
    struct ps_frame *frame = result ? NULL : ps_claim(ring, CONTROL, 0, &result);
    if (!frame)
        return PyLong_FromLong(result);
    struct ps_written written;
    if (write_slot((const struct ps_weights *)arg[2], (uint32_t)arg[3], (char *)frame + PS_PAYLOAD_AT,
                   (int)arg[4], (float *)arg[5], args + PUSH_HEAD, count - PUSH_HEAD, &written) < 0)
        return NULL;
    return publish_frame(ring, CONTROL, (struct ps_frame){
        .clock = arg[6],
        .version = arg[7],
        .dtype = (uint32_t)arg[3],
        .kind = written.kind,
        .blocks = written.blocks,
        .payload_bytes = written.bytes,
        .batch = arg[8],
        .samples = (uint32_t)arg[9],
        .squares = written.squares,
        .rate_scale = (float)real[0],
        .loss = real[1],
        .started = real[2],
        .finished = ps_clock(),
    });
}

#define LANDING_HEAD 15 /* arguments of prepare_landing that are integers */

METHOD(prepare_landing)
{
    UNUSED;
    uint64_t arg[LANDING_HEAD];
    double real[3];
    if (count != LANDING_HEAD + 3) {
        PyErr_SetString(PyExc_TypeError, "takes 18 arguments");
        return NULL;
    }
    if (numbers(args, LANDING_HEAD, LANDING_HEAD, arg) < 0)
        return NULL;
    for (int i = 0; i < 3; i++) {
        real[i] = PyFloat_AsDouble(args[LANDING_HEAD + i]);
        if (real[i] == -1.0 && PyErr_Occurred())
            return NULL;
    }
    *(struct ps_landing *)arg[2] = (struct ps_landing){
        .ring = RING,
        .control = CONTROL,
        .sums = (const uint64_t *)arg[3],
        .tensors = arg[4],
        .parts = arg[5],
        .loss_there = arg[6],
        .frame = {
            .clock = arg[7],
            .version = arg[8],
            .dtype = (uint32_t)arg[9],
            .kind = (uint32_t)arg[10],
            .blocks = (uint32_t)arg[11],
            .payload_bytes = arg[12],
            .batch = arg[13],
            .samples = (uint32_t)arg[14],
            .rate_scale = (float)real[0],
            .loss = real[1],
            .started = real[2],
        },
    };
    Py_RETURN_NONE;
}

METHOD(nonzeros)
{
    UNUSED;
    TAKES(2)
    const float *values = (const float *)arg[0];
    uint64_t found = 0;
    Py_BEGIN_ALLOW_THREADS
    for (uint64_t i = 0; i < arg[1]; i++)
        found += values[i] != 0.0f;
    Py_END_ALLOW_THREADS
    return PyLong_FromUnsignedLongLong(found);
}

METHOD(sparse_product)
{
    UNUSED;
    TAKES(6)
    Py_BEGIN_ALLOW_THREADS
    ps_sparse_product((float *)arg[0], (const float *)arg[1], (const float *)arg[2], arg[3], arg[4],
                      arg[5]);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

METHOD(first_block)
{
    UNUSED;
    TAKES(1)
    return PyLong_FromUnsignedLongLong(ps_first_block((const struct ps_weights *)arg[0]));
}

METHOD(append)
{
    UNUSED;
    TAKES(12)
    const struct ps_weights *weights = (const struct ps_weights *)arg[0];
    struct ps_payload payload = {(char *)arg[4], (uint32_t)arg[1], arg[5], 0.0};
    struct ps_gradient gradient = gradient_of(arg + 8);
    uint64_t bad = 0;
    int result;
    if (arg[7] >= weights->tensors) {
        PyErr_SetString(PyExc_ValueError, "no such tensor");
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    result = ps_append(weights, &payload, (uint32_t)arg[6], arg[7], &gradient, (int)arg[2],
                       (float *)arg[3], &bad);
    Py_END_ALLOW_THREADS
    if (result == PS_NO_MEMORY)
        return PyErr_NoMemory();
    if (result == PS_BAD_ROW)
        return bad_row(arg[7], gradient.indices[bad]);
    return Py_BuildValue("(Kd)", (unsigned long long)payload.end, payload.squares);
}

METHOD(sort_blocks)
{
    UNUSED;
    TAKES(2)
    ps_sort_blocks((char *)arg[0], (uint32_t)arg[1]);
    Py_RETURN_NONE;
}

PyMethodDef ps_frame_methods[] = {
    ENTRY(publish, "publish(ring, control, clock, version, dtype, kind, blocks, payload_bytes, "
                   "batch, samples, squares, rate_scale, loss, started, finished) -> sequence"),
    ENTRY(push, "push(ring, control, weights, dtype, spare, left, clock, version, batch, samples, "
                "rate_scale, loss, started, ...) -> sequence, or a result < 0; gradients as of "
                "write_frame"),
    ENTRY(copy, "copy(dtype, to, from, count, left) -> sum of squares; infinite if one is not finite"),
    ENTRY(write_frame, "write_frame(weights, dtype, spare, left, payload, flat), or for flat (values, indices, "
                 "count, factors) of each tensor -> kind, blocks, payload bytes, sum of squares"),
    ENTRY(prepare_landing, "prepare_landing(ring, control, landing, sums, tensors, parts, loss_there, "
                           "clock, version, dtype, kind, blocks, payload_bytes, batch, samples, "
                           "rate_scale, loss, started)"),
    ENTRY(nonzeros, "nonzeros(values, count) -> how many differ from zero"),
    ENTRY(sparse_product, "sparse_product(to, factors, matrix, count, rows, width)"),
    ENTRY(first_block, "first_block(weights) -> where the first block may begin"),
    ENTRY(append, "append(weights, dtype, spare, left, payload, at, blocks, tensor, values, indices, "
                  "count, factors) -> where the next block may begin, sum of squares"),
    ENTRY(sort_blocks, "sort_blocks(payload, blocks): by tensor"),
    {NULL, NULL, 0, NULL},
};
