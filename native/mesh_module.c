/* gadei_ps._mesh: the data plane between agents, for Python; see mesh.h. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "mesh.h"

#define METHOD(name) static PyObject *name(PyObject *self, PyObject *given)

/* Runs until the exchange has ended or a signal handler raises. */
METHOD(exchange)
{
    (void)self;
    Py_buffer plan;
    if (PyObject_GetBuffer(given, &plan, PyBUF_WRITABLE) < 0)
        return NULL;
    struct mesh_exchange *running = NULL;
    PyObject *answer = NULL;
    const struct mesh_plan *asked = plan.buf;
    if (plan.len != sizeof *asked || asked->members < 1 || asked->members > MESH_MEMBERS ||
        asked->me >= asked->members || asked->parts > MESH_MEMBERS ||
        (asked->reduce && asked->parts != asked->members) || !asked->piece || !asked->slots ||
        asked->slots > MESH_MOST_SLOTS) {
        PyErr_SetString(PyExc_ValueError, "no plan of an exchange");
    } else if (!(running = mesh_begin(plan.buf))) {
        PyErr_NoMemory();
    } else {
        enum mesh_result result = MESH_INTERRUPTED;
        while (result == MESH_INTERRUPTED && PyErr_CheckSignals() == 0) {
            Py_BEGIN_ALLOW_THREADS
            result = mesh_run(running);
            Py_END_ALLOW_THREADS
        }
        if (result != MESH_INTERRUPTED)
            answer = PyLong_FromLong(result);
        mesh_end(running);
    }
    PyBuffer_Release(&plan);
    return answer;
}

static PyObject *sum_with(PyObject *given, uint32_t (*function)(const void *, size_t))
{
    Py_buffer bytes;
    if (PyObject_GetBuffer(given, &bytes, PyBUF_SIMPLE) < 0)
        return NULL;
    uint32_t sum;
    Py_BEGIN_ALLOW_THREADS
    sum = function(bytes.buf, (size_t)bytes.len);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&bytes);
    return PyLong_FromUnsignedLong(sum);
}

METHOD(checksum)
{
    (void)self;
    return sum_with(given, mesh_checksum);
}

METHOD(checksum_plain)
{
    (void)self;
    return sum_with(given, mesh_checksum_plain);
}

static PyMethodDef methods[] = {
    {"exchange", exchange, METH_O, "exchange(plan) -> result: one exchange with all members"},
    {"checksum", checksum, METH_O, "checksum(buffer) -> CRC-32C"},
    {"checksum_plain", checksum_plain, METH_O, "checksum_plain(buffer) -> CRC-32C, the reference"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "gadei_ps._mesh", "The data plane between agents.", -1, methods,
    NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__mesh(void)
{
    PyObject *made = PyModule_Create(&module);
    if (!made)
        return NULL;
    if (PyModule_AddIntConstant(made, "PLAN_BYTES", sizeof(struct mesh_plan)) < 0 ||
        PyModule_AddIntMacro(made, MESH_FINISHED) < 0 ||
        PyModule_AddIntMacro(made, MESH_WOKEN) < 0 || PyModule_AddIntMacro(made, MESH_CLOSED) < 0 ||
        PyModule_AddIntMacro(made, MESH_SILENT) < 0 ||
        PyModule_AddIntMacro(made, MESH_ABSENT) < 0 ||
        PyModule_AddIntMacro(made, MESH_FAILED) < 0 ||
        PyModule_AddIntMacro(made, MESH_BAD_HEADER) < 0 ||
        PyModule_AddIntMacro(made, MESH_OTHER_ROUND) < 0 ||
        PyModule_AddIntMacro(made, MESH_UNEXPECTED) < 0 ||
        PyModule_AddIntMacro(made, MESH_BAD_PAYLOAD) < 0 ||
        PyModule_AddIntMacro(made, MESH_MEMBERS) < 0) {
        Py_DECREF(made);
        return NULL;
    }
    return made;
}
