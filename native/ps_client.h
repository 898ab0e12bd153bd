/* What the two halves of the C client share: ps_attach.c and ps_client.c. */
#ifndef PS_CLIENT_H
#define PS_CLIENT_H

#include <stddef.h>
#include <sys/types.h>

#include "gadei.h"
#include "ps_ring.h"

#define ERROR_BYTES 512

struct mapping {
    void *at; /* NULL: not mapped */
    size_t bytes;
};

struct gadei_learner {
    int socket; /* -1 once it is of no more use */
    int lost;   /* the other end of it went away during the last request */
    pid_t pid;
    char job[64];
    char path[108]; /* of the socket */
    struct mapping control_map, weights_map, ring_map;
    const struct ps_control *control;
    struct ps_ring *ring;
    const float *weights;
    uint64_t elements;
    struct gadei_tensor *tensors;
    unsigned char *written; /* for each tensor: it is in the claimed slot */
    struct ps_block *blocks; /* for each tensor, in a slot for rows */
    uint32_t tensor_count;
    uint32_t row;
    uint64_t generation;
    uint32_t wire;
    int claimed_once;
    struct ps_frame *slot; /* claimed and not published; else NULL */
    int rows;              /* it is for a frame of rows */
    struct ps_payload payload; /* of it */
    double *squares;       /* for each tensor, of what is written of it */
    double started;        /* of the iteration, CLOCK_MONOTONIC seconds */
    uint64_t version;      /* last pulled */
    uint64_t published;
    uint64_t taken[PS_AHEAD]; /* batches not answered, a ring */
    uint32_t taken_first, taken_count;
    uint64_t item; /* what the last wait brought */
    uint64_t gone_since; /* the job seems dead, over all waits: each may be short; 0: it is not */
    float *copy_to; /* a consistent pull under way */
    uint32_t copied, holds;
    char error[ERROR_BYTES];
};

/* Writes the learner's error and returns `code`. */
__attribute__((format(printf, 3, 4)))
int ps_fail(gadei_learner *learner, int code, const char *format, ...);

/* One request to the watchdog and its reply, of which all `fields` are wanted; at most 10 s. */
struct json_field;
int ps_request(gadei_learner *learner, const char *json, struct json_field *fields, size_t count);

#endif
