/* A gradient that is a product of two matrices, as that of a linear layer is: worked out row by row
 * in the slot, so that it is never written anywhere else. */
#ifndef PS_PRODUCT_H
#define PS_PRODUCT_H

#include "ps_ring.h"

#define PS_LEAST_WIDTH 8 /* values of a row that is worth to be left out */

/* Learner: appends a block of it. Factors that are zero cost nothing: after a maximum over positions
 * or a ReLU most are. spare: rows of which all are may be left out. Returns 0 or PS_NO_MEMORY. */
int ps_write_product(struct ps_payload *payload, struct ps_block *block,
                     const struct ps_gradient *gradient, const struct ps_shape *shape, int spare);

/* Learner: to = factors times matrix, (count, width), for factors (count, rows) of which most are
 * zero and a matrix (rows, width). */
void ps_sparse_product(float *to, const float *factors, const float *matrix, uint64_t count,
                       uint64_t rows, uint64_t width);

#endif
