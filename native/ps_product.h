/* A gradient that is a product of two matrices, as that of a linear layer is. It is computed row by
 * row in the slot and never stored anywhere else. */
#ifndef PS_PRODUCT_H
#define PS_PRODUCT_H

#include "ps_ring.h"

/* Bytes on the wire; shorter rows are always sent, because their numbers take as much as they save. */
#define PS_LEAST_ROW 32

/* Learner: appends a block with the product. Factors of zero cost no time; after a maximum over
 * positions or a ReLU most factors are zero. Returns 0 or PS_NO_MEMORY. */
int ps_write_product(struct ps_payload *payload, struct ps_block *block,
                     const struct ps_gradient *gradient, const struct ps_shape *shape);

/* Learner: computes to = factors times matrix. Shapes: factors (count, rows), mostly zeros; matrix
 * (rows, width); to (count, width). */
void ps_sparse_product(float *to, const float *factors, const float *matrix, uint64_t count,
                       uint64_t rows, uint64_t width);

#endif
