/*
 * A learner's step on a GPU, as calls of CUDA's driver. Python makes the streams, events, kernels and
 * memory once (learners/cuda/); the calls of each step are here, because each of them takes a few
 * microseconds more from Python.
 *
 *   stage     a kernel that lays a gradient out as the slot will hold it, and copies pulled weights;
 *             event `staged`
 *   transfer  behind that event: into the claimed slot
 *   publish   behind that: ps_land, event `published`
 *   pull      behind what is computed: a transfer of the weights, event `arrived`
 *   copy      of pulled weights alone; gather: of some rows
 *
 * All functions are for the thread that computes. Unless noted they return 0 or CUDA's error, and are
 * called in the device's context: behind ps_cuda_enter.
 */
#ifndef PS_CUDA_H
#define PS_CUDA_H

#include "ps_learner.h"

typedef int ps_copy_call(uint64_t to, uint64_t from, size_t bytes, void *stream);

/* Functions of libcuda.so.1, in the order of FUNCTIONS in learners/cuda/link.py. */
struct ps_driver {
    int (*get_context)(void **context);
    int (*push_context)(void *context);
    int (*pop_context)(void **context);
    int (*launch)(void *kernel, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned y_threads,
                  unsigned z_threads, unsigned shared, void *stream, void **arguments, void **extra);
    ps_copy_call *to_device, *to_host;
    int (*set)(uint64_t to, unsigned char value, size_t bytes, void *stream);
    int (*record)(void *event, void *stream);
    int (*wait)(void *stream, void *event, unsigned flags);
    int (*query)(void *event);
    int (*synchronize)(void *event);
    int (*call)(void *stream, void (*function)(void *), void *argument);
};

/* Words of 64 bits, as CudaLink gives them. */
struct ps_cuda_setup {
    struct ps_driver driver;
    struct ps_cuda_kernels {
        void *stage, *list_rows, *gather;
    } kernels;
    void *push, *pull;                         /* streams */
    void *staged, *published, *read, *arrived; /* events */
    const struct ps_weights *weights;
    uint64_t wire;     /* enum ps_wire_type */
    uint64_t source;   /* the registered weights, as the device addresses them */
    uint64_t residue;  /* on the device, for each weight what rounding has not sent; or 0 */
    uint64_t chunks;   /* there: struct chunk of kernels.cu, of all parameters */
    const uint64_t *first_chunk; /* of each parameter; and the end */
    struct ps_outgoing {         /* memory of a gradient in flight; two of them take turns */
        uint64_t buffer;         /* on the device: the payload */
        uint64_t bytes;          /* of the buffer */
        uint64_t sums;           /* there: what travels beside it (enum in ps_land.h) */
        uint64_t *landed;        /* pinned: where the sums arrive */
    } outgoing[2];
};

struct ps_cuda {
    struct ps_cuda_setup of;
    void *context;
    struct ps_gradient *given;   /* of each tensor: what is staged */
    uint64_t *to;                /* of each parameter: where it lies in the frame, or SKIPPED */
    struct ps_block *blocks;     /* of the frame that is staged */
    uint64_t (*ranges)[2];       /* begin and end, whole lines: the bytes that pulls copy */
    uint64_t range_count;
    uint64_t lists, listable;    /* memory on the device, to list so many rows: 12 bytes each, and 4 */
    uint64_t begin;              /* of the transfer, bytes from the payload's begin */
    struct ps_landed landed;     /* the frame that is staged */
    struct ps_landing landing[2];
    uint32_t now;                /* the outgoing memory of the next gradient */
    int failed;                  /* a gradient is on its way, and `published` will not come: why */
};

/* Takes over the calling thread's context; PS_NO_MEMORY. ps_cuda_end: frees memory of the host. */
int ps_cuda_begin(struct ps_cuda *cuda);
void ps_cuda_end(struct ps_cuda *cuda);

/* Makes the device's context the current one. *pushed, 0 before: 1 if another one was, which
 * ps_cuda_leave then restores. */
int ps_cuda_enter(const struct ps_cuda *cuda, int *pushed);
void ps_cuda_leave(const struct ps_cuda *cuda, int pushed);

/* Stages what is `given`. loss: address of a float on the device, or 0. to, from: as of ps_cuda_copy, or
 * 0; what is given may lie in `to`. PS_CROWDED: the lists lack room. PS_MIXED: arrays that lie in the
 * staging buffer beside rows. Then nothing is launched. */
int ps_cuda_stage(struct ps_cuda *cuda, void *stream, uint64_t loss, uint64_t to, uint64_t from);
enum { PS_CROWDED = -12, PS_MIXED = -13 };
#define PS_NOT_READY 600 /* CUDA_ERROR_NOT_READY, of a query */

/* Transfers what is staged into the slot that this thread has claimed. Also results of ps_frame_land. */
int ps_cuda_transfer(struct ps_cuda *cuda, struct ps_learner *learner, const struct ps_facts *facts,
                     char *payload);

/* Has the driver publish it then. Unless both return 0, nothing is published. Not for a thread that is
 * inside a call of ps_calls.h: ps_land waits for that, and the driver may let this one wait for it. */
int ps_cuda_publish(struct ps_cuda *cuda, struct ps_learner *learner);

/* Copies the ranges from the registered weights, behind what `stream` computes, on the stream of
 * pulls; then comes `arrived`. ps_cuda_fill: on `stream`; ps_cuda_copy: on it, from another buffer. */
int ps_cuda_pull(struct ps_cuda *cuda, uint64_t to, void *stream);
int ps_cuda_fill(struct ps_cuda *cuda, uint64_t to, void *stream);
int ps_cuda_copy(struct ps_cuda *cuda, uint64_t to, uint64_t from, void *stream);

/* Reads rows of a tensor from the registered weights. indices: address of `count` int64 on the device,
 * to: of as many rows of floats. */
int ps_cuda_gather(struct ps_cuda *cuda, uint64_t tensor, uint64_t indices, uint64_t count, uint64_t to,
                   uint64_t narrow, void *stream);

#endif
