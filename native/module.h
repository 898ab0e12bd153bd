/*
 * What the files of gadei_ps._native share. Addresses are integers: the callers hold the mappings,
 * these files hold nothing. Calls that may wait, or copy much, release the GIL.
 *
 *   module.c         the module itself: waits, leases, single words, parts of frames
 *   module_learner.c the type Learner: a client's frames and consistent pulls
 *   module_cuda.c    the type Cuda: the calls of a step on a GPU
 *   module_layout.c  the layout of the shared memory as the compiler made it
 */
#ifndef MODULE_H
#define MODULE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "ps_cuda.h"
#include "ps_ring.h"

/* Checks how many arguments a method is given; -1 with an exception set. */
static inline int takes(Py_ssize_t given, Py_ssize_t wanted)
{
    if (given == wanted)
        return 0;
    PyErr_Format(PyExc_TypeError, "takes %zd arguments, not %zd", wanted, given);
    return -1;
}

/* Converts the arguments of a method; -1 with an exception set. */
static inline int numbers(PyObject *const *args, Py_ssize_t given, Py_ssize_t wanted,
                          uint64_t *out)
{
    if (takes(given, wanted) < 0)
        return -1;
    for (Py_ssize_t i = 0; i < wanted; i++) {
        out[i] = PyLong_AsUnsignedLongLong(args[i]);
        if (out[i] == (uint64_t)-1 && PyErr_Occurred())
            return -1;
    }
    return 0;
}

#define TAKES(n)                               \
    uint64_t arg[(n) ? (n) : 1];               \
    if (numbers(args, count, (n), arg) < 0)    \
        return NULL;

#define UNUSED __attribute__((unused))
#define METHOD(name)                                                                \
    static PyObject *name(UNUSED PyObject *self, UNUSED PyObject *const *args,      \
                          UNUSED Py_ssize_t count)
/* A method of n numbers, `arg`: returns an object, or does something and returns None. */
#define RETURNS(name, n, object) METHOD(name) { TAKES(n) return object; }
#define DOES(name, n, something) METHOD(name) { TAKES(n) something; Py_RETURN_NONE; }

#define RING ((struct ps_ring *)arg[0])
#define CONTROL ((const struct ps_control *)arg[1])

#define ENTRY(name, text) {#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL, text}

extern PyMethodDef ps_layout_methods[];
extern PyTypeObject ps_learner_type, ps_cuda_type;

/* An object of ps_cuda_type. */
struct cuda_object {
    PyObject_HEAD
    struct ps_cuda cuda;
};

/* A gradient for each tensor. where: PySequence_Fast's, four numbers for each, or one address. -1 with
 * an exception set. */
int ps_take_gradients(const struct ps_weights *weights, PyObject *where, struct ps_gradient *gradients);

#endif
