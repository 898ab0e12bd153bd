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
 * A learner that dies before its release store has pushed nothing; one that dies after it, the whole
 * frame. No process waits for a lock. A sleeping process is woken by the other side's
 * store, or by its own time-out.
 */
#ifndef PS_RING_H
#define PS_RING_H

#include "ps_layout.h"

/* Results of functions that can wait; all negative. Others: ps_calls.h. */
enum { PS_TIMEOUT = -1, PS_STOPPED = -2, PS_EVICTED = -3, PS_FINISHED = -4 };

/* Learner. */
struct ps_frame *ps_claim(struct ps_ring *ring, const struct ps_control *control,
                          uint64_t timeout_ns, int *result);
void ps_publish(struct ps_ring *ring, const struct ps_control *control);
/* Writes the frame's header, filling in what follows from the ring and from the sum of squares, and
 * publishes it in the slot that was claimed for frame.sequence. Returns 0; or PS_LEFT if the learner
 * has detached, PS_UNCLAIMED if that slot is not the next one, PS_STOPPED if the job has closed its
 * rings, PS_EVICTED if it has let the learner go: then nothing is published. */
int ps_publish_frame(struct ps_ring *ring, const struct ps_control *control,
                     struct ps_frame frame);
/* Waits for the turn of an iteration, which barriers then await. ps_try_grant: for a push, which may
 * be of a learner that takes no turns. */
int ps_wait_grant(struct ps_ring *ring, const struct ps_control *control, uint64_t clock,
                  uint64_t timeout_ns);
int ps_try_grant(struct ps_ring *ring, const struct ps_control *control, uint64_t clock);
int ps_wait_applied(struct ps_ring *ring, const struct ps_control *control, uint64_t sequence,
                    uint64_t timeout_ns);
/* From now on (on) or no longer: this learner computes no gradient. */
void ps_pause(struct ps_ring *ring, const struct ps_control *control, int on);

/* Asks that all other learners pause (on), or continue; by one thread. ps_wait_exclusive
 * waits until they do, for at most timeout_ns. ps_beat is a sign of life, by any thread. */
void ps_ask_exclusive(struct ps_ring *ring, const struct ps_control *control, int on);
int ps_is_exclusive(const struct ps_ring *ring, const struct ps_control *control);
int ps_wait_exclusive(struct ps_ring *ring, const struct ps_control *control, uint64_t timeout_ns);
void ps_beat(struct ps_ring *ring);

int ps_take_work(struct ps_ring *ring, const struct ps_control *control, uint64_t timeout_ns,
                 uint64_t *item);

/* Learner: copies a shard's part of the weights. Returns 1, or 0 if the shard wrote meanwhile. */
int ps_snapshot(const struct ps_control *control, uint32_t shard, void *to, const void *from,
                uint64_t bytes);

/* Learner: copies and converts the values in one pass. Returns the sum of their squares, which is
 * infinite if a value is not finite before or after conversion. residue: what earlier roundings did
 * not store, as many values; it is added to the values and then replaced (error feedback); or NULL.
 * No two areas overlap. */
double ps_copy(uint32_t dtype, void *to, const float *from, uint64_t count, float *residue);

/* A gradient of one tensor. With indices: of the rows listed, in any order; values of repeated rows
 * are added up. With factors: a product, which is computed while it is written. With neither: of
 * the whole tensor. Without values: none. */
struct ps_gradient {
    const float *values;    /* `count` rows, or the whole tensor */
    const int64_t *indices; /* of the rows */
    uint64_t count;
    const float *factors;   /* (count, rows of the tensor): row r of the gradient is the sum over i
                               of factors[i][r] times row i of values */
};

/* The tensor of a block: its rows, the values of each, and the residue of rounding them. */
struct ps_shape {
    uint64_t rows, width;
    float *residue; /* of this tensor, or NULL */
};

/* A payload as it is being written. */
struct ps_payload {
    char *at;
    uint32_t dtype;
    uint32_t skips_zeros; /* 1: rows whose gradient is zero may be left out */
    float *residue;       /* of all weights, padding included, or NULL */
    uint64_t end;         /* bytes written; a multiple of 64 */
    double squares;       /* their sum; infinite if a value is not finite */
};

static inline struct ps_frame *ps_slot(struct ps_ring *ring, uint64_t sequence)
{
    return (struct ps_frame *)((char *)ring + ring->slots_at +
                               (sequence % ring->slots) * ring->slot_bytes);
}

static inline uint64_t ps_rounded(uint64_t bytes) { return (bytes + 63) & ~63ull; }
static inline uint64_t ps_width_of(uint32_t dtype) { return dtype == PS_FLOAT32 ? 4 : 2; }

/* Whether a slot has room for some rows of a tensor, numbers and values together `bytes` long. It has
 * room for the numbers of all rows, but not where a row is a single value, or none. */
static inline int ps_has_room(const struct ps_shape *shape, uint64_t bytes)
{
    return shape->width > 1 || bytes <= ps_rounded(4 * shape->rows * shape->width) + 64;
}

#define PS_BAD_ROW (-1)   /* indices[*bad] is outside the tensor; nothing is written */
#define PS_NO_MEMORY (-2) /* nothing is written */

/* Learner: where the first block of a frame of rows begins, from the payload's begin. */
uint64_t ps_first_block(const struct ps_weights *weights);

/* Learner: brings the list of blocks into the order of the tensors. */
void ps_sort_blocks(char *payload, uint32_t blocks);

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
void ps_pass(uint64_t ring, uint64_t shard, uint64_t tail);
void ps_hand_out(uint64_t ring, uint64_t number, uint64_t item);
void ps_spin_once(void);
void ps_spin_on(double since);
uint32_t ps_cpu(void);
uint32_t ps_thread_id(void);
void ps_wide_awake(uint64_t control, uint64_t shard);
void ps_shard_sleep(uint64_t control, uint64_t shard, uint64_t rings, uint64_t seen, uint64_t apart,
                    uint64_t count, uint32_t bell, uint64_t timeout_ns);
/* Server: sleeps until the low half of one of the words, at most PS_WORDS, is not that of its value,
 * is woken, or the time is up. Returns 0, or the error number of the kernel. */
#define PS_WORDS 128
int ps_wait_any(const uint64_t *words, const uint64_t *values, uint64_t count,
                uint64_t timeout_ns);

#endif
