/* gadei_ps._native: the ring's protocol for Python; see module.h. */
#include "module.h"

#include <errno.h>
#include <sys/mman.h>
#include <sys/prctl.h>

#include "ps_build.h"
#include "ps_guard.h"
#include "ps_learner.h"
#include "ps_lease.h"
#include "ps_process.h"
#include "ps_product.h"
#include "ps_atomic.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

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

#define WAITS(name, n, call)                  \
    METHOD(name)                              \
    {                                         \
        TAKES(n)                              \
        int result;                           \
        WAITING(result, call);                \
        return PyLong_FromLong(result);       \
    }

WAITS(wait_grant, 4, ps_wait_grant(RING, CONTROL, arg[2], patience))
WAITS(wait_applied, 4, ps_wait_applied(RING, CONTROL, arg[2], patience))
WAITS(wait_exclusive, 3, ps_wait_exclusive(RING, CONTROL, patience))
DOES(pause_learner, 3, ps_pause(RING, CONTROL, arg[2] != 0))
DOES(ask_exclusive, 3, ps_ask_exclusive(RING, CONTROL, arg[2] != 0))
RETURNS(is_exclusive, 2, PyBool_FromLong(ps_is_exclusive(RING, CONTROL)))
DOES(beat, 1, ps_beat(RING))

METHOD(take_work)
{
    TAKES(3)
    uint64_t item = 0;
    int result;
    WAITING(result, ps_take_work(RING, CONTROL, patience, &item));
    return result ? PyLong_FromLong(result) : PyLong_FromUnsignedLongLong(item);
}

static PyObject *none_or_error(int error)
{
    if (!error)
        Py_RETURN_NONE;
    errno = error;
    return PyErr_SetFromErrno(PyExc_OSError);
}

RETURNS(lease_make, 1, none_or_error(-ps_lease_make(arg[0])))
DOES(lease_release, 1, ps_lease_release(arg[0]))

METHOD(lease_take)
{
    TAKES(2)
    int result;
    Py_BEGIN_ALLOW_THREADS
    result = ps_lease_take(arg[0], arg[1]);
    Py_END_ALLOW_THREADS
    return result <= -1000 ? none_or_error(-1000 - result) : PyLong_FromLong(result);
}

METHOD(populate)
{
    TAKES(2)
    /* Best effort: kernels before 5.14 fill them at the first access. */
    int result;
    Py_BEGIN_ALLOW_THREADS
    result = madvise((void *)arg[0], arg[1], MADV_POPULATE_WRITE) ? errno : 0;
    Py_END_ALLOW_THREADS
    return PyLong_FromLong(result);
}

RETURNS(guard, 4, none_or_error(-ps_guard(arg[0], arg[1], arg[2], arg[3])))
DOES(unguard, 1, ps_unguard(arg[0]))
DOES(tell_of_stores, 2, ps_tell_of_stores(arg[0], arg[1]))

METHOD(futex_wait)
{
    TAKES(3)
    Py_BEGIN_ALLOW_THREADS
    ps_futex_wait((const uint32_t *)arg[0], (uint32_t)arg[1], arg[2]);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

METHOD(wait_any)
{
    TAKES(4)
    int error;
    Py_BEGIN_ALLOW_THREADS
    error = ps_wait_any((const uint64_t *)arg[0], (const uint64_t *)arg[1], arg[2], arg[3]);
    Py_END_ALLOW_THREADS
    return PyLong_FromLong(error);
}

DOES(futex_wake, 1, ps_futex_wake((const uint32_t *)arg[0]))
DOES(bell, 1, ps_ring_bell((uint32_t *)arg[0]))
RETURNS(load, 1, PyLong_FromUnsignedLongLong(ps_get(arg[0])))
DOES(store, 2, ps_set(arg[0], arg[1]))
RETURNS(load32, 1, PyLong_FromUnsignedLong(ps_get32(arg[0])))
DOES(store32, 2, ps_set32(arg[0], (uint32_t)arg[1]))

METHOD(address)
{
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

METHOD(start_ticks)
{
    TAKES(1)
    uint64_t told = arg[0] > INT32_MAX ? 0 : ps_start_ticks((int32_t)arg[0]);
    if (told == PS_START_UNKNOWN)
        return PyErr_SetFromErrno(PyExc_OSError);
    return PyLong_FromUnsignedLongLong(told);
}

RETURNS(job_lives, 1, PyBool_FromLong(ps_job_lives((const struct ps_control *)arg[0])))

METHOD(shard_range)
{
    TAKES(3)
    uint64_t low, high;
    if (arg[1] < 1 || arg[1] > PS_MAX_SHARDS || arg[2] >= arg[1]) {
        PyErr_Format(PyExc_ValueError, "no shard %llu of %llu", (unsigned long long)arg[2],
                     (unsigned long long)arg[1]);
        return NULL;
    }
    ps_shard_range(arg[0], (uint32_t)arg[1], (uint32_t)arg[2], &low, &high);
    return Py_BuildValue("(KK)", (unsigned long long)low, (unsigned long long)high);
}

METHOD(die_with_parent)
{
    TAKES(1)
    if (prctl(PR_SET_PDEATHSIG, (unsigned long)arg[0], 0, 0, 0) < 0)
        return PyErr_SetFromErrno(PyExc_OSError);
    Py_RETURN_NONE;
}

/* -- parts of frames, for devices, linear layers and groups -------------------------------------- */

METHOD(copy)
{
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

METHOD(nonzeros)
{
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
    TAKES(6)
    Py_BEGIN_ALLOW_THREADS
    ps_sparse_product((float *)arg[0], (const float *)arg[1], (const float *)arg[2], arg[3], arg[4],
                      arg[5]);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

RETURNS(first_block, 1,
        PyLong_FromUnsignedLongLong(ps_first_block((const struct ps_weights *)arg[0])))

static PyMethodDef methods[] = {
    ENTRY(wait_grant, "wait_grant(ring, control, clock, timeout_ns) -> 0 or a result < 0"),
    ENTRY(wait_applied, "wait_applied(ring, control, sequence, timeout_ns) -> 0 or a result < 0"),
    ENTRY(pause_learner, "pause_learner(ring, control, on)"),
    ENTRY(ask_exclusive, "ask_exclusive(ring, control, on)"),
    ENTRY(beat, "beat(ring): a sign of life"),
    ENTRY(is_exclusive, "is_exclusive(ring, control) -> whether all others pause for this learner"),
    ENTRY(wait_exclusive, "wait_exclusive(ring, control, timeout_ns) -> 0 or a result < 0"),
    ENTRY(take_work, "take_work(ring, control, timeout_ns) -> batch, or a result < 0"),
    ENTRY(lease_make, "lease_make(lease): when no process that uses it is alive"),
    ENTRY(lease_take, "lease_take(lease, timeout_ns) -> whether its holder died; or PS_TIMEOUT"),
    ENTRY(lease_release, "lease_release(lease): by the thread that holds it"),
    ENTRY(populate, "populate(address, bytes) -> 0: page tables filled, so that no access faults; or errno"),
    ENTRY(guard, "guard(address, bytes, word, value): zeros instead of SIGBUS there; then word is value"),
    ENTRY(unguard, "unguard(address)"),
    ENTRY(tell_of_stores, "tell_of_stores(address, bytes): a line before a store there ends us"),
    ENTRY(futex_wait, "futex_wait(word, expected, timeout_ns)"),
    ENTRY(wait_any, "wait_any(words, values, count, timeout_ns) -> int"),
    ENTRY(futex_wake, "futex_wake(word)"),
    ENTRY(bell, "bell(word): add one and wake all"),
    ENTRY(load, "load(word) -> 64 bits, acquire"),
    ENTRY(store, "store(word, value), 64 bits, release"),
    ENTRY(load32, "load32(word) -> 32 bits, acquire"),
    ENTRY(store32, "store32(word, value), 32 bits, release"),
    ENTRY(address, "address(buffer) -> int"),
    ENTRY(start_ticks, "start_ticks(pid) -> when it started, in clock ticks after boot; 0: no such process"),
    ENTRY(job_lives, "job_lives(control) -> whether a server serves, or a watchdog may start one"),
    ENTRY(shard_range, "shard_range(elements, shards, index) -> begin and end of a shard's part"),
    ENTRY(die_with_parent, "die_with_parent(signal): PR_SET_PDEATHSIG"),
    ENTRY(copy, "copy(dtype, to, from, count, residue) -> sum of squares; infinite if a value is "
                "not finite"),
    ENTRY(nonzeros, "nonzeros(values, count) -> how many differ from zero"),
    ENTRY(sparse_product, "sparse_product(to, factors, matrix, count, rows, width)"),
    ENTRY(first_block, "first_block(weights) -> where the first block may begin"),
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
    PyObject *build = PyLong_FromUnsignedLongLong(PS_BUILD);
    int failed = PyModule_AddObjectRef(made, "BUILD", build) < 0;
    Py_XDECREF(build);
    if (failed || PyModule_AddFunctions(made, ps_layout_methods) < 0 ||
        PyModule_AddType(made, &ps_learner_type) < 0 || PyModule_AddType(made, &ps_cuda_type) < 0 ||
        PyModule_AddIntMacro(made, PS_NOT_READY) < 0 ||
        PyModule_AddIntMacro(made, PS_CROWDED) < 0 ||
        PyModule_AddIntMacro(made, PS_SUMS_ROWS) < 0 ||
        PyModule_AddIntMacro(made, PS_TIMEOUT) < 0 ||
        PyModule_AddIntMacro(made, PS_STOPPED) < 0 ||
        PyModule_AddIntMacro(made, PS_EVICTED) < 0 ||
        PyModule_AddIntMacro(made, PS_FINISHED) < 0 ||
        PyModule_AddIntMacro(made, PS_PUSHING) < 0 || PyModule_AddIntMacro(made, PS_TAKING) < 0 ||
        PyModule_AddIntMacro(made, PS_COPYING) < 0) {
        Py_DECREF(made);
        return NULL;
    }
    return made;
}
