/* What the methods of gadei_ps._native.Learner take: facts and gradients; see module_arguments.h. */
#include "module_arguments.h"

#include <math.h>

/* A number; infinite where a double has no room for it. */
static double take_real(PyObject *given)
{
    double real = PyFloat_AsDouble(given);
    if (real == -1.0 && PyErr_Occurred() && PyErr_ExceptionMatches(PyExc_OverflowError)) {
        PyErr_Clear();
        return INFINITY;
    }
    return real;
}

/* ((scales), momentum): the momentum, and returns the scales; else what is given. NULL: an error. */
static PyObject *take_momentum(PyObject *given, struct ps_facts *facts)
{
    facts->momentum = NAN;
    if (!PyTuple_Check(given) || PyTuple_GET_SIZE(given) != 2 ||
        !PyTuple_Check(PyTuple_GET_ITEM(given, 0)))
        return given;
    facts->momentum = (float)take_real(PyTuple_GET_ITEM(given, 1));
    if (PyErr_Occurred())
        return NULL;
    if (!(facts->momentum >= 0.0f && facts->momentum < 1.0f)) {
        PyErr_SetString(PyExc_ValueError, "momentum: use a number from 0 on, below 1");
        return NULL;
    }
    return PyTuple_GET_ITEM(given, 0);
}

/* A number for all groups, or one for each of the first groups; the rest have 1. */
static int take_scales(const struct ps_learner *learner, PyObject *given, struct ps_facts *facts)
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
    double scale = each ? 1.0 : take_real(given);
    for (Py_ssize_t i = 0; i < PS_MAX_GROUPS; i++) {
        double one = each && i < count ? take_real(PyTuple_GET_ITEM(given, i)) : scale;
        if (one == -1.0 && PyErr_Occurred())
            return -1;
        facts->rate_scale[i] = (float)one;
    }
    const char *wrong = ps_wrong_scales(learner, facts);
    if (wrong)
        PyErr_SetString(PyExc_ValueError, wrong);
    return wrong ? -1 : 0;
}

/* A whole number from 0 to `most`. besides: one more that is meant, or `most`. */
static int take_whole(PyObject *given, const char *name, uint64_t most, uint64_t besides,
                      uint64_t *out)
{
    PyObject *whole = PyNumber_Index(given);
    if (whole) {
        *out = PyLong_AsUnsignedLongLong(whole);
        Py_DECREF(whole);
    }
    int wrong = PyErr_Occurred() != NULL;
    if (!wrong && (*out <= most || *out == besides))
        return 0;
    PyErr_Clear();
    PyErr_Format(PyExc_ValueError, "%s=%R: use a whole number from 0 to %llu", name, given,
                 (unsigned long long)most);
    return -1;
}

int take_facts(const struct ps_learner *learner, PyObject *given, struct ps_facts *facts)
{
    uint64_t version, batch, samples;
    if (!PyTuple_Check(given) || PyTuple_GET_SIZE(given) != 5) {
        PyErr_SetString(PyExc_TypeError, "facts are five numbers");
        return -1;
    }
    if (take_whole(PyTuple_GET_ITEM(given, 0), "version", INT64_MAX, INT64_MAX, &version) < 0 ||
        take_whole(PyTuple_GET_ITEM(given, 1), "batch", INT64_MAX, PS_NO_BATCH, &batch) < 0 ||
        take_whole(PyTuple_GET_ITEM(given, 2), "samples", UINT32_MAX, UINT32_MAX, &samples) < 0)
        return -1;
    double loss = take_real(PyTuple_GET_ITEM(given, 4));
    if (PyErr_Occurred())
        return -1;
    *facts = (struct ps_facts){
        .version = version, .batch = batch, .samples = (uint32_t)samples, .loss = loss};
    return take_scales(learner, PyTuple_GET_ITEM(given, 3), facts);
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
