/*
 * gadei_ps._native.Cuda: struct ps_cuda (ps_cuda.h) for Python. Calls of the driver may block if its
 * queues are full, and functions of Python may be in them, so the GIL is released around them. Queries
 * of an event do not block, and keep it: another thread of Python could hold it for milliseconds. The
 * results are 0 or CUDA's error.
 */
#include "module.h"

#include <structmember.h>

#define CUDA (&((struct cuda_object *)self)->cuda)
#define SETUP_WORDS (sizeof(struct ps_cuda_setup) / sizeof(uint64_t))

static void end(PyObject *self)
{
    ps_cuda_end(CUDA);
    Py_TYPE(self)->tp_free(self);
}

static PyObject *make(PyTypeObject *type, PyObject *args, PyObject *names)
{
    (void)names;
    PyObject *self = type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    int result = numbers(((PyTupleObject *)args)->ob_item, PyTuple_GET_SIZE(args), SETUP_WORDS,
                         (uint64_t *)&CUDA->of);
    if (!result && (result = ps_cuda_begin(CUDA)))
        PyErr_Format(PyExc_RuntimeError, "CUDA error %d, or no memory", result);
    if (!result)
        return self;
    Py_DECREF(self);
    return NULL;
}

/* Makes a call in the device's context. */
#define IN_CONTEXT(result, call)                        \
    do {                                                \
        int pushed = 0;                                 \
        result = ps_cuda_enter(CUDA, &pushed);          \
        if (!result)                                    \
            result = (call);                            \
        ps_cuda_leave(CUDA, pushed);                    \
    } while (0)

#define WITHOUT_GIL(result, call)       \
    Py_BEGIN_ALLOW_THREADS              \
    IN_CONTEXT(result, call);           \
    Py_END_ALLOW_THREADS

/* A method of n numbers that calls the driver. */
#define CALLS(name, n, call)                \
    METHOD(name)                            \
    {                                       \
        TAKES(n)                            \
        int result;                         \
        WITHOUT_GIL(result, call)           \
        return PyLong_FromLong(result);     \
    }

static int query(PyObject *self, void *event)
{
    int result;
    IN_CONTEXT(result, CUDA->failed ? CUDA->failed : CUDA->of.driver.query(event));
    return result;
}

CALLS(pull, 2, ps_cuda_pull(CUDA, arg[0], (void *)arg[1]))
CALLS(fill, 2, ps_cuda_fill(CUDA, arg[0], (void *)arg[1]))
CALLS(copy, 3, ps_cuda_copy(CUDA, arg[0], arg[1], (void *)arg[2]))
CALLS(gather, 6, ps_cuda_gather(CUDA, arg[0], arg[1], arg[2], arg[3], arg[4], (void *)arg[5]))
RETURNS(arrived, 0, PyLong_FromLong(query(self, CUDA->of.arrived)))
RETURNS(published, 0, PyLong_FromLong(query(self, CUDA->of.published)))

METHOD(flush)
{
    TAKES(0)
    int result = query(self, CUDA->of.published);
    if (result == PS_NOT_READY) {
        WITHOUT_GIL(result, CUDA->of.driver.synchronize(CUDA->of.published))
    }
    uint64_t *bad = CUDA->of.outgoing[!CUDA->now].landed + PS_SUMS_BAD;
    if (!result && *bad) {
        result = -(int)*bad;
        *bad = 0;
    }
    return PyLong_FromLong(result);
}

METHOD(stage)
{
    uint64_t given[4];
    if (takes(count, 5) < 0 || numbers(args + 1, 4, 4, given) < 0)
        return NULL;
    PyObject *where = PySequence_Fast(args[0], "takes a sequence of addresses");
    int result = where ? ps_take_gradients(CUDA->of.weights, where, CUDA->given) : -1;
    Py_XDECREF(where);
    if (result < 0)
        return NULL;
    WITHOUT_GIL(result, ps_cuda_stage(CUDA, (void *)given[0], given[1], given[2], given[3]))
    if (result == PS_MIXED) {
        PyErr_SetString(PyExc_ValueError,
                        "rows cannot be pushed together with arrays of gradients()");
        return NULL;
    }
    return PyLong_FromLong(result);
}

METHOD(set_ranges)
{
    uint64_t ranges = (uint64_t)count / 2, most = CUDA->of.weights->tensors + 1;
    if (numbers(args, count, 2 * (Py_ssize_t)(ranges < most ? ranges : most), CUDA->ranges[0]) < 0)
        return NULL;
    CUDA->range_count = ranges;
    Py_RETURN_NONE;
}

DOES(set_lists, 2, (CUDA->lists = arg[0], CUDA->listable = arg[1]))

static PyMethodDef methods[] = {
    ENTRY(stage, "stage(gradients, stream, loss, to, source): launches the kernel of a push, and copies "
                 "as copy() unless `to` is 0; -12: the lists lack room"),
    ENTRY(flush, "flush(): waits until the last gradient is published; -n: it named a row that tensor "
                 "n - 1 lacks"),
    ENTRY(published, "published(): whether it is"),
    ENTRY(pull, "pull(to, stream): begins, behind what the stream computes"),
    ENTRY(arrived, "arrived(): whether the pull has"),
    ENTRY(fill, "fill(to, stream): copies the weights"),
    ENTRY(copy, "copy(to, source, stream): copies pulled weights"),
    ENTRY(gather, "gather(tensor, indices, count, to, narrow, stream): reads rows of the weights"),
    ENTRY(set_ranges, "set_ranges(begin, end, ...): bytes of the weights that are copied"),
    ENTRY(set_lists, "set_lists(address, rows): memory for the kernels of rows"),
    {NULL, NULL, 0, NULL},
};

static PyMemberDef members[] = {
    {"now", T_UINT, offsetof(struct cuda_object, cuda.now), READONLY, "the outgoing memory that is next"},
    {NULL, 0, 0, 0, NULL},
};

PyTypeObject ps_cuda_type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "gadei_ps._native.Cuda",
    .tp_basicsize = sizeof(struct cuda_object),
    .tp_dealloc = end,
    .tp_doc = "Cuda(*words): struct ps_cuda_setup, of the current context.",
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = make,
    .tp_methods = methods,
    .tp_members = members,
};
