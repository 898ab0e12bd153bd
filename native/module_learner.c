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

/* -- arguments; -1: an exception is set ---------------------------------------------------------- */

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

/* (version, batch, samples, rate_scale, loss). -1 with a ValueError for what no frame may say. */
static int take_facts(const struct ps_learner *learner, PyObject *given, struct ps_facts *facts)
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

/* IndexError(number of the tensor, row). */
static void bad_row(uint64_t tensor, int64_t row)
{
    PyObject *where = Py_BuildValue("(KL)", (unsigned long long)tensor, (long long)row);
    if (where)
        PyErr_SetObject(PyExc_IndexError, where);
    Py_XDECREF(where);
}

/* Four numbers. */
static int take_gradient(PyObject *const *args, struct ps_gradient *gradient)
{
    uint64_t arg[4];
    if (numbers(args, 4, 4, arg) < 0)
        return -1;
    *gradient = (struct ps_gradient){(const float *)arg[0], (const int64_t *)arg[1], arg[2],
                                     (const float *)arg[3]};
    return 0;
}

int ps_take_gradients(const struct ps_weights *weights, PyObject *where, struct ps_gradient *gradients)
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
    uint64_t number = 0, bad = 0;
    if (weights->tensors > FEW_TENSORS && !(gradients = malloc(weights->tensors * sizeof *few))) {
        PyErr_NoMemory();
        return -1;
    }
    PyObject *where = PySequence_Fast(given, "takes a sequence of addresses");
    int result = 0, taken = where ? ps_take_gradients(weights, where, gradients) : -1;
    Py_XDECREF(where);
    uint64_t work = weights->elements;
    for (uint64_t i = 0; i < weights->tensors && !taken; i++)
        work += gradients[i].count * (gradients[i].factors ? weights->elements : 1);
    if (!taken && work < WRITE_WITH_GIL) {
        result = ps_frame_whole(learner, payload, gradients, &number, &bad);
    } else if (!taken) {
        Py_BEGIN_ALLOW_THREADS
        result = ps_frame_whole(learner, payload, gradients, &number, &bad);
        Py_END_ALLOW_THREADS
    }
    if (result == PS_BAD_ROW)
        bad_row(number, gradients[number].indices[bad]);
    if (result == PS_NO_MEMORY)
        PyErr_NoMemory();
    if (gradients != few)
        free(gradients);
    return taken || result ? -1 : 0;
}

/* -- threads ----------------------------------------------------------------------------------- */

/* ValueError: the caller is not the thread, or not in time, to do this. */
static PyObject *refuse(int result)
{
    PyErr_SetString(PyExc_ValueError, ps_refusal(result));
    return NULL;
}

/* Whether a result of ps_calls.h refuses. */
static int refuses(int64_t result) { return result <= PS_BUSY; }

typedef PyObject *method(PyObject *, PyObject *const *, Py_ssize_t);

/* Enters a call that pushes or writes, if this is the thread that may: as ps_enter, or PS_OTHERS. */
static int enter_as_only_one(struct ps_learner *learner)
{
    int others = ps_others(&learner->calls);
    int entered = others ? others : ps_enter(&learner->calls, PS_PUSHING);
    if (entered < 0)
        return entered;
    others = ps_others(&learner->calls);
    if (others && !entered)
        ps_leave(&learner->calls, PS_PUSHING);
    return others ? others : entered;
}

static PyObject *as_only_one(method *call, PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    int entered = enter_as_only_one(LEARNER);
    if (entered < 0)
        return refuse(entered);
    PyObject *result = call(self, args, count);
    if (!entered)
        ps_leave(&LEARNER->calls, PS_PUSHING);
    return result;
}

#define METHOD_OF_ONE(name)                                                                \
    static PyObject *name##_inside(PyObject *, PyObject *const *, Py_ssize_t);             \
    METHOD(name) { return as_only_one(name##_inside, self, args, count); }                 \
    METHOD(name##_inside)

static int take_kind(PyObject *const *args, Py_ssize_t count, enum ps_call *kind)
{
    uint64_t given;
    if (numbers(args, count, 1, &given) < 0)
        return -1;
    if (given >= PS_CALLS) {
        PyErr_SetString(PyExc_TypeError, "no such kind of call");
        return -1;
    }
    *kind = (enum ps_call)given;
    return 0;
}

METHOD(enter)
{
    enum ps_call kind;
    if (take_kind(args, count, &kind) < 0)
        return NULL;
    int entered = ps_enter(&LEARNER->calls, kind);
    /* In Python the same thread can come again only from a signal handler, amid a wait. */
    if (entered == PS_NESTED)
        entered = PS_BUSY;
    if (entered)
        return refuse(entered);
    Py_RETURN_NONE;
}

METHOD(leave)
{
    enum ps_call kind;
    if (take_kind(args, count > 1 ? 1 : count, &kind) < 0)
        return NULL;
    ps_leave(&LEARNER->calls, kind);
    Py_RETURN_NONE;
}

METHOD(shut)
{
    TAKES(0)
    Py_BEGIN_ALLOW_THREADS
    ps_shut(&LEARNER->calls);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

/* -- frames ------------------------------------------------------------------------------------ */

METHOD(claim)
{
    TAKES(1)
    int result;
    struct ps_frame *slot = ps_frame_claim(LEARNER, 0, &result);
    if (result == PS_TIMEOUT) {
        Py_BEGIN_ALLOW_THREADS
        slot = ps_frame_claim(LEARNER, arg[0], &result);
        Py_END_ALLOW_THREADS
    }
    if (refuses(result))
        return refuse(result);
    return slot ? PyLong_FromUnsignedLongLong((uint64_t)slot) : PyLong_FromLong(result);
}

/* Claims a slot where nothing need be waited for. */
static struct ps_frame *try_claim(struct ps_learner *learner, int *result)
{
    *result = ps_try_grant(learner->ring, learner->control, learner->published);
    return *result ? NULL : ps_frame_claim(learner, 0, result);
}

METHOD_OF_ONE(push)
{
    struct ps_learner *learner = LEARNER;
    struct ps_facts facts;
    if (takes(count, 2) < 0 || take_facts(LEARNER, args[0], &facts) < 0)
        return NULL;
    int result;
    struct ps_frame *slot = try_claim(learner, &result);
    if (refuses(result))
        return refuse(result);
    if (!slot)
        return PyLong_FromLong(result);
    if (write_whole(learner, (char *)slot + PS_PAYLOAD_AT, args[1]) < 0) {
        ps_frame_drop(learner);
        return NULL;
    }
    int64_t sequence = ps_frame_publish(learner, &facts);
    return refuses(sequence) ? refuse((int)sequence) : PyLong_FromLongLong(sequence);
}

METHOD_OF_ONE(write_frame)
{
    uint64_t payload;
    if (takes(count, 2) < 0 || numbers(args, 1, 1, &payload) < 0 ||
        write_whole(LEARNER, (char *)payload, args[1]) < 0)
        return NULL;
    Py_RETURN_NONE;
}

METHOD_OF_ONE(append)
{
    struct ps_learner *learner = LEARNER;
    struct ps_gradient gradient;
    uint64_t given[2], bad = 0;
    double squares;
    int result, taken = -1;
    if (takes(count, 3) < 0 || numbers(args, 2, 2, given) < 0)
        return NULL;
    PyObject *where = PySequence_Fast(args[2], "takes a sequence of four numbers");
    if (!where)
        return NULL;
    if (given[1] >= learner->weights->tensors || PySequence_Fast_GET_SIZE(where) != 4)
        PyErr_SetString(PyExc_TypeError, "takes a tensor of the model and four numbers");
    else
        taken = take_gradient(PySequence_Fast_ITEMS(where), &gradient);
    Py_DECREF(where);
    if (taken < 0)
        return NULL;
    if (!learner->writing.kind)
        ps_frame_begin(learner, (char *)given[0], PS_ROWS);
    Py_BEGIN_ALLOW_THREADS
    result = ps_frame_append(learner, given[1], &gradient, &squares, &bad);
    Py_END_ALLOW_THREADS
    if (result == PS_NO_MEMORY)
        return PyErr_NoMemory();
    if (result == PS_BAD_ROW) {
        bad_row(given[1], gradient.indices[bad]);
        return NULL;
    }
    Py_RETURN_NONE;
}

METHOD_OF_ONE(empty)
{
    TAKES(1)
    ps_frame_empty(LEARNER, arg[0] != 0);
    Py_RETURN_NONE;
}

METHOD_OF_ONE(assign)
{
    uint64_t given[4];
    if (takes(count, 5) < 0 || numbers(args, 1, 1, given) < 0 ||
        numbers(args + 2, 3, 3, given + 1) < 0)
        return NULL;
    const struct ps_weights *weights = LEARNER->weights;
    struct ps_gradient *values = malloc((weights->tensors + 1) * sizeof *values);
    PyObject *where = values ? PySequence_Fast(args[1], "takes a sequence of addresses") : NULL;
    int taken = where ? ps_take_gradients(weights, where, values) : -1;
    if (!values)
        PyErr_NoMemory();
    Py_XDECREF(where);
    if (!taken) {
        Py_BEGIN_ALLOW_THREADS
        ps_frame_assign(LEARNER, (char *)given[0], values, given[1], (uint32_t)given[2],
                        given[3]);
        Py_END_ALLOW_THREADS
    }
    free(values);
    if (taken)
        return NULL;
    Py_RETURN_NONE;
}

METHOD(check)
{
    struct ps_facts facts;
    if (takes(count, 1) < 0 || take_facts(LEARNER, args[0], &facts) < 0)
        return NULL;
    Py_RETURN_NONE;
}

METHOD_OF_ONE(publish)
{
    struct ps_facts facts;
    if (takes(count, 1) < 0 || take_facts(LEARNER, args[0], &facts) < 0)
        return NULL;
    int64_t sequence = ps_frame_publish(LEARNER, &facts);
    return refuses(sequence) ? refuse((int)sequence) : PyLong_FromLongLong(sequence);
}

METHOD(land)
{
    struct ps_facts facts;
    int result, entered, pushed = 0;
    if (takes(count, 2) < 0)
        return NULL;
    if (!Py_IS_TYPE(args[0], &ps_cuda_type)) {
        PyErr_Format(PyExc_TypeError, "takes a Cuda, not %R", args[0]);
        return NULL;
    }
    if (take_facts(LEARNER, args[1], &facts) < 0)
        return NULL;
    struct ps_cuda *cuda = &((struct cuda_object *)args[0])->cuda;
    struct ps_frame *slot = NULL;
    Py_BEGIN_ALLOW_THREADS
    entered = enter_as_only_one(LEARNER);
    result = entered == PS_NESTED ? PS_BUSY : entered;
    if (!result && (slot = try_claim(LEARNER, &result)) && !(result = ps_cuda_enter(cuda, &pushed)))
        result = ps_cuda_transfer(cuda, LEARNER, &facts, (char *)slot + PS_PAYLOAD_AT);
    if (!entered) /* before it waits for the driver, or the GIL: ps_land waits for this */
        ps_leave(&LEARNER->calls, PS_PUSHING);
    if (slot && !result)
        result = ps_cuda_publish(cuda, LEARNER);
    ps_cuda_leave(cuda, pushed);
    Py_END_ALLOW_THREADS
    return refuses(result) ? refuse(result) : PyLong_FromLong(result);
}

RETURNS(wanted, 0, PyBool_FromLong(ps_wanted(LEARNER)))
RETURNS(turn, 1, PyLong_FromUnsignedLongLong(ps_turn(LEARNER, arg[0])))
DOES(copy_begin, 1, ps_copy_begin(LEARNER, (float *)arg[0]))
DOES(copy_end, 0, ps_copy_end(LEARNER))

METHOD(copy_on)
{
    TAKES(1)
    int result;
    Py_BEGIN_ALLOW_THREADS
    result = ps_copy_on(LEARNER, arg[0]);
    Py_END_ALLOW_THREADS
    return PyLong_FromLong(result);
}

static PyObject *get_left(PyObject *self, void *unused)
{
    (void)unused;
    return PyBool_FromLong(ps_has_left(&LEARNER->calls));
}

static PyObject *get_forked(PyObject *self, void *unused)
{
    (void)unused;
    return PyBool_FromLong(ps_is_forked(&LEARNER->calls));
}

static PyGetSetDef properties[] = {
    {"forked", get_forked, NULL, "whether it belongs to the parent of this process", NULL},
    {"left", get_left, NULL, "whether it has detached", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMethodDef methods[] = {
    ENTRY(enter, "enter(kind): begins a call of several parts; ValueError if another thread is in "
                 "one, or the learner has detached"),
    ENTRY(leave, "leave(kind, *exc): ends it; an __exit__ in which no interrupt can come"),
    ENTRY(shut, "shut(): waits for the push that is under way; nothing is published afterwards"),
    ENTRY(claim, "claim(timeout_ns) -> address of the free slot, this thread's now, or a result < 0"),
    ENTRY(push, "push(facts, gradients) -> sequence number, or a result < 0: claims, writes and "
                "publishes, where nothing need be waited for"),
    ENTRY(write_frame, "write_frame(payload, gradients): a whole frame into a claimed slot"),
    ENTRY(append, "append(payload, tensor, (values, indices, count, factors)): to a frame of rows"),
    ENTRY(empty, "empty(computed): a frame without a gradient"),
    ENTRY(assign, "assign(payload, values, stream, flags, steps): an assignment of whole tensors"),
    ENTRY(check, "check(facts): raises what publish() and land() would raise for them"),
    ENTRY(publish, "publish(facts) -> sequence number of the frame that is written"),
    ENTRY(land, "land(cuda, facts) -> 0, CUDA's error, or a result < 0: claims, has the device transfer "
                "what is staged and publish it, where nothing need be waited for"),
    ENTRY(wanted, "wanted() -> whether the gradient in flight may still be applied"),
    ENTRY(turn, "turn(number) -> the iteration whose grant that mini-batch of the wave needs"),
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
    .tp_getset = properties,
};
