/* What the methods of gadei_ps._native.Learner take. -1: an exception is set. */
#ifndef MODULE_ARGUMENTS_H
#define MODULE_ARGUMENTS_H

#include "module.h"
#include "ps_learner.h"

/* (version, batch, samples, rate_scale, loss). ValueError for what no frame may say. */
int take_facts(const struct ps_learner *learner, PyObject *given, struct ps_facts *facts);

/* Four numbers. */
int take_gradient(PyObject *const *args, struct ps_gradient *gradient);

/* A gradient for each tensor. where: PySequence_Fast's, four numbers for each, or one address. */
int take_gradients(const struct ps_weights *weights, PyObject *where,
                   struct ps_gradient *gradients);

/* IndexError(number of the tensor, row). */
void bad_row(uint64_t tensor, int64_t row);

#endif
