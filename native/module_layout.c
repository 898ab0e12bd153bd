/* The layout of the shared memory and its codes as the compiler made them; see module.h. */
#include "module.h"

#define TEXT_OF(...) #__VA_ARGS__
#define TEXT(...) TEXT_OF(__VA_ARGS__)

struct field {
    const char *tag, *name;
    size_t at, bytes;
    const char *type, *dims, *writer, *meaning;
};

#define FIELD(tag, at, type, name, dims, writer, meaning)                                  \
    {#tag, #name, offsetof(struct tag, name), sizeof(((struct tag *)0)->name), #type, TEXT(dims), \
     #writer, meaning},
#define PADDING(at, bytes)
#define FIELDS_OF(tag, FIELDS, size) FIELDS(FIELD, PADDING, tag)
static const struct field fields[] = {PS_STRUCTS(FIELDS_OF)};

#define STRUCT(tag, FIELDS, size) {#tag, sizeof(struct tag)},
static const struct {
    const char *tag;
    size_t bytes;
} structs[] = {PS_STRUCTS(STRUCT)};

#define NUMBER(name) {#name, name},
static const struct {
    const char *name;
    uint64_t value;
} all_numbers[] = {PS_NUMBERS(NUMBER)};

#define CODE(name, value, meaning) {NULL, #name, value, meaning},
#define ENUM(tag, LIST) {#tag, NULL, 0, NULL}, LIST(CODE)
static const struct {
    const char *tag, *name; /* a row with a tag begins an enum */
    int value;
    const char *meaning;
} all_codes[] = {PS_ENUMS(ENUM)};

#define EACH(i, array) for (size_t i = 0; i < sizeof(array) / sizeof *(array); i++)

/* Adds value, of which it takes the reference, under the key; -1 with an exception set. */
static int put(PyObject *dict, const char *key, PyObject *value)
{
    int result = dict && value ? PyDict_SetItemString(dict, key, value) : -1;
    Py_XDECREF(value);
    return result;
}

static PyObject *fields_of(const char *tag)
{
    PyObject *made = PyDict_New();
    EACH(i, fields) {
        const struct field *one = fields + i;
        if (made && !strcmp(one->tag, tag) &&
            put(made, one->name,
                Py_BuildValue("(nnssss)", (Py_ssize_t)one->at, (Py_ssize_t)one->bytes, one->type,
                              one->dims, one->writer, one->meaning)) < 0)
            Py_CLEAR(made);
    }
    return made;
}

METHOD(layout)
{
    PyObject *all = PyDict_New();
    EACH(i, structs)
        if (all && put(all, structs[i].tag,
                       Py_BuildValue("(nN)", (Py_ssize_t)structs[i].bytes,
                                     fields_of(structs[i].tag))) < 0)
            Py_CLEAR(all);
    return all;
}

METHOD(numbers_of_layout)
{
    PyObject *all = PyDict_New();
    EACH(i, all_numbers)
        if (all && put(all, all_numbers[i].name,
                       PyLong_FromUnsignedLongLong(all_numbers[i].value)) < 0)
            Py_CLEAR(all);
    return all;
}

METHOD(codes)
{
    PyObject *all = PyDict_New(), *list = NULL; /* borrowed of all */
    EACH(i, all_codes) {
        if (!all)
            break;
        int result;
        if (all_codes[i].tag) {
            list = PyDict_New();
            result = put(all, all_codes[i].tag, list);
        } else {
            result = put(list, all_codes[i].name,
                         Py_BuildValue("(is)", all_codes[i].value, all_codes[i].meaning));
        }
        if (result < 0)
            Py_CLEAR(all);
    }
    return all;
}

PyMethodDef ps_layout_methods[] = {
    ENTRY(layout, "layout() -> {struct: (bytes, {field: (offset, bytes, type, dimensions, writer, "
                  "meaning)})}"),
    {"numbers", (PyCFunction)(void (*)(void))numbers_of_layout, METH_FASTCALL,
     "numbers() -> {name: value} of ps_codes.h"},
    ENTRY(codes, "codes() -> {enum: {name: (value, meaning)}} of ps_codes.h"),
    {NULL, NULL, 0, NULL},
};
