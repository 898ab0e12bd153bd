/* What the methods of gadei_ps._native.Learner take: facts and gradients; see module_arguments.h. */
#include "module_arguments.h"

#include <math.h>

/* ((scales), momentum): the momentum, and returns the scales; else what is given. NULL: an error. */
static PyObject *take_momentum(PyObject *given, struct ps_facts *facts)
{
    facts->momentum = NAN;
    if (!PyTuple_Check(given) || PyTuple_GET_SIZE(given) != 2 ||
        !PyTuple_Check(PyTuple_GET_ITEM(given, 0)))
        return given;
    facts->momentum = (float)PyFloat_AsDouble(PyTuple_GET_ITEM(given, 1));
    if (PyErr_Occurred())
        return NULL;
    if (!(facts->momentum >= 0.0f && facts->momentum < 1.0f)) {
        PyErr_SetString(PyExc_ValueError, "momentum: use a number from 0 on, below 1");
        return NULL;
    }
    return PyTuple_GET_ITEM(given, 0);
}

/* A number for all groups, or one for each of the first groups; the rest have 1. */
static int take_scales(PyObject *given, struct ps_facts *facts)
{
    given = take_momentum(given, facts);
    if (!given)
        return -1;
    int each = PyTuple_Check(given);
    Py_ssize_t count = each ? PyTuple_GET_SIZE(given) : PS_MAX_GROUPS;
    if (count > PS_MAX_GROUPS) {
        PyErr_Format(PyExc_ValueError, "rate_scale: %zd numbers for at most %d groups", count,
                     PS_MAX_GROUPS);
        return -1;
    }
    double scale = each ? 1.0 : PyFloat_AsDouble(given);
    for (Py_ssize_t i = 0; i < PS_MAX_GROUPS; i++) {
        double one = each && i < count ? PyFloat_AsDouble(PyTuple_GET_ITEM(given, i)) : scale;
        if (one == -1.0 && PyErr_Occurred())
            return -1;
        facts->rate_scale[i] = (float)one;
        if (!(facts->rate_scale[i] >= 0.0f && isfinite(facts->rate_scale[i]))) {
            PyErr_SetString(PyExc_ValueError, "rate_scale is negative or not finite");
            return -1;
        }
    }
    return 0;
}

int take_facts(PyObject *given, struct ps_facts *facts)
{
    uint64_t whole[3];
    if (!PyTuple_Check(given) || PyTuple_GET_SIZE(given) != 5) {
        PyErr_SetString(PyExc_TypeError, "facts are five numbers");
        return -1;
    }
    for (int i = 0; i < 3; i++) {
        whole[i] = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(given, i));
        if (whole[i] == UINT64_MAX && PyErr_Occurred()) {
            if (i == 2 && PyErr_ExceptionMatches(PyExc_OverflowError))
                whole[i] = UINT64_MAX; /* negative or far too large: refused below */
            else
                return -1;
            PyErr_Clear();
        }
    }
    double loss = PyFloat_AsDouble(PyTuple_GET_ITEM(given, 4));
    if (PyErr_Occurred())
        return -1;
    if (whole[2] > UINT32_MAX) {
        PyErr_SetString(PyExc_ValueError, "samples: use 0 to 4294967295");
        return -1;
    }
    *facts = (struct ps_facts){
        .version = whole[0], .batch = whole[1], .samples = (uint32_t)whole[2], .loss = loss};
    return take_scales(PyTuple_GET_ITEM(given, 3), facts);
}

void bad_row(uint64_t tensor, int64_t row)
{
    PyObject *where = Py_BuildValue("(KL)", (unsigned long long)tensor, (long long)row);
    if (where)
        PyErr_SetObject(PyExc_IndexError, where);
    Py_XDECREF(where);
}

int take_gradient(PyObject *const *args, struct ps_gradient *gradient)
{
    uint64_t arg[4];
    if (numbers(args, 4, 4, arg) < 0)
        return -1;
    *gradient = (struct ps_gradient){(const float *)arg[0], (const int64_t *)arg[1], arg[2],
                                     (const float *)arg[3]};
    return 0;
}

int take_gradients(const struct ps_weights *weights, PyObject *where,
                   struct ps_gradient *gradients)
{
    const struct ps_tensor *table =
        (const struct ps_tensor *)((const char *)weights + weights->table_at);
    PyObject **items = PySequence_Fast_ITEMS(where);
    Py_ssize_t count = PySequence_Fast_GET_SIZE(where);
    uint64_t flat;
    if (count == 1) {
        if (numbers(items, 1, 1, &flat) < 0)
            return -1;
        for (uint64_t i = 0; i < weights->tensors; i++)
            gradients[i] = (struct ps_gradient){.values = (const float *)flat + table[i].start};
        return 0;
    }
    if ((uint64_t)count != 4 * weights->tensors) {
        PyErr_SetString(PyExc_TypeError, "takes four numbers for each tensor");
        return -1;
    }
    for (uint64_t i = 0; i < weights->tensors; i++)
        if (take_gradient(items + 4 * i, &gradients[i]) < 0)
            return -1;
    return 0;
}
