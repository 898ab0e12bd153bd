/*
 * A learner's side of its segments: the frame that it writes and publishes, and consistent copies of
 * the weights. The client for C (gadei_*.c) and the one for Python (module_learner.c) both use
 * this file.
 *
 *   claim     ps_frame_claim, which returns the slot
 *   write     ps_frame_whole, or ps_frame_begin and then ps_frame_dense or ps_frame_append for each
 *             tensor, or ps_frame_empty, or ps_frame_assign
 *   publish   ps_frame_publish; or ps_frame_land, when a device still writes the payload
 *
 * All functions are for the learner's process, and for one thread at a time: ps_calls.h. The callers
 * enter and leave.
 */
#ifndef PS_LEARNER_H
#define PS_LEARNER_H

#include <math.h>

#include "ps_calls.h"
#include "ps_land.h"
#include "ps_ring.h"

/* The frame that is being written. kind 0: nothing is written into the slot yet. */
struct ps_writing {
    struct ps_payload payload;
    uint32_t kind;   /* enum ps_frame_kind */
    uint32_t blocks; /* of a frame of rows; of an empty one: 1 if its gradient was computed */
    uint32_t sorted; /* 1: its blocks are in the table's order */
    uint32_t flags;  /* PS_RESET, PS_ADD of an assignment */
    uint64_t stream, steps; /* of an assignment */
};

/* A consistent copy under way. */
struct ps_copying {
    float *to;
    uint32_t copied;   /* shards whose part is whole */
    uint32_t requests; /* number of the last one; never 0 */
    uint64_t asked_ns; /* when it was made; 0: not yet */
};

struct ps_learner {
    struct ps_ring *ring;
    const struct ps_control *control;
    const struct ps_weights *weights;
    float *residue;       /* for each value what rounding has not sent (error feedback), or NULL */
    uint32_t dtype;       /* of frames: enum ps_wire_type */
    uint32_t skips_zeros; /* 1: rows whose gradient is zero move nothing and need not be sent */
    uint32_t copies;      /* 1: gradients come from a pulled copy; 0: from the live weights */
    uint64_t numbers;     /* of the optimizer, as `skips_zeros` goes by them */
    uint64_t version;     /* of the weights that the next gradient is computed from */
    uint64_t published;   /* frames */
    double started;       /* of the iteration, CLOCK_MONOTONIC seconds */
    struct ps_writing writing;
    struct ps_copying copying;
    struct ps_calls calls;
};

/* What the learner reports of a gradient. */
struct ps_facts {
    uint64_t version; /* of the weights it was computed from */
    uint64_t batch;   /* that it answers, or PS_NO_BATCH */
    uint32_t samples;
    double loss;
    float rate_scale[PS_MAX_GROUPS]; /* for each group; not negative, finite */
    float momentum;                  /* of all groups, from 0 to below 1; NAN: each group's own */
};

/* The same scale for all groups, and the momentum of each. */
static inline struct ps_facts ps_scaled(struct ps_facts facts, float scale)
{
    for (int i = 0; i < PS_MAX_GROUPS; i++)
        facts.rate_scale[i] = scale;
    facts.momentum = NAN;
    return facts;
}

/* Makes a learner whose next gradient is computed from the live weights as they are now. */
void ps_learner_begin(struct ps_learner *learner, struct ps_ring *ring,
                      const struct ps_control *control, const struct ps_weights *weights);

/* Why a gradient cannot be applied with these scales, as a line for the user; NULL if it can. */
const char *ps_wrong_scales(const struct ps_learner *learner, const struct ps_facts *facts);

/* Whether the gradient of the current iteration may still be applied. It may not once the
 * synchronization model has closed the iteration without it (cutoff). */
int ps_wanted(const struct ps_learner *learner);

/* The iteration whose grant mini-batch `number` needs, counted from 0 in the current wave and on into
 * the next one. Only the last mini-batch of a wave needs the wave's own grant: those before it need
 * no more than the wave before had. So a learner may begin all but one of the next wave's
 * mini-batches before their grant; SyncModel.mini_batches has the same rule for the simulator. */
uint64_t ps_turn(const struct ps_learner *learner, uint64_t number);

/* -- frames ------------------------------------------------------------------------------------ */

/* Waits for a free slot and claims it for this thread, which then writes and publishes it. A slot
 * that this thread has claimed already starts over. Returns NULL with *result: of ps_claim, or
 * PS_LEFT, PS_OTHERS or PS_FORKED. */
struct ps_frame *ps_frame_claim(struct ps_learner *learner, uint64_t timeout_ns, int *result);

/* Releases the slot that this thread has claimed. */
void ps_frame_drop(struct ps_learner *learner);

/* The rows of a tensor. residue: of all weights, or NULL. */
struct ps_shape ps_shape_of(const struct ps_tensor *tensor, float *residue);

/* Writes a whole payload, at the slot's PS_PAYLOAD_AT. gradients: one for each of the model's
 * tensors, in the order of its table. It becomes a frame of rows if one of them lists rows or is a
 * product, or if zeros are skipped and many values are zero. Returns 0, PS_NO_MEMORY, or PS_BAD_ROW
 * if indices[*bad] of tensor *number names no row. */
int ps_frame_whole(struct ps_learner *learner, char *payload, const struct ps_gradient *gradients,
                   uint64_t *number, uint64_t *bad);

/* Begins a payload that comes tensor by tensor. kind: PS_DENSE or PS_ROWS. */
void ps_frame_begin(struct ps_learner *learner, char *payload, enum ps_frame_kind kind);

/* Dense: writes one tensor, zeros if `values` is NULL, and zeros up to the next tensor. Each must be
 * written once; the last write counts. Returns the tensor's sum of squares; the caller adds them up
 * in writing.payload.squares, in the order of the table. */
double ps_frame_dense(struct ps_learner *learner, uint64_t number, const float *values);

/* Rows: appends one tensor, each at most once. *squares receives its sum of squares. Returns 0,
 * PS_NO_MEMORY, or PS_BAD_ROW if indices[*bad] names no row. An error leaves the frame as before. */
int ps_frame_append(struct ps_learner *learner, uint64_t number,
                    const struct ps_gradient *gradient, double *squares, uint64_t *bad);

/* Writes a frame without gradient. computed: 1 if the iteration took the time of a whole one. */
void ps_frame_empty(struct ps_learner *learner, uint32_t computed);

/* Writes an assignment: whole tensors, in float32, that replace those of the job, or are added to
 * them. values: as for ps_frame_whole, without rows and products; a tensor without values is left
 * alone. stream: 0 the weights, 1 or 2 a slot of the optimizer. flags: PS_RESET, PS_ADD. steps:
 * optimizer steps from then on, or PS_SAME_STEPS. */
void ps_frame_assign(struct ps_learner *learner, char *payload, const struct ps_gradient *values,
                     uint64_t stream, uint32_t flags, uint64_t steps);

/* Publishes the frame that is written, in the slot that this thread has claimed, and begins the next
 * iteration. Returns its sequence number; or PS_UNCLAIMED, PS_OTHERS, PS_LEFT, PS_STOPPED or
 * PS_EVICTED, and then nothing is published. */
int64_t ps_frame_publish(struct ps_learner *learner, const struct ps_facts *facts);

/* Prepares `landing` for a frame that a device writes, of `bytes` payload, into the slot that this
 * thread has claimed; ps_land then publishes it. Results of ps_frame_publish, or 0. sums: what the
 * device writes besides the payload; parts: numbers in its sum of squares; loss_there: 1 if the loss
 * is among them. */
struct ps_landed {
    uint64_t *sums;
    uint64_t parts, loss_there, bytes;
    uint32_t kind, blocks;
};
int ps_frame_land(struct ps_learner *learner, struct ps_landing *landing,
                  const struct ps_landed *landed, const struct ps_facts *facts);

/* Counts a frame that is published, or given to the device; begins the next iteration, releases the
 * slot. */
void ps_frame_counted(struct ps_learner *learner);

/* -- pulls ------------------------------------------------------------------------------------- */

/* The part of the weights that a shard writes: whole chunks, except the end of the last part. */
void ps_shard_range(uint64_t elements, uint32_t shards, uint32_t index, uint64_t *low,
                    uint64_t *high);

/* Begins a copy of all weights. Each shard's part will be as it was between two gradients. */
void ps_copy_begin(struct ps_learner *learner, float *to);

/* Continues the copy for at most timeout_ns. Returns 0 when it is whole, or PS_TIMEOUT. The shards
 * hold back gradients for a bounded time after each request; after that it repeats the request. */
int ps_copy_on(struct ps_learner *learner, uint64_t timeout_ns);

/* Ends the copy, whole or not, so that the shards continue. */
void ps_copy_end(struct ps_learner *learner);

#endif
