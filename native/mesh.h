/*
 * The data plane between agents of a group: what gadei_ps._mesh is made of.
 *
 *   mesh_checksum.c   CRC-32C of pieces and headers
 *   mesh_sum.c        the weighted mean of one piece of all members
 *   mesh_frame.c      headers: written, and checked before a byte of the payload is used
 *   mesh_exchange.c   the loop over all connections of one round
 *   mesh_send.c       what it sends; mesh_receive.c: what it receives and sums
 *   mesh_module.c     the module for Python
 *
 * A frame on the wire, little-endian:
 *
 *     0  magic 'GPSM'   4  version, kind    8  generation            16  round
 *    24  samples       32  part            36  piece                 40  length (bytes)
 *    44  sender        48  checksum of the payload                   52  checksum of bytes 0 to 51
 */
#ifndef MESH_H
#define MESH_H

#include <stddef.h>
#include <stdint.h>

#define MESH_MAGIC 0x4d535047u
#define MESH_VERSION 1
#define MESH_HEADER_BYTES 56
#define MESH_MEMBERS 64
#define MESH_MOST_SLOTS 16

enum mesh_kind { MESH_REDUCE = 1, MESH_GATHER = 2, MESH_DONE = 3 };

enum mesh_result {
    MESH_FINISHED,
    MESH_INTERRUPTED, /* by a signal: look at it and call again */
    MESH_WOKEN,       /* by the descriptor `wake` */
    MESH_CLOSED,      /* the rest: `culprit` says by whom */
    MESH_SILENT,
    MESH_ABSENT,
    MESH_FAILED, /* `error` is the errno */
    MESH_BAD_HEADER,
    MESH_OTHER_ROUND,
    MESH_UNEXPECTED,
    MESH_BAD_PAYLOAD,
};

struct mesh_header {
    uint32_t magic;
    uint16_t version, kind;
    uint64_t generation, round, samples;
    uint32_t part, piece, length, sender, payload_sum, header_sum;
};

_Static_assert(sizeof(struct mesh_header) == MESH_HEADER_BYTES, "layout of a header");
_Static_assert(offsetof(struct mesh_header, header_sum) == 52, "layout of a header");

/* One exchange as its caller wants it; plan.py has the same fields. Memory belongs to the caller. */
struct mesh_plan {
    uint64_t generation, round;
    uint64_t samples;                      /* of this member */
    uint64_t part_at[MESH_MEMBERS + 1];    /* first value of each part; then the end. Of part i the
                                              member i sums, if parts are summed */
    const float *input;                    /* all values of this member; read only */
    float *out;                            /* all values of the result */
    float *scratch;                        /* members * slots * piece values */
    uint64_t start_ns;                     /* patience until others begin; 0: without end */
    uint64_t piece_ns;                     /* patience for a piece that is due */
    uint64_t give[MESH_MEMBERS];           /* parts to send to each member, as bits */
    uint64_t want[MESH_MEMBERS];           /* parts to come from each */
    uint64_t held;                         /* parts that are whole in `out` */
    volatile uint64_t alive_ns[MESH_MEMBERS]; /* when a member was last known to move bytes */
    volatile uint64_t moved;               /* bytes sent and received so far */
    uint64_t sent, received, calls;        /* bytes; system calls */
    int32_t fd[MESH_MEMBERS];
    int32_t wake;
    uint32_t members, me, parts;
    uint32_t reduce;                       /* whether parts are summed, or only passed on */
    uint32_t piece, slots;                 /* values; pieces of one member that may wait */
    int32_t culprit, error;
};

uint32_t mesh_checksum(const void *bytes, size_t length);
uint32_t mesh_checksum_plain(const void *bytes, size_t length);

/* out = from[0] + weight[1] * (from[1] - from[0]) + weight[2] * (from[2] - from[0]) + ..., each step
   rounded to float32. The weights have the sum 1. A weight of 0 leaves its values out, whatever they
   are: then the first of the others is in the place of from[0]. */
void mesh_sum(float *out, const float *const *from, const float *weight, uint32_t members,
              uint64_t count);

void mesh_write_header(struct mesh_header *header, uint16_t kind, uint64_t generation,
                       uint64_t round, uint32_t sender);
void mesh_seal_header(struct mesh_header *header, uint32_t payload_sum);

/* Whether its magic, version and checksum are right; nothing else of it is believed before. */
int mesh_header_holds(const struct mesh_header *header);

struct mesh_exchange;
struct mesh_exchange *mesh_begin(struct mesh_plan *plan);
enum mesh_result mesh_run(struct mesh_exchange *exchange);
void mesh_end(struct mesh_exchange *exchange);

#endif
