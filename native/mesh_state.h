/* The state of one exchange, and what mesh_exchange.c, mesh_send.c and mesh_receive.c share of it. */
#ifndef MESH_STATE_H
#define MESH_STATE_H

#include <errno.h>
#include <time.h>

#include "mesh.h"

#define TURN 4 /* frames of one connection before the others have their turn */

struct sending {
    struct mesh_header header;
    const unsigned char *payload;
    uint32_t done, total; /* bytes of header and payload; total 0: no frame in hand */
    uint32_t reduce_next; /* piece */
    uint32_t gather_part, gather_next;
    int blocked, closing;
};

struct receiving {
    struct mesh_header header;
    uint32_t header_done, payload_done;
    unsigned char *payload; /* where the frame in hand goes; NULL: its header is not whole */
    uint32_t reduce_seen;
    uint32_t gather_part, gather_next;
    uint64_t samples;
    uint64_t last_ns; /* the frame in hand has begun, or the last one has ended; not while paused */
    int enough; /* bytes from which on the kernel wakes this process; 0: one */
    int begun, paused, done;
};

struct mesh_exchange {
    struct mesh_plan *plan;
    struct sending to[MESH_MEMBERS];
    struct receiving from[MESH_MEMBERS];
    uint32_t ready[MESH_MEMBERS];  /* pieces of each part that are whole in `out` */
    uint32_t *piece_sums;          /* checksums of this member's pieces, once computed */
    unsigned char *piece_summed;   /* whether they are */
    uint32_t summed;               /* pieces of this member's part */
    float weight[MESH_MEMBERS];
    uint64_t began_ns, all_begun_ns;
};

static inline uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static inline uint32_t pieces_of(const struct mesh_plan *plan, uint32_t part)
{
    uint64_t values = plan->part_at[part + 1] - plan->part_at[part];
    return (uint32_t)((values + plan->piece - 1) / plan->piece);
}

static inline uint64_t piece_at(const struct mesh_plan *plan, uint32_t part, uint32_t piece)
{
    return plan->part_at[part] + (uint64_t)piece * plan->piece;
}

static inline uint32_t piece_bytes(const struct mesh_plan *plan, uint32_t part, uint32_t piece)
{
    uint64_t left = plan->part_at[part + 1] - piece_at(plan, part, piece);
    return 4 * (uint32_t)(left < plan->piece ? left : plan->piece);
}

/* The first part of `wanted` from `part` on that has pieces; `parts` if there is none. */
static inline uint32_t part_from(const struct mesh_plan *plan, uint64_t wanted, uint32_t part)
{
    while (part < plan->parts && (!(wanted >> part & 1) || !pieces_of(plan, part)))
        part++;
    return part;
}

static inline enum mesh_result blame(struct mesh_exchange *x, uint32_t member, enum mesh_result why)
{
    x->plan->culprit = (int32_t)member;
    return why;
}

static inline enum mesh_result failed(struct mesh_exchange *x, uint32_t member)
{
    x->plan->error = errno;
    int closed = errno == EPIPE || errno == ECONNRESET;
    return blame(x, member, closed ? MESH_CLOSED : MESH_FAILED);
}

/* Takes the next frame for a member in hand; 0 if nothing can be sent to it now. */
int mesh_next_frame(struct mesh_exchange *exchange, uint32_t member);

/* Sends what can be sent to a member, and receives what has come from it. */
enum mesh_result mesh_push(struct mesh_exchange *exchange, uint32_t member);
enum mesh_result mesh_pull(struct mesh_exchange *exchange, uint32_t member);

#endif
