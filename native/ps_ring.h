/*
 * The ring's protocol, both sides. One producer (the learner), and each shard a consumer with a
 * tail of its own; a slot is free when every tail has passed it.
 *
 *   learner   claim   wait until head - slots < every tail, return slot head % slots
 *             fill    header and payload; nobody else reads them
 *             publish head + 1, release                                     SYNC POINT: frame
 *   shard     peek    head, acquire                                         SYNC POINT: frame
 *             apply
 *             release tail + 1, release                                     SYNC POINT: slot
 *   learner   claim   every tail, acquire                                   SYNC POINT: slot
 *
 * A learner that dies before its release store has pushed nothing; after it, all. Nobody waits
 * for a lock. Whoever sleeps is woken by the other side's store, or by its own time-out.
 */
#ifndef PS_RING_H
#define PS_RING_H

#include "ps_layout.h"

/* Results of what can wait; all negative. */
enum { PS_TIMEOUT = -1, PS_STOPPED = -2, PS_EVICTED = -3, PS_FINISHED = -4 };

/* Learner. */
struct ps_frame *ps_claim(struct ps_ring *ring, const struct ps_control *control,
                          uint64_t timeout_ns, int *result);
void ps_publish(struct ps_ring *ring, const struct ps_control *control);
/* The same for a whole header: fills in what the ring and the sum of squares say of the frame, and
 * returns its sequence number. */
uint64_t ps_publish_frame(struct ps_ring *ring, const struct ps_control *control,
                          struct ps_frame frame);
int ps_wait_grant(struct ps_ring *ring, const struct ps_control *control, uint64_t clock,
                  uint64_t timeout_ns);
int ps_wait_applied(struct ps_ring *ring, const struct ps_control *control, uint64_t sequence,
                    uint64_t timeout_ns);
int ps_take_work(struct ps_ring *ring, const struct ps_control *control, uint64_t timeout_ns,
                 uint64_t *item);

/* Learner: copies a shard's part of the weights unless the shard wrote meanwhile; 1 if it is whole. */
int ps_snapshot(const struct ps_control *control, uint32_t shard, void *to, const void *from,
                uint64_t bytes);

/* Learner: one pass that copies, converts and adds up the squares of the values given: infinite if
 * a value is not finite, or not as it is stored. left: what earlier roundings have left over, as
 * many values, added before and replaced (error feedback); or NULL. Nothing overlaps. */
double ps_copy(uint32_t dtype, void *to, const float *from, uint64_t count, float *left);

/* A gradient of one tensor: of the rows listed, in any order, where the values of repeated ones are
 * added up; or a product, which is worked out on its way; or, with neither, all of it; or, without
 * values, none. */
struct ps_gradient {
    const float *values;    /* `count` rows, or the whole tensor */
    const int64_t *indices; /* of the rows */
    uint64_t count;
    const float *factors;   /* `count` times the tensor's rows: row r is the sum of factor[i][r] times
                               the i-th row of values */
};

/* What a block is of: a tensor's rows, how many values each has, and what rounding them left. */
struct ps_shape {
    uint64_t rows, width;
    float *left; /* of the tensor, or NULL */
};

/* A payload as it is being written. */
struct ps_payload {
    char *at;
    uint32_t dtype;
    uint64_t end;   /* of what is written, bytes from its begin; a multiple of 64 */
    double squares; /* sum; infinite if a value is not finite */
};

/* The sum of squares once a buffer is written: its change is no part of the gradient's norm, but a
 * value that is not finite is told. */
static inline double ps_not_counted(double before, double squares)
{
    return squares <= 1.7e308 ? before : squares;
}

static inline struct ps_frame *ps_slot(struct ps_ring *ring, uint64_t sequence)
{
    return (struct ps_frame *)((char *)ring + ring->slots_at +
                               (sequence % ring->slots) * ring->slot_bytes);
}

static inline uint64_t ps_rounded(uint64_t bytes) { return (bytes + 63) & ~63ull; }
static inline uint64_t ps_width_of(uint32_t dtype) { return dtype == PS_FLOAT32 ? 4 : 2; }

#define PS_BAD_ROW (-1)   /* indices[*bad] is no row of the tensor; nothing is written */
#define PS_NO_MEMORY (-2) /* likewise */

/* Learner: appends a block and describes it in `block`, but for its tensor. Where all rows are
 * named, or so many single values that listing them takes more room than all values do, the block
 * is of all of it: then rows that are not named have gradient zero. spare: whether rows whose
 * gradient is zero may be left out. Returns 0, or what is wrong. */
int ps_write_block(struct ps_payload *payload, struct ps_block *block,
                   const struct ps_gradient *gradient, const struct ps_shape *shape, int spare,
                   uint64_t *bad);

/* Learner: a frame of rows, tensor by tensor in any order: where its first block may begin; the next
 * block, one for a tensor; and, when all are written, their order. */
uint64_t ps_first_block(const struct ps_weights *weights);
int ps_append(const struct ps_weights *weights, struct ps_payload *payload, uint32_t blocks,
              uint64_t number, const struct ps_gradient *gradient, int spare, float *left,
              uint64_t *bad);
void ps_sort_blocks(char *payload, uint32_t blocks);

/* Learner: one tensor of a dense frame, in its place, zeros without values; and zeros up to the next
 * tensor. */
void ps_write_dense(const struct ps_weights *weights, struct ps_payload *payload, uint64_t number,
                    const float *values, float *left);

/* Learner: a whole frame's payload. gradients: one for each of the model's tensors, in the order of
 * its table. It becomes a frame of rows if one of them lists rows, or if `spare` allows it and many
 * are zero. left: as many values as the model has, or NULL. */
struct ps_written {
    uint32_t kind, blocks;
    uint64_t bytes;
    double squares;
    uint64_t tensor, bad; /* where PS_BAD_ROW was found */
};
int ps_write_frame(const struct ps_weights *weights, uint32_t dtype, char *payload,
                   const struct ps_gradient *gradients, int spare, float *left,
                   struct ps_written *written);

/* Server; addresses come as integers because compiled Python calls these. */
uint64_t ps_get(uint64_t address);
void ps_set(uint64_t address, uint64_t value);
uint32_t ps_get32(uint64_t address);
void ps_set32(uint64_t address, uint32_t value);
void ps_full_fence(void);
void ps_wake(uint64_t address);
void ps_bell(uint64_t address);
double ps_clock(void);
void ps_release(uint64_t ring, uint64_t shard, uint64_t tail);
void ps_hand_out(uint64_t ring, uint64_t number, uint64_t item);
void ps_spin_once(void);
void ps_spin_on(double since);
uint32_t ps_cpu(void);
uint32_t ps_thread_id(void);
void ps_wide_awake(uint64_t control, uint64_t shard);
void ps_shard_sleep(uint64_t control, uint64_t shard, uint64_t rings, uint64_t seen,
                    uint64_t count, uint32_t bell, uint64_t timeout_ns);

#endif
