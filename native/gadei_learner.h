/*
 * The client for C, in layers; a file calls only those above it in this list:
 *
 *   gadei_error.c     what went wrong last
 *   gadei_control.c   the job's socket: requests and replies
 *   gadei_segments.c  mapping and checking the three segments
 *   gadei_wait.c      waits in slices, between which it looks whether the job lives
 *   gadei_attach.c, gadei_pull.c, gadei_push.c, gadei_work.c
 *                     the functions of gadei.h
 *
 * Below them lies what the client for Python shares (ps_*.c). Exported names of these files that are
 * not in gadei.h begin with ps_, too.
 */
#ifndef GADEI_LEARNER_H
#define GADEI_LEARNER_H

#include <stddef.h>
#include <sys/types.h>

#include "gadei.h"
#include "gadei_json.h"
#include "ps_learner.h"

#define ERROR_BYTES 512
#define PATH_BYTES 108 /* of a socket, with its NUL */
#define JOB_BYTES 64

struct mapping {
    void *at; /* NULL: not mapped */
    size_t bytes;
};

struct gadei_learner {
    struct ps_learner common;
    /* attach */
    int socket; /* -1 once it is of no more use */
    int lost;   /* the other end of it went away during the last request */
    uid_t owner; /* of the process at the other end, so of the segments */
    char job[JOB_BYTES];
    char target[PATH_BYTES]; /* the job as the caller named it, cut */
    char path[PATH_BYTES];   /* of the socket */
    struct mapping control_map, weights_map, ring_map;
    uint32_t row;
    uint64_t generation;
    /* the model */
    const float *weights;
    uint64_t elements;
    struct gadei_tensor *tensors;
    uint32_t tensor_count;
    /* push */
    struct ps_frame *slot;  /* claimed and not published; else NULL */
    int claimed_once;
    uint32_t mini_batch;    /* for which it waits */
    unsigned char *written; /* for each tensor: it is in the claimed slot */
    double *squares;        /* for each tensor of a dense frame */
    struct ps_gradient *gradients; /* room for those of a whole frame */
    /* batches */
    uint64_t taken[PS_AHEAD]; /* not answered yet, a ring */
    uint32_t taken_first, taken_count;
    uint64_t item; /* what the last wait brought */
    /* waits */
    uint64_t gone_since; /* the job seems dead, over all waits: each may be short; 0: it is not */
    char error[ERROR_BYTES];
};

/* -- gadei_error.c ----------------------------------------------------------------------------- */

/* Writes the error of the learner, or of the thread if `learner` is NULL. Returns `code`. */
__attribute__((format(printf, 3, 4)))
int ps_fail(gadei_learner *learner, int code, const char *format, ...);

/* Writes the error of this thread's gadei_attach: there is no learner that could keep it. */
void ps_attach_failed(const char *error);

/* Why the last call of this thread on that learner was refused, or NULL; gadei_error() returns it. Not
 * in learner->error, which belongs to the thread that is in a call. */
void ps_set_refusal(const gadei_learner *learner, const char *why);

/* -- gadei_control.c --------------------------------------------------------------------------- */

/* Finds the job's socket and connects. */
int ps_connect(gadei_learner *learner, const char *job);

/* One request to the watchdog and its reply, of which all `fields` are wanted. Waits at most 10 s for
 * the reply. If the watchdog is gone, waits up to patience_ns for another one. */
int ps_request(gadei_learner *learner, const char *json, struct json_field *fields, size_t count,
               uint64_t patience_ns);
#define PS_PATIENCE_NS 10000000000ull

/* -- gadei_segments.c -------------------------------------------------------------------------- */

/* Names of the segments, from the watchdog's reply. */
enum { SEGMENT_NAME_BYTES = 256 }; /* the kernel's limit */
struct ps_segment_names {
    char control[SEGMENT_NAME_BYTES], weights[SEGMENT_NAME_BYTES], ring[SEGMENT_NAME_BYTES];
};

/* Maps the segments, checks them and reads the model's table. */
int ps_map_segments(gadei_learner *learner, const struct ps_segment_names *names,
                    const uint8_t job_id[16]);
void ps_unmap_segments(gadei_learner *learner);

/* -- gadei_wait.c ------------------------------------------------------------------------------ */

/* GADEI_ERROR if `learner` is NULL or another process has attached it. */
int ps_check_process(gadei_learner *learner);

/* Begins a call of this thread; GADEI_ERROR if it is another's turn, or the learner leaves. `inside`:
 * of struct ps_calls; for C there is only PS_PUSHING, as all calls share `error`. */
int ps_begin_call(gadei_learner *learner);
void ps_end_call(gadei_learner **learner);

/* The function that begins with it is a call of its thread until it returns. */
#define PS_ENTER(learner)             \
    if (ps_begin_call(learner))       \
        return GADEI_ERROR;           \
    __attribute__((cleanup(ps_end_call), unused)) gadei_learner *inside = (learner)

/* A wait's limit: its end, and the caller's time-out. */
struct ps_limit {
    uint64_t until; /* UINT64_MAX: as long as the job lives */
    int64_t timeout_ms;
};
struct ps_limit ps_limit_of(int64_t timeout_ms);

/* Repeats an attempt, which gets the time it may take in ns, until it returns 0 or PS_FINISHED. */
int ps_wait_for(gadei_learner *learner, int (*attempt)(gadei_learner *, uint64_t),
                struct ps_limit limit, const char *what);

/* The job is over: GADEI_FAILED if that was not asked for, else `code`. */
int ps_ended(gadei_learner *learner, int code);
/* Fails with GADEI_EVICTED. */
int ps_evicted(gadei_learner *learner);

#endif
