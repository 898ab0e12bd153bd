/*
 * gadei_ps._native.Learner: struct ps_learner (ps_learner.h) for Python. It is made once for a client
 * and holds what all of its frames have in common; a call passes what differs.
 *
 * Gradients come as a sequence of addresses, four for each tensor of the model in its order (values,
 * indices, count, factors: struct ps_gradient), or one, of a flat gradient.
 */
#include "module.h"

#include <math.h>
#include <stdlib.h>
#include <structmember.h>

#include "ps_learner.h"

#define WRITE_WITH_GIL (1u << 14) /* values; below, handing the GIL over costs more than the copy */
#define FEW_TENSORS 64

struct object {
    PyObject_HEAD
    struct ps_learner learner;
};

#define LEARNER (&((struct object *)self)->learner)

/* All in tp_new: no object is without its segments, and none changes them. */
static PyObject *make(PyTypeObject *type, PyObject *args, PyObject *names)
{
    unsigned long long ring, control, weights, residue;
    unsigned int dtype;
    (void)names;
    if (!PyArg_ParseTuple(args, "KKKIK:Learner", &ring, &control, &weights, &dtype, &residue))
        return NULL;
    PyObject *self = type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    ps_learner_begin(LEARNER, (struct ps_ring *)ring, (const struct ps_control *)control,
                     (const struct ps_weights *)weights);
    LEARNER->dtype = dtype;
    LEARNER->residue = (float *)residue;
    return self;
}

static int takes(Py_ssize_t given, Py_ssize_t wanted)
{
    if (given == wanted)
        return 0;
    PyErr_Format(PyExc_TypeError, "takes %zd arguments, not %zd", wanted, given);
    return -1;
}

/* (version, batch, samples, rate_scale, loss). ValueError for what no frame may say. */
static int take_facts(PyObject *given, struct ps_facts *facts)
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
    double scale = PyFloat_AsDouble(PyTuple_GET_ITEM(given, 3));
    double loss = PyFloat_AsDouble(PyTuple_GET_ITEM(given, 4));
    if (PyErr_Occurred())
        return -1;
    if (whole[2] > UINT32_MAX) {
        PyErr_SetString(PyExc_ValueError, "samples: use 0 to 4294967295");
        return -1;
    }
    *facts = (struct ps_facts){whole[0], whole[1], (uint32_t)whole[2], (float)scale, loss};
    if (!(facts->rate_scale >= 0.0f && isfinite(facts->rate_scale))) {
        PyErr_SetString(PyExc_ValueError, "rate_scale is negative or not finite");
        return -1;
    }
    return 0;
}

/* IndexError(number of the tensor, row). */
static void bad_row(uint64_t tensor, int64_t row)
{
    PyObject *where = Py_BuildValue("(KL)", (unsigned long long)tensor, (long long)row);
    if (where)
        PyErr_SetObject(PyExc_IndexError, where);
    Py_XDECREF(where);
}

static int take_gradient(PyObject *const *args, struct ps_gradient *gradient)
{
    uint64_t arg[4];
    if (numbers(args, 4, 4, arg) < 0)
        return -1;
    *gradient = (struct ps_gradient){(const float *)arg[0], (const int64_t *)arg[1], arg[2],
                                     (const float *)arg[3]};
    return 0;
}

static int take_gradients(const struct ps_weights *weights, PyObject *where,
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

/* A frame's payload, from any sequence of addresses; -1 with an exception set. */
static int write_whole(struct ps_learner *learner, char *payload, PyObject *given)
{
    const struct ps_weights *weights = learner->weights;
    struct ps_gradient few[FEW_TENSORS], *gradients = few;
    struct ps_written written;
    if (weights->tensors > FEW_TENSORS && !(gradients = malloc(weights->tensors * sizeof *few))) {
        PyErr_NoMemory();
        return -1;
    }
    PyObject *where = PySequence_Fast(given, "takes a sequence of addresses");
    int result = 0, taken = where ? take_gradients(weights, where, gradients) : -1;
    Py_XDECREF(where);
    uint64_t work = weights->elements;
    for (uint64_t i = 0; i < weights->tensors && !taken; i++)
        work += gradients[i].count * (gradients[i].factors ? weights->elements : 1);
    if (!taken && work < WRITE_WITH_GIL) {
        result = ps_frame_whole(learner, payload, gradients, &written);
    } else if (!taken) {
        Py_BEGIN_ALLOW_THREADS
        result = ps_frame_whole(learner, payload, gradients, &written);
        Py_END_ALLOW_THREADS
    }
    if (result == PS_BAD_ROW)
        bad_row(written.tensor, gradients[written.tensor].indices[written.bad]);
    if (result == PS_NO_MEMORY)
        PyErr_NoMemory();
    if (gradients != few)
        free(gradients);
    return taken || result ? -1 : 0;
}

METHOD(push)
{
    struct ps_learner *learner = LEARNER;
    struct ps_facts facts;
    if (takes(count, 2) < 0 || take_facts(args[0], &facts) < 0)
        return NULL;
    int result = ps_wait_grant(learner->ring, learner->control, learner->published, 0);
    struct ps_frame *slot =
        result ? NULL : ps_claim(learner->ring, learner->control, 0, &result);
    if (!slot)
        return PyLong_FromLong(result);
    if (write_whole(learner, (char *)slot + PS_PAYLOAD_AT, args[1]) < 0)
        return NULL;
    return PyLong_FromUnsignedLongLong(ps_frame_publish(learner, &facts));
}

METHOD(write_frame)
{
    uint64_t payload;
    if (takes(count, 2) < 0 || numbers(args, 1, 1, &payload) < 0 ||
        write_whole(LEARNER, (char *)payload, args[1]) < 0)
        return NULL;
    Py_RETURN_NONE;
}

METHOD(begin)
{
    TAKES(1)
    ps_frame_begin(LEARNER, (char *)arg[0], PS_ROWS);
    Py_RETURN_NONE;
}

METHOD(append)
{
    struct ps_learner *learner = LEARNER;
    struct ps_gradient gradient;
    uint64_t number, bad = 0;
    double squares;
    int result, taken = -1;
    if (takes(count, 2) < 0 || numbers(args, 1, 1, &number) < 0)
        return NULL;
    PyObject *where = PySequence_Fast(args[1], "takes a sequence of four numbers");
    if (!where)
        return NULL;
    if (number >= learner->weights->tensors || PySequence_Fast_GET_SIZE(where) != 4)
        PyErr_SetString(PyExc_TypeError, "takes a tensor of the model and four numbers");
    else
        taken = take_gradient(PySequence_Fast_ITEMS(where), &gradient);
    Py_DECREF(where);
    if (taken < 0)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    result = ps_frame_append(learner, number, &gradient, &squares, &bad);
    Py_END_ALLOW_THREADS
    if (result == PS_NO_MEMORY)
        return PyErr_NoMemory();
    if (result == PS_BAD_ROW) {
        bad_row(number, gradient.indices[bad]);
        return NULL;
    }
    Py_RETURN_NONE;
}

METHOD(empty)
{
    TAKES(1)
    ps_frame_empty(LEARNER, arg[0] != 0);
    Py_RETURN_NONE;
}

METHOD(forget)
{
    UNUSED;
    (void)args;
    if (takes(count, 0) < 0)
        return NULL;
    LEARNER->writing.kind = 0;
    Py_RETURN_NONE;
}

METHOD(check)
{
    UNUSED;
    struct ps_facts facts;
    if (takes(count, 1) < 0 || take_facts(args[0], &facts) < 0)
        return NULL;
    Py_RETURN_NONE;
}

METHOD(publish)
{
    struct ps_facts facts;
    if (takes(count, 1) < 0 || take_facts(args[0], &facts) < 0)
        return NULL;
    return PyLong_FromUnsignedLongLong(ps_frame_publish(LEARNER, &facts));
}

METHOD(land)
{
    uint64_t landing, given[6];
    struct ps_facts facts;
    if (takes(count, 3) < 0 || numbers(args, 1, 1, &landing) < 0 ||
        take_facts(args[2], &facts) < 0)
        return NULL;
    if (!PyTuple_Check(args[1])) {
        PyErr_SetString(PyExc_TypeError, "takes a tuple");
        return NULL;
    }
    if (numbers(((PyTupleObject *)args[1])->ob_item, PyTuple_GET_SIZE(args[1]), 6, given) < 0)
        return NULL;
    struct ps_landed landed = {
        .sums = (const uint64_t *)given[0],
        .parts = given[1],
        .loss_there = given[2],
        .kind = (uint32_t)given[3],
        .blocks = (uint32_t)given[4],
        .bytes = given[5],
    };
    ps_frame_land(LEARNER, (struct ps_landing *)landing, &landed, &facts);
    Py_RETURN_NONE;
}

METHOD(counted)
{
    (void)args;
    if (takes(count, 0) < 0)
        return NULL;
    ps_frame_counted(LEARNER);
    Py_RETURN_NONE;
}

METHOD(wanted)
{
    (void)args;
    if (takes(count, 0) < 0)
        return NULL;
    return PyBool_FromLong(ps_wanted(LEARNER));
}

METHOD(copy_begin)
{
    TAKES(1)
    ps_copy_begin(LEARNER, (float *)arg[0]);
    Py_RETURN_NONE;
}

METHOD(copy_on)
{
    TAKES(1)
    int result;
    Py_BEGIN_ALLOW_THREADS
    result = ps_copy_on(LEARNER, arg[0]);
    Py_END_ALLOW_THREADS
    return PyLong_FromLong(result);
}

METHOD(copy_end)
{
    (void)args;
    if (takes(count, 0) < 0)
        return NULL;
    ps_copy_end(LEARNER);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    ENTRY(push, "push(facts, gradients) -> sequence number, or a result < 0: claims, writes and "
                "publishes, where nothing need be waited for"),
    ENTRY(write_frame, "write_frame(payload, gradients): a whole frame into a claimed slot"),
    ENTRY(begin, "begin(payload): a frame of rows, of which append() writes the tensors"),
    ENTRY(append, "append(tensor, (values, indices, count, factors))"),
    ENTRY(empty, "empty(computed): a frame without a gradient"),
    ENTRY(forget, "forget(): nothing is written into the claimed slot"),
    ENTRY(check, "check(facts): raises what publish() and land() would raise for them"),
    ENTRY(publish, "publish(facts) -> sequence number of the frame that is written"),
    ENTRY(land, "land(landing, (sums, parts, loss_there, kind, blocks, bytes), facts)"),
    ENTRY(counted, "counted(): LAND will publish the frame that was prepared"),
    ENTRY(wanted, "wanted() -> whether the gradient in hand may still be applied"),
    ENTRY(copy_begin, "copy_begin(to): a consistent copy of the weights"),
    ENTRY(copy_on, "copy_on(timeout_ns) -> 0 once it is whole, or PS_TIMEOUT"),
    ENTRY(copy_end, "copy_end(): the shards need not wait any more"),
    {NULL, NULL, 0, NULL},
};

#define MEMBER(name, type, how) {#name, type, offsetof(struct object, learner.name), how, NULL}
#define WRITTEN(name, field, type) \
    {#name, type, offsetof(struct object, learner.writing.field), READONLY, NULL}

static PyMemberDef members[] = {
    MEMBER(published, T_ULONGLONG, 0),
    MEMBER(version, T_ULONGLONG, 0),
    MEMBER(started, T_DOUBLE, 0),
    MEMBER(copies, T_UINT, 0),
    MEMBER(skips_zeros, T_UINT, 0),
    WRITTEN(kind, kind, T_UINT),
    WRITTEN(blocks, blocks, T_UINT),
    WRITTEN(payload_bytes, payload.end, T_ULONGLONG),
    WRITTEN(squares, payload.squares, T_DOUBLE),
    {NULL, 0, 0, 0, NULL},
};

PyTypeObject ps_learner_type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "gadei_ps._native.Learner",
    .tp_basicsize = sizeof(struct object),
    .tp_doc = "Learner(ring, control, weights, dtype, residue): addresses, and a number format.",
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = make,
    .tp_methods = methods,
    .tp_members = members,
};
