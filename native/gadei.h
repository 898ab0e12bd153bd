/*
 * gadei.h: learners of gadei-ps in C and C++.
 *
 * A learner attaches to a job that is running on this machine, reads the live weights in place, and
 * pushes gradients into a ring of its own; the parameter server applies them. Build it with two
 * groups of files of native/ and nothing else (-pthread -lrt: glibc before 2.34 needs them):
 *
 *     cc -std=gnu11 -O2 -Inative -o learner learner.c native/gadei_*.c native/ps_*.c -pthread -lrt
 *
 * From C++, compile those files with cc and link them; this header needs no other.
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
 * If a job's waits spin (spin_us of 8 or more) and a wait runs on the core of one of the server's
 * threads, it changes this thread's affinity for an instant, so that the kernel moves it.
 *
 * A learner belongs to one thread at a time; a process may have several learners. While a thread is
 * in a function that waits, writes, publishes or asks the watchdog, another thread that calls one of
 * these for the same learner gets GADEI_ERROR, and nothing has changed; so does one that claims,
 * writes or publishes while another thread has claimed a slot and not published it. Functions that
 * only read may be called from any thread; so may gadei_pull, into different memory. A child of
 * fork() cannot use its parent's: functions that wait or publish return GADEI_ERROR there. No
 * function takes a lock that another process could hold. A learner may be killed at any instruction:
 * the server applies what it has published, drops what it has not, and gives its batches to others.
 *
 * Results: 0, or one of the negative codes below; then gadei_error() says what and where. A learner
 * or an array that is NULL is GADEI_ERROR, unless a function says otherwise; functions that have no
 * such result return 0 or NULL (gadei_stopping and gadei_wave: 1) or do nothing. Every
 * function that may wait has a limit in milliseconds, timeout_ms; a negative one means as long as
 * the job lives. A wait ends early when the job stops or fails, and after some ten seconds without a
 * parameter server and without a watchdog. A learner does not notice that another server takes over.
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
    GADEI_EVICTED = -3,  /* the job has evicted this learner */
    GADEI_FINISHED = -4, /* there will be no more batches */
    GADEI_FAILED = -5,   /* the job has failed: it has no server and will get none */
    GADEI_ERROR = -6,    /* anything else: wrong use, no such job, a foreign segment */
};

/* How the values of a gradient travel. The 16-bit formats halve the memory traffic. */
enum { GADEI_FLOAT32 = 1, GADEI_BFLOAT16 = 2, GADEI_FLOAT16 = 3 };

/* Gradients move parameters, which come first in the model; assignments write both. */
enum { GADEI_PARAMETER = 1, GADEI_BUFFER = 2 };

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
    const char *dtype; /* "F32"; a buffer may have "F64", "F16", "BF16", "I64", "I32", "I16", "I8", "U64",
                          "U8" or "BOOL": its bytes lie from weights[start] on, in `count` float32 */
};

/* Attaches this process to a job and stores its handle in *learner, or NULL.
 *
 * job_or_socket: a job's name, or a path (with a '/') of its control socket; NULL or "": the
 * environment variable GADEI_PS_JOB. name: shown in the job's status, cut to 31 bytes; NULL or "":
 * the environment variable GADEI_PS_NAME, which `gadei-ps run` sets.
 * Waits at most 10 s for the watchdog. GADEI_ERROR: no such job, no model, a segment that is
 * foreign, truncated or of another layout version; GADEI_STOPPED, GADEI_FAILED. gadei_error(NULL)
 * has the reason.
 */
int gadei_attach(const char *job_or_socket, const char *name, gadei_learner **learner);

/* Leaves the job and frees the handle, which may be NULL. What has been published is applied;
 * batches not answered go to others. Waits at most 10 s. In a child of fork() it only frees.
 * A call of another thread that is under way ends first: a gradient that is being written is
 * published, a wait ends with GADEI_ERROR. As after free(), the handle must not be used in a call
 * that begins later. */
void gadei_detach(gadei_learner *learner);

/* The last error of this learner, or, for NULL, of this thread's last gadei_attach or call without a
 * learner. One line, valid until the next call. "" if there was none. */
const char *gadei_error(const gadei_learner *learner);

/* -- the model --------------------------------------------------------------------------------- */

/* The table of tensors, valid until gadei_detach; *count receives its length. */
const struct gadei_tensor *gadei_tensors(const gadei_learner *learner, uint32_t *count);

/* Index of a tensor in that table, or GADEI_ERROR if the model has none of this name. */
int gadei_find(gadei_learner *learner, const char *name);

/* Values of weights and of a whole gradient, with what lies between tensors. Those of a gradient that
 * lie where the weights have buffers are not read. */
uint64_t gadei_elements(const gadei_learner *learner);

/* The live weights, gadei_elements() float32, mapped read-only: a write is a SIGSEGV. The server
 * changes them while you look; valid until gadei_detach. */
const float *gadei_weights(const gadei_learner *learner);

/* How many gradients the job has applied so far. */
uint64_t gadei_version(const gadei_learner *learner);

/* 1 once the job wants its learners to end, else 0. */
int gadei_stopping(const gadei_learner *learner);

/* Copies the weights, gadei_elements() float32, without locks: gradients may be applied meanwhile.
 * Gradients published from now on count as computed from this copy. Before the first pull they count
 * as computed from the live weights as they were after the last gradient. */
void gadei_pull(gadei_learner *learner, float *weights);

/* A copy in which each shard's part is one that it had between two gradients. GADEI_TIMEOUT,
 * GADEI_FAILED; then `weights` holds no such copy. */
int gadei_pull_consistent(gadei_learner *learner, float *weights, int64_t timeout_ms);

/* -- push -------------------------------------------------------------------------------------- */

/* Chooses the number format of this learner's gradients: GADEI_FLOAT32 (the default),
 * GADEI_BFLOAT16 or GADEI_FLOAT16. GADEI_ERROR for another, or once a slot has been claimed. */
int gadei_set_wire(gadei_learner *learner, uint32_t dtype);

/* Waits until the synchronization model lets this learner begin its next iteration. The gradient
 * that follows counts as begun now and as computed from the weights as they are now. Without this
 * call an iteration begins when the gradient before it is published.
 * GADEI_TIMEOUT, GADEI_STOPPED, GADEI_EVICTED, GADEI_FAILED. */
int gadei_wait_turn(gadei_learner *learner, int64_t timeout_ms);

/* Waits for the turn and for a free slot of the ring, which gadei_write then fills. Claiming again
 * before gadei_publish starts over in the same slot. Errors as above. */
int gadei_claim(gadei_learner *learner, int64_t timeout_ms);

/* Claims a slot for a gradient of which only some rows are given, for example of embeddings. Tensors
 * that are not written and rows that are not named stay as they are, with the optimizer's state of
 * them: momentum and Adam's moments move a row only when a gradient names it. */
int gadei_claim_rows(gadei_learner *learner, int64_t timeout_ms);

/* Writes the gradient of some rows of a tensor, in a slot of gadei_claim_rows: `count` indices of
 * rows, in any order, and for each of them a row of values. The values of a repeated index are added
 * up. A row is what a tensor holds under one index of its first dimension. GADEI_NONFINITE as in
 * gadei_write.
 * GADEI_ERROR: no such slot, tensor or row; the tensor is written already; indices or values are
 * NULL where `count` is not 0. */
int gadei_write_rows(gadei_learner *learner, uint32_t tensor, const int64_t *indices,
                     const float *values, uint64_t count);

/* Writes one tensor's gradient, `values` of its count, into the claimed slot: one pass that copies,
 * converts and looks for values that are not finite. In a slot of gadei_claim, a tensor that is not
 * written, or whose `values` are NULL, counts as zero.
 * GADEI_NONFINITE if there was one: the job refuses the gradient, unless it says
 * nonfinite = "allow". GADEI_ERROR: no slot is claimed, no such tensor, the tensor is a buffer; or, in
 * a slot of gadei_claim_rows, `values` are NULL. */
int gadei_write(gadei_learner *learner, uint32_t tensor, const float *values);

/* Publishes the claimed slot. It answers the oldest batch that is taken and not answered, if there is
 * one. loss: NAN if unknown. samples: how many the gradient was computed from. rate_scale: a factor
 * of the job's learning rate, normally 1. GADEI_ERROR: no slot is claimed, or rate_scale is negative
 * or not finite, alone or times that rate; then nothing has been published. */
int gadei_publish(gadei_learner *learner, double loss, uint32_t samples, float rate_scale);

/* Claims, writes and publishes one whole gradient of gadei_elements() values. If the optimizer does
 * not move rows whose gradient is zero, they need not travel. GADEI_NONFINITE as in gadei_write; the
 * gradient is published. Errors of gadei_claim; then nothing is published. A gradient that is not
 * wanted any more is abandoned (gadei_wanted, gadei_give_up). */
int gadei_push(gadei_learner *learner, const float *gradient, double loss, uint32_t samples,
               int64_t timeout_ms);

/* 1 while the gradient of the current iteration may still be applied, 0 once the synchronization
 * model has closed the iteration without it (cutoff): then gadei_give_up is the quicker way to the
 * next iteration. */
int gadei_wanted(const gadei_learner *learner);

/* Ends the current iteration without a gradient; the batch that it would have answered is handed
 * out again. Errors of gadei_claim; then nothing has been published. */
int gadei_give_up(gadei_learner *learner, int64_t timeout_ms);

/* Mini-batches whose gradients are to be added up and pushed as one: above 1 under WSP. */
uint32_t gadei_wave(const gadei_learner *learner);

/* From gadei_pause to gadei_resume this learner computes no gradient, but validates, say. It is not
 * killed meanwhile; under BSP the others wait for it, under the other models they continue.
 * GADEI_ERROR as for every call. */
int gadei_pause(gadei_learner *learner);
int gadei_resume(gadei_learner *learner);

/* Waits until a mini-batch of a wave may begin. The wave's run time does not count the wait, and the
 * gradient counts as computed from the weights that it would have without this call. number: from 0 in
 * the wave that the next gradient ends, and on into the wave after it. Only the last mini-batch of a
 * wave waits for other learners; the others of the next wave may begin before that, with the
 * weights at hand. Once a last mini-batch may begin, the live weights hold all that the model
 * promises: pull then. Results of gadei_wait_turn. */
int gadei_wait_mini_batch(gadei_learner *learner, uint32_t number, int64_t timeout_ms);

/* Gradients published so far. */
uint64_t gadei_published(const gadei_learner *learner);

/* Waits until all that this learner has published is in the weights, dropped or refused. The next
 * gradient then counts as computed from the live weights as they are now, unless it was pulled.
 * GADEI_TIMEOUT, GADEI_STOPPED, GADEI_EVICTED, GADEI_FAILED. */
int gadei_wait_applied(gadei_learner *learner, int64_t timeout_ms);

/* Replaces weights of the job, exactly once; returns when they are in all shards. values: for each
 * tensor of gadei_tensors its values, or NULL, which leaves it as it is. What this learner has pushed
 * before is applied before. reset: 1 if the optimizer's momentum and moments of these tensors become
 * zero. It answers no batch and waits for no turn. GADEI_ERROR for a value of a parameter that is not
 * finite, if the job refuses that, and while a slot is claimed; GADEI_TIMEOUT, GADEI_STOPPED, GADEI_EVICTED,
 * GADEI_FAILED. After a time-out it may be made yet. */
int gadei_assign(gadei_learner *learner, const float *const *values, int reset,
                 int64_t timeout_ms);

/* -- batches: the server hands them out, so that each is answered once an epoch ---------------- */

/* Sets what the server hands out: `batches` an epoch, `epochs` times. Every learner may set it, and
 * all must set the same. The server does not use `seed`: learners shuffle with it. Waits at most
 * 10 s. GADEI_ERROR, GADEI_STOPPED. */
int gadei_set_work(gadei_learner *learner, uint32_t batches, uint32_t epochs, uint64_t seed);

/* Takes the next batch handed to this learner: *index from 0 in *epoch from 0. Each is to be
 * answered by one gradient, in the order taken. GADEI_FINISHED when there will be no more, also
 * because the job stops; GADEI_TIMEOUT, GADEI_EVICTED, GADEI_FAILED; GADEI_ERROR when as many wait
 * for their gradients as the job hands out ahead (`ahead`, at most 16). */
int gadei_take_batch(gadei_learner *learner, uint32_t *epoch, uint32_t *index, int64_t timeout_ms);

#ifdef __cplusplus
}
#endif

#endif
