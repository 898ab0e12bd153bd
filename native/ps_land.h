/*
 * Publishes a frame that a device writes. The device's driver calls ps_land() after the transfers
 * of the same stream, so that the frame becomes visible when all of it is in its slot.
 */
#ifndef PS_LAND_H
#define PS_LAND_H

#include "ps_calls.h"
#include "ps_ring.h"

/* What the device writes besides the payload, in 64-bit words. */
enum {
    PS_SUMS_BAD = 0,   /* 0; the host puts PS_NOT_LANDED where it will arrive; ps_land makes it 1 +
                          the number of a tensor that has PS_BAD_ROWS */
    PS_SUMS_LOSS = 1,  /* float, if landing.loss_there */
    PS_SUMS_ROWS = 2   /* for each tensor the number of rows listed; then doubles, the parts of the
                          sum of squares, infinite if a value is not finite */
};
#define PS_BAD_ROWS (~0ull)    /* a row that was named does not exist */
#define PS_NOT_LANDED (-719ull) /* minus CUDA_ERROR_LAUNCH_FAILED, which a wait for the frame gives */

struct ps_landing {
    struct ps_calls *calls; /* the learner's; it lives until the device has called ps_land */
    struct ps_ring *ring;
    const struct ps_control *control;
    uint64_t *sums;
    uint64_t tensors, parts, loss_there;
    struct ps_frame frame; /* except what is read from sums */
};

/* landing: struct ps_landing. Publishes nothing once the learner has detached, nor unless the sums have
 * come, the last of the frame: after a failed kernel the driver may call this even so, against the
 * documentation of cuLaunchHostFunc. Called in a thread of the driver, where no CUDA call is allowed. */
void ps_land(void *landing);

#endif
