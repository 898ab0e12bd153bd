/*
 * A frame that a device is still writing: the driver calls ps_land() behind the transfers, in the
 * order of their stream, so that the frame becomes visible when all of it has landed in its slot.
 */
#ifndef PS_LAND_H
#define PS_LAND_H

#include "ps_ring.h"

/* What comes beside the payload, in 64-bit words: */
enum {
    PS_SUMS_BAD = 0,   /* 1 + the number of a tensor of which a row was named that there is not */
    PS_SUMS_LOSS = 1,  /* float, if landing.loss_there */
    PS_SUMS_ROWS = 2   /* of each tensor the rows listed, then doubles: parts of the sum of squares,
                          infinite if a value is not finite */
};

struct ps_landing {
    struct ps_ring *ring;
    const struct ps_control *control;
    const uint64_t *sums;
    uint64_t tensors, parts, loss_there;
    struct ps_frame frame; /* but for what the sums say */
};

/* landing: struct ps_landing. Runs in a thread of the driver, where no CUDA call is allowed. */
void ps_land(void *landing);

#endif
