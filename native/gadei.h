/*
 * gadei.h: learners of gadei-ps in C and C++.
 *
 * A learner attaches to a job that is running on this machine, reads the live weights where they
 * are, and pushes gradients into a ring of its own; the parameter server applies them. Build it
 * with six files of native/ and nothing else (-lrt is for glibc before 2.34):
 *
 *     cc -std=gnu11 -O2 -Inative -o learner learner.c \
 *         native/ps_client.c native/ps_attach.c native/ps_ring.c native/ps_copy.c native/ps_rows.c native/ps_product.c -lrt
 *
 * From C++, compile those six with cc and link them; this header needs no other.
 *
 *     gadei_learner *learner;
 *     if (gadei_attach("demo", "mine", &learner) < 0)
 *         return fprintf(stderr, "%s\n", gadei_error(NULL)), 1;
 *     while (gadei_wait_turn(learner, -1) == GADEI_OK) {
 *         ... compute `gradient` from gadei_weights(learner) ...
 *         if (gadei_push(learner, gradient, loss, samples, -1) < 0)
 *             break;
 *     }
 *     gadei_detach(learner);
 *
 * Where a job's waits spin (spin_us of 8 or more), a wait that finds itself on the core of one of the
 * server's threads changes this thread's affinity for an instant, to be moved to another one.
 *
 * Every function here is for the learner's process, and a learner belongs to the one thread that
 * attached it; a process may have several. Nothing takes a lock that another process could hold. A
 * learner may be killed at any instruction: what it has published is applied, what it has not
 * published is dropped, and its batches go to others.
 *
 * Results: 0, or one of the negative codes below; then gadei_error() says what and where. Every
 * function that may wait has a limit in milliseconds, timeout_ms; a negative one means as long as
 * the job lives. A wait ends early when the job stops or fails, and after some ten seconds in which
 * there was neither a parameter server nor a watchdog. That another server takes over is not told.
 */
#ifndef GADEI_H
#define GADEI_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum {
    GADEI_OK = 0,
    GADEI_NONFINITE = 1, /* not an error: done, but a value was NaN or infinite */
    GADEI_TIMEOUT = -1,  /* not within timeout_ms; nothing has changed, ask again */
    GADEI_STOPPED = -2,  /* the job has been stopped */
    GADEI_EVICTED = -3,  /* the job has given this learner's place away */
    GADEI_FINISHED = -4, /* there will be no more batches */
    GADEI_FAILED = -5,   /* the job has failed: there is no server, and nobody to start one */
    GADEI_ERROR = -6,    /* anything else: wrong use, no such job, a foreign segment */
};

/* How the values of a gradient travel. The 16-bit formats halve the memory traffic. */
enum { GADEI_FLOAT32 = 1, GADEI_BFLOAT16 = 2, GADEI_FLOAT16 = 3 };

enum { GADEI_PARAMETER = 1, GADEI_BUFFER = 2 }; /* a buffer is moved by plain addition */

#define GADEI_MAX_DIMS 8

typedef struct gadei_learner gadei_learner;

/* A tensor of the model. Its values are weights[start] to weights[start + count - 1], row-major;
 * the same places in a whole gradient. Values between tensors belong to none and are ignored. */
struct gadei_tensor {
    const char *name;
    uint32_t role; /* GADEI_PARAMETER or GADEI_BUFFER */
    uint32_t dims;
    uint64_t shape[GADEI_MAX_DIMS]; /* the first `dims` */
    uint64_t start;                 /* in values */
    uint64_t count;                 /* in values */
};

/* Attaches this process to a job and stores its handle in *learner, or NULL.
 *
 * job_or_socket: a job's name, or a path (with a '/') of its control socket; NULL or "": the
 * environment variable GADEI_PS_JOB. name: shown in the job's status, cut to 31 bytes; may be NULL.
 * Waits at most 10 s for the watchdog. GADEI_ERROR: no such job, no model, a segment that is
 * foreign, truncated or of another layout version; GADEI_STOPPED, GADEI_FAILED. gadei_error(NULL)
 * has the reason.
 */
int gadei_attach(const char *job_or_socket, const char *name, gadei_learner **learner);

/* Leaves the job and frees the handle, which may be NULL. What has been published is applied;
 * batches not answered go to others. Waits at most 10 s. In a child of fork() it only frees. */
void gadei_detach(gadei_learner *learner);

/* The last error of this learner, or, for NULL, of this thread's last gadei_attach; one line, valid
 * until the next call. "" if there was none. */
const char *gadei_error(const gadei_learner *learner);

/* -- the model --------------------------------------------------------------------------------- */

/* The table of tensors, valid until gadei_detach; *count receives its length. */
const struct gadei_tensor *gadei_tensors(const gadei_learner *learner, uint32_t *count);

/* Index of a tensor in that table, or GADEI_ERROR if the model has none of this name. */
int gadei_find(gadei_learner *learner, const char *name);

/* Values of weights and of a whole gradient, with what lies between tensors. */
uint64_t gadei_elements(const gadei_learner *learner);

/* The live weights, gadei_elements() float32, mapped read-only: a write is a SIGSEGV. The server
 * changes them while you look; valid until gadei_detach. */
const float *gadei_weights(const gadei_learner *learner);

/* How many gradients the job has applied so far. */
uint64_t gadei_version(const gadei_learner *learner);

/* 1 once the job wants its learners to end, else 0. */
int gadei_stopping(const gadei_learner *learner);

/* Copies the weights, gadei_elements() float32, without locks: gradients may be applied meanwhile.
 * Gradients published from now on count as computed from them. */
void gadei_pull(gadei_learner *learner, float *weights);

/* The same, but each shard's part is one that it had between two gradients. GADEI_TIMEOUT,
 * GADEI_FAILED; then `weights` holds no such copy. */
int gadei_pull_consistent(gadei_learner *learner, float *weights, int64_t timeout_ms);

/* -- push -------------------------------------------------------------------------------------- */

/* How this learner's gradients travel: GADEI_FLOAT32 (at first), GADEI_BFLOAT16 or GADEI_FLOAT16.
 * GADEI_ERROR for another, or once a slot has been claimed. */
int gadei_set_wire(gadei_learner *learner, uint32_t dtype);

/* Waits until the synchronization model lets this learner begin its next iteration. The gradient
 * that follows counts as begun now and as computed from the weights as they are now.
 * GADEI_TIMEOUT, GADEI_STOPPED, GADEI_EVICTED, GADEI_FAILED. */
int gadei_wait_turn(gadei_learner *learner, int64_t timeout_ms);

/* Waits for the turn and for a free slot of the ring, which gadei_write then fills. Claiming again
 * before gadei_publish begins the same slot anew. Errors as above. */
int gadei_claim(gadei_learner *learner, int64_t timeout_ms);

/* The same for a gradient of which only some rows are given, as of embeddings. A tensor that is not
 * written is left as it is, and so is a row that is not named, with the optimizer's state of it:
 * momentum and Adam's moments move a row only when a gradient names it. */
int gadei_claim_rows(gadei_learner *learner, int64_t timeout_ms);

/* Writes one tensor's gradient of some rows, in a slot of gadei_claim_rows: `count` indices of rows,
 * in any order, and for each of them a row of values. Those of a repeated index are added up. A row
 * is a tensor's values under one index of its first dimension. GADEI_NONFINITE as in gadei_write.
 * GADEI_ERROR: no such slot, tensor or row, or the tensor is written already. */
int gadei_write_rows(gadei_learner *learner, uint32_t tensor, const int64_t *indices,
                     const float *values, uint64_t count);

/* Writes one tensor's gradient, `values` of its count, into the claimed slot: one pass that copies,
 * converts and looks for values that are not finite. In a slot of gadei_claim, a tensor that is not
 * written counts as zero.
 * GADEI_NONFINITE if there was one: the job refuses the gradient, unless it says
 * nonfinite = "allow". GADEI_ERROR: no slot is claimed, no such tensor. */
int gadei_write(gadei_learner *learner, uint32_t tensor, const float *values);

/* Publishes the claimed slot. It answers the oldest batch taken and not yet answered, if there is
 * one. loss: NAN if unknown. samples: that the gradient was computed from. rate_scale: times the
 * job's learning rate, normally 1. GADEI_ERROR: no slot is claimed, rate_scale is negative or not
 * finite; then nothing has been published. */
int gadei_publish(gadei_learner *learner, double loss, uint32_t samples, float rate_scale);

/* Claim, write, publish: one whole gradient of gadei_elements() values. GADEI_NONFINITE as in
 * gadei_write, with the gradient published. Errors of gadei_claim; then nothing has been. One that
 * is not wanted any more is given up (gadei_wanted, gadei_give_up). */
int gadei_push(gadei_learner *learner, const float *gradient, double loss, uint32_t samples,
               int64_t timeout_ms);

/* 1 while the gradient of the iteration in hand may still be applied, 0 once the synchronization
 * model has gone on without it (cutoff): then gadei_give_up is the quicker way to the next one. */
int gadei_wanted(const gadei_learner *learner);

/* Ends the iteration in hand without a gradient; the batch that it would have answered is handed
 * out again. Errors of gadei_claim; then nothing has been published. */
int gadei_give_up(gadei_learner *learner, int64_t timeout_ms);

/* Mini-batches whose gradients are to be added up and pushed as one: above 1 under WSP. */
uint32_t gadei_wave(const gadei_learner *learner);

/* Gradients published so far. */
uint64_t gadei_published(const gadei_learner *learner);

/* Waits until all that this learner has published is in the weights, dropped or refused.
 * GADEI_TIMEOUT, GADEI_STOPPED, GADEI_EVICTED, GADEI_FAILED. */
int gadei_wait_applied(gadei_learner *learner, int64_t timeout_ms);

/* -- batches: work that the server hands out, so that every one is answered once an epoch ------ */

/* Tells the server what there is: `batches` an epoch, `epochs` times. Every learner may; all must
 * say the same. `seed` is the learners' own business. Waits at most 10 s. GADEI_ERROR,
 * GADEI_STOPPED. */
int gadei_set_work(gadei_learner *learner, uint32_t batches, uint32_t epochs, uint64_t seed);

/* Takes the next batch handed to this learner: *index from 0 in *epoch from 0. Each is to be
 * answered by one gradient, in the order taken. GADEI_FINISHED when there will be no more, also
 * because the job stops; GADEI_TIMEOUT, GADEI_EVICTED, GADEI_FAILED; GADEI_ERROR when 16 are
 * waiting for their gradients. */
int gadei_take_batch(gadei_learner *learner, uint32_t *epoch, uint32_t *index, int64_t timeout_ms);

#ifdef __cplusplus
}
#endif

#endif
