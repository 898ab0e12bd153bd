/* Parts of frames, for devices that make frames themselves; see module.h. */
#include "module.h"

#include "ps_land.h"
#include "ps_product.h"

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

PyMethodDef ps_frame_methods[] = {
    ENTRY(copy, "copy(dtype, to, from, count, residue) -> sum of squares; infinite if a value is "
                "not finite"),
    ENTRY(nonzeros, "nonzeros(values, count) -> how many differ from zero"),
    ENTRY(sparse_product, "sparse_product(to, factors, matrix, count, rows, width)"),
    ENTRY(first_block, "first_block(weights) -> where the first block may begin"),
    {NULL, NULL, 0, NULL},
};
