/*
 * gadei_ps._native: the ring's protocol for Python. Addresses are integers: the callers hold the
 * mappings, this file holds nothing. Calls that may wait, or copy much, release the GIL.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/prctl.h>

#include "ps_land.h"
#include "ps_lease.h"
#include "ps_product.h"
#include "ps_ring.h"
#include "ps_sync.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
#define WRITE_WITH_GIL (1u << 14) /* values; below, handing the GIL over costs more than the copy */

static int numbers(PyObject *const *args, Py_ssize_t given, Py_ssize_t wanted, uint64_t *out)
{
    if (given != wanted) {
        PyErr_Format(PyExc_TypeError, "takes %zd arguments, not %zd", wanted, given);
        return -1;
    }
    for (Py_ssize_t i = 0; i < wanted; i++) {
        out[i] = PyLong_AsUnsignedLongLong(args[i]);
        if (out[i] == (uint64_t)-1 && PyErr_Occurred())
            return -1;
    }
    return 0;
}

#define TAKES(n)                               \
    uint64_t arg[n];                           \
    if (numbers(args, count, (n), arg) < 0)    \
        return NULL;

#define METHOD(name) static PyObject *name(PyObject *self, PyObject *const *args, Py_ssize_t count)
#define UNUSED (void)self

/* A wait that is over at once needs no other thread to run meanwhile, and handing the GIL over costs
 * as much as all of it. call: with the time it may take as `patience`. */
#define WAITING(result, call)                 \
    do {                                      \
        uint64_t patience = 0;                \
        result = (call);                      \
        if (result == PS_TIMEOUT) {           \
            Py_BEGIN_ALLOW_THREADS            \
            patience = arg[count - 1];        \
            result = (call);                  \
            Py_END_ALLOW_THREADS              \
        }                                     \
    } while (0)

#define RING ((struct ps_ring *)arg[0])
#define CONTROL ((const struct ps_control *)arg[1])

METHOD(claim)
{
    UNUSED;
    TAKES(3)
    struct ps_frame *frame;
    int result;
    WAITING(result, (frame = ps_claim(RING, CONTROL, patience, &result), result));
    return frame ? PyLong_FromUnsignedLongLong((uint64_t)frame) : PyLong_FromLong(result);
}

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

METHOD(wait_grant)
{
    UNUSED;
    TAKES(4)
    int result;
    WAITING(result, ps_wait_grant(RING, CONTROL, arg[2], patience));
    return PyLong_FromLong(result);
}

METHOD(wait_applied)
{
    UNUSED;
    TAKES(4)
    int result;
    WAITING(result, ps_wait_applied(RING, CONTROL, arg[2], patience));
    return PyLong_FromLong(result);
}

METHOD(take_work)
{
    UNUSED;
    TAKES(3)
    uint64_t item = 0;
    int result;
    WAITING(result, ps_take_work(RING, CONTROL, patience, &item));
    return result ? PyLong_FromLong(result) : PyLong_FromUnsignedLongLong(item);
}

METHOD(snapshot)
{
    UNUSED;
    TAKES(5)
    int whole;
    Py_BEGIN_ALLOW_THREADS
    whole = ps_snapshot((const struct ps_control *)arg[0], (uint32_t)arg[1], (void *)arg[2],
                        (const void *)arg[3], arg[4]);
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(whole);
}

METHOD(lease_make)
{
    UNUSED;
    TAKES(1)
    int error = -ps_lease_make(arg[0]);
    if (error) {
        errno = error;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    Py_RETURN_NONE;
}

METHOD(lease_take)
{
    UNUSED;
    TAKES(2)
    int result;
    Py_BEGIN_ALLOW_THREADS
    result = ps_lease_take(arg[0], arg[1]);
    Py_END_ALLOW_THREADS
    if (result <= -1000) {
        errno = -1000 - result;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    return PyLong_FromLong(result);
}

METHOD(lease_release)
{
    UNUSED;
    TAKES(1)
    ps_lease_release(arg[0]);
    Py_RETURN_NONE;
}

METHOD(populate)
{
    UNUSED;
    TAKES(2)
    /* Best effort: kernels before 5.14 fill them at the first access. */
    Py_BEGIN_ALLOW_THREADS
    madvise((void *)arg[0], arg[1], MADV_POPULATE_WRITE);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

METHOD(futex_wait)
{
    UNUSED;
    TAKES(3)
    Py_BEGIN_ALLOW_THREADS
    ps_futex_wait((const uint32_t *)arg[0], (uint32_t)arg[1], arg[2]);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

METHOD(futex_wake)
{
    UNUSED;
    TAKES(1)
    ps_futex_wake((const uint32_t *)arg[0]);
    Py_RETURN_NONE;
}

METHOD(bell)
{
    UNUSED;
    TAKES(1)
    ps_ring_bell((uint32_t *)arg[0]);
    Py_RETURN_NONE;
}

METHOD(load)
{
    UNUSED;
    TAKES(1)
    return PyLong_FromUnsignedLongLong(ps_get(arg[0]));
}

METHOD(store)
{
    UNUSED;
    TAKES(2)
    ps_set(arg[0], arg[1]);
    Py_RETURN_NONE;
}

METHOD(load32)
{
    UNUSED;
    TAKES(1)
    return PyLong_FromUnsignedLong(ps_get32(arg[0]));
}

METHOD(store32)
{
    UNUSED;
    TAKES(2)
    ps_set32(arg[0], (uint32_t)arg[1]);
    Py_RETURN_NONE;
}

METHOD(address)
{
    UNUSED;
    if (count != 1) {
        PyErr_SetString(PyExc_TypeError, "takes 1 argument");
        return NULL;
    }
    Py_buffer view;
    if (PyObject_GetBuffer(args[0], &view, PyBUF_SIMPLE) < 0)
        return NULL;
    PyObject *result = PyLong_FromVoidPtr(view.buf);
    PyBuffer_Release(&view);
    return result;
}

METHOD(die_with_parent)
{
    UNUSED;
    TAKES(1)
    if (prctl(PR_SET_PDEATHSIG, (unsigned long)arg[0], 0, 0, 0) < 0)
        return PyErr_SetFromErrno(PyExc_OSError);
    Py_RETURN_NONE;
}

static int add_field(PyObject *fields, const char *name, size_t at, size_t size)
{
    PyObject *pair = Py_BuildValue("(nn)", (Py_ssize_t)at, (Py_ssize_t)size);
    int result = pair ? PyDict_SetItemString(fields, name, pair) : -1;
    Py_XDECREF(pair);
    return result;
}

static int add_struct(PyObject *all, const char *name, size_t size, PyObject *fields)
{
    if (!fields)
        return -1;
    PyObject *pair = Py_BuildValue("(nN)", (Py_ssize_t)size, fields);
    int result = pair ? PyDict_SetItemString(all, name, pair) : -1;
    Py_XDECREF(pair);
    return result;
}

#define FIELD(type, field)                                                                \
    if (add_field(fields, #field, offsetof(struct type, field),                           \
                  sizeof(((struct type *)0)->field)) < 0)                                 \
        goto failed;
#define BEGIN(type) fields = PyDict_New(); if (!fields) goto failed;
#define END(type)                                                                         \
    if (add_struct(all, #type, sizeof(struct type), fields) < 0)                          \
        goto failed_all;

/* The layout as the compiler sees it, for the test that compares it with the NumPy dtypes. */
METHOD(layout)
{
    UNUSED;
    (void)args;
    (void)count;
    PyObject *fields = NULL, *all = PyDict_New();
    if (!all)
        return NULL;
    BEGIN(ps_header)
    FIELD(ps_header, magic) FIELD(ps_header, layout_version) FIELD(ps_header, kind)
    FIELD(ps_header, job_id) FIELD(ps_header, bytes) FIELD(ps_header, generation)
    FIELD(ps_header, owner_pid) FIELD(ps_header, index) FIELD(ps_header, owner_start)
    FIELD(ps_header, job_name)
    END(ps_header)
    BEGIN(ps_shard)
    FIELD(ps_shard, heartbeat) FIELD(ps_shard, sequence) FIELD(ps_shard, frames)
    FIELD(ps_shard, parked) FIELD(ps_shard, tid) FIELD(ps_shard, recovered)
    FIELD(ps_shard, cpu) FIELD(ps_shard, mode) FIELD(ps_shard, lease)
    END(ps_shard)
    BEGIN(ps_server)
    FIELD(ps_server, pid) FIELD(ps_server, state) FIELD(ps_server, start) FIELD(ps_server, beat)
    END(ps_server)
    BEGIN(ps_entry)
    FIELD(ps_entry, generation) FIELD(ps_entry, wanted) FIELD(ps_entry, pid) FIELD(ps_entry, gone) FIELD(ps_entry, pid_start)
    FIELD(ps_entry, name) FIELD(ps_entry, served) FIELD(ps_entry, retired) FIELD(ps_entry, grant)
    FIELD(ps_entry, grant_seq) FIELD(ps_entry, member) FIELD(ps_entry, base) FIELD(ps_entry, obsolete)
    FIELD(ps_entry, applied) FIELD(ps_entry, dropped)
    FIELD(ps_entry, refused) FIELD(ps_entry, samples) FIELD(ps_entry, loss)
    FIELD(ps_entry, started) FIELD(ps_entry, finished) FIELD(ps_entry, version)
    FIELD(ps_entry, staleness_sum) FIELD(ps_entry, staleness_max) FIELD(ps_entry, clock)
    FIELD(ps_entry, reason) FIELD(ps_entry, drained) FIELD(ps_entry, unasked) FIELD(ps_entry, handed)
    FIELD(ps_entry, histogram) FIELD(ps_entry, norm)
    FIELD(ps_entry, outstanding) FIELD(ps_entry, items)
    END(ps_entry)
    BEGIN(ps_control)
    FIELD(ps_control, header) FIELD(ps_control, shards) FIELD(ps_control, slots)
    FIELD(ps_control, ahead) FIELD(ps_control, mode) FIELD(ps_control, report)
    FIELD(ps_control, refuse_nonfinite) FIELD(ps_control, staleness_aware)
    FIELD(ps_control, optimizer) FIELD(ps_control, spin_ns) FIELD(ps_control, hyper)
    FIELD(ps_control, phase) FIELD(ps_control, stop) FIELD(ps_control, pause) FIELD(ps_control, temporary) FIELD(ps_control, saves)
    FIELD(ps_control, sync_wanted) FIELD(ps_control, wave) FIELD(ps_control, sync_done)
    FIELD(ps_control, model_ready) FIELD(ps_control, watchdog_pid)
    FIELD(ps_control, watchdog_start) FIELD(ps_control, lease_generation)
    FIELD(ps_control, lease_pid) FIELD(ps_control, lease_state) FIELD(ps_control, lease_start)
    FIELD(ps_control, lease_shards)
    FIELD(ps_control, version) FIELD(ps_control, supersteps_done) FIELD(ps_control, shard_bell)
    FIELD(ps_control, manager_bell) FIELD(ps_control, sleepers) FIELD(ps_control, superstep)
    FIELD(ps_control, work) FIELD(ps_control, batches)
    FIELD(ps_control, epochs) FIELD(ps_control, seed) FIELD(ps_control, next)
    FIELD(ps_control, epochs_done) FIELD(ps_control, requeued)
    FIELD(ps_control, past_applied) FIELD(ps_control, past_dropped)
    FIELD(ps_control, past_refused) FIELD(ps_control, past_samples)
    FIELD(ps_control, requeued_total) FIELD(ps_control, lease)
    FIELD(ps_control, heir)
    FIELD(ps_control, server_deaths) FIELD(ps_control, server_starts)
    FIELD(ps_control, learner_deaths) FIELD(ps_control, watchdog_starts)
    FIELD(ps_control, checkpoints) FIELD(ps_control, checkpoint_version)
    FIELD(ps_control, checkpoint_failures) FIELD(ps_control, started)
    FIELD(ps_control, config) FIELD(ps_control, finished) FIELD(ps_control, server) FIELD(ps_control, shard) FIELD(ps_control, roster)
    FIELD(ps_control, superstep_action) FIELD(ps_control, superstep_reason) FIELD(ps_control, superstep_upto)
    FIELD(ps_control, requeue) FIELD(ps_control, sync_text)
    END(ps_control)
    BEGIN(ps_tensor)
    FIELD(ps_tensor, name) FIELD(ps_tensor, role) FIELD(ps_tensor, dims) FIELD(ps_tensor, shape)
    FIELD(ps_tensor, start) FIELD(ps_tensor, count)
    END(ps_tensor)
    BEGIN(ps_weights)
    FIELD(ps_weights, header) FIELD(ps_weights, tensors) FIELD(ps_weights, table_at)
    FIELD(ps_weights, data_at) FIELD(ps_weights, elements) FIELD(ps_weights, parameters)
    FIELD(ps_weights, values)
    END(ps_weights)
    BEGIN(ps_record)
    FIELD(ps_record, cursor) FIELD(ps_record, ring) FIELD(ps_record, generation)
    FIELD(ps_record, sequence) FIELD(ps_record, step) FIELD(ps_record, rate) FIELD(ps_record, version) FIELD(ps_record, applies)
    FIELD(ps_record, steps) FIELD(ps_record, supersteps) FIELD(ps_record, booked)
    END(ps_record)
    BEGIN(ps_journal)
    FIELD(ps_journal, used) FIELD(ps_journal, words)
    END(ps_journal)
    BEGIN(ps_run)
    FIELD(ps_run, sequence) FIELD(ps_run, started) FIELD(ps_run, finished) FIELD(ps_run, action)
    FIELD(ps_run, censored)
    END(ps_run)
    BEGIN(ps_state)
    FIELD(ps_state, header) FIELD(ps_state, streams) FIELD(ps_state, slots_at)
    FIELD(ps_state, slot_bytes) FIELD(ps_state, undo_at) FIELD(ps_state, record)
    FIELD(ps_state, applied) FIELD(ps_state, journal) FIELD(ps_state, runs)
    END(ps_state)
    BEGIN(ps_frame)
    FIELD(ps_frame, sequence) FIELD(ps_frame, generation) FIELD(ps_frame, clock)
    FIELD(ps_frame, version) FIELD(ps_frame, kind) FIELD(ps_frame, dtype)
    FIELD(ps_frame, payload_bytes) FIELD(ps_frame, flags) FIELD(ps_frame, blocks)
    FIELD(ps_frame, batch) FIELD(ps_frame, samples) FIELD(ps_frame, rate_scale)
    FIELD(ps_frame, loss) FIELD(ps_frame, started) FIELD(ps_frame, finished) FIELD(ps_frame, squares)
    END(ps_frame)
    BEGIN(ps_block)
    FIELD(ps_block, tensor) FIELD(ps_block, form) FIELD(ps_block, rows)
    FIELD(ps_block, indices_at) FIELD(ps_block, values_at)
    END(ps_block)
    BEGIN(ps_ring)
    FIELD(ps_ring, header) FIELD(ps_ring, slots) FIELD(ps_ring, shards)
    FIELD(ps_ring, slot_bytes) FIELD(ps_ring, slots_at) FIELD(ps_ring, capacity)
    FIELD(ps_ring, head) FIELD(ps_ring, waits_slot) FIELD(ps_ring, waits_work)
    FIELD(ps_ring, hold) FIELD(ps_ring, wants) FIELD(ps_ring, heartbeat) FIELD(ps_ring, pulled)
    FIELD(ps_ring, work_tail) FIELD(ps_ring, left) FIELD(ps_ring, released) FIELD(ps_ring, work_head)
    FIELD(ps_ring, work_items) FIELD(ps_ring, tail)
    END(ps_ring)
    return all;
failed:
    Py_XDECREF(fields);
failed_all:
    Py_DECREF(all);
    return NULL;
}

#define ENTRY(name, text) {#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL, text}

static PyMethodDef methods[] = {
    ENTRY(claim, "claim(ring, control, timeout_ns) -> address of the free slot, or a result < 0"),
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
    ENTRY(wait_grant, "wait_grant(ring, control, clock, timeout_ns) -> 0 or a result < 0"),
    ENTRY(wait_applied, "wait_applied(ring, control, sequence, timeout_ns) -> 0 or a result < 0"),
    ENTRY(take_work, "take_work(ring, control, timeout_ns) -> batch, or a result < 0"),
    ENTRY(snapshot, "snapshot(control, shard, to, from, bytes) -> whether the copy is whole"),
    ENTRY(lease_make, "lease_make(lease): when no process that knows it is alive"),
    ENTRY(lease_take, "lease_take(lease, timeout_ns) -> whether its holder died; or PS_TIMEOUT"),
    ENTRY(lease_release, "lease_release(lease): by the thread that holds it"),
    ENTRY(populate, "populate(address, bytes): page tables filled, so that no access faults"),
    ENTRY(futex_wait, "futex_wait(word, expected, timeout_ns)"),
    ENTRY(futex_wake, "futex_wake(word)"),
    ENTRY(bell, "bell(word): add one and wake all"),
    ENTRY(load, "load(word) -> 64 bits, acquire"),
    ENTRY(store, "store(word, value), 64 bits, release"),
    ENTRY(load32, "load32(word) -> 32 bits, acquire"),
    ENTRY(store32, "store32(word, value), 32 bits, release"),
    ENTRY(address, "address(buffer) -> int"),
    ENTRY(die_with_parent, "die_with_parent(signal): PR_SET_PDEATHSIG"),
    ENTRY(layout, "layout() -> {struct: (size, {field: (offset, size)})}"),
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "gadei_ps._native", "The ring's protocol in C.", -1, methods,
    NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__native(void)
{
    PyObject *made = PyModule_Create(&module);
    if (!made)
        return NULL;
    /* For the driver to call, and how much room its argument takes. */
    PyObject *land = PyLong_FromVoidPtr((void *)(uintptr_t)ps_land);
    int failed = PyModule_AddObjectRef(made, "LAND", land) < 0 ||
                 PyModule_AddIntConstant(made, "LANDING_BYTES", sizeof(struct ps_landing)) < 0;
    Py_XDECREF(land);
    if (failed || PyModule_AddIntMacro(made, PS_TIMEOUT) < 0 ||
        PyModule_AddIntMacro(made, PS_STOPPED) < 0 ||
        PyModule_AddIntMacro(made, PS_EVICTED) < 0 || PyModule_AddIntMacro(made, PS_FINISHED) < 0) {
        Py_DECREF(made);
        return NULL;
    }
    return made;
}
