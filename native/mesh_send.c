/* The sending side of an exchange; see mesh_exchange.c. */
#define _GNU_SOURCE
#include "mesh_state.h"

#include <sys/socket.h>
#include <sys/uio.h>

static int is_whole(const struct mesh_plan *plan)
{
    uint64_t all = plan->parts < 64 ? ((uint64_t)1 << plan->parts) - 1 : ~(uint64_t)0;
    return plan->held == all;
}

/* The checksum of a piece that goes to several members is computed once. */
static uint32_t gather_sum(struct mesh_exchange *x, uint32_t part, uint32_t piece, uint32_t bytes)
{
    const float *at = x->plan->out + piece_at(x->plan, part, piece);
    if (!x->plan->reduce || part != x->plan->me)
        return mesh_checksum(at, bytes);
    if (!x->piece_summed[piece]) {
        x->piece_sums[piece] = mesh_checksum(at, bytes);
        x->piece_summed[piece] = 1;
    }
    return x->piece_sums[piece];
}

static void take_frame(struct mesh_exchange *x, uint32_t member, uint16_t kind, uint32_t part,
                       uint32_t piece, const float *values)
{
    struct mesh_plan *plan = x->plan;
    struct sending *to = &x->to[member];
    mesh_write_header(&to->header, kind, plan->generation, plan->round, plan->me);
    to->header.samples = plan->samples;
    uint32_t sum = 0;
    if (kind != MESH_DONE) {
        to->header.part = part;
        to->header.piece = piece;
        to->header.length = piece_bytes(plan, part, piece);
        sum = kind == MESH_GATHER ? gather_sum(x, part, piece, to->header.length)
                                  : mesh_checksum(values, to->header.length);
    }
    mesh_seal_header(&to->header, sum);
    to->payload = (const unsigned char *)values;
    to->done = 0;
    to->total = MESH_HEADER_BYTES + to->header.length;
}

int mesh_next_frame(struct mesh_exchange *x, uint32_t member)
{
    struct mesh_plan *plan = x->plan;
    struct sending *to = &x->to[member];
    uint32_t part = to->gather_part, piece = to->gather_next;
    if (part < plan->parts && piece < x->ready[part]) {
        take_frame(x, member, MESH_GATHER, part, piece, plan->out + piece_at(plan, part, piece));
        if (++to->gather_next == pieces_of(plan, part)) {
            to->gather_part = part_from(plan, plan->give[member], part + 1);
            to->gather_next = 0;
        }
        return 1;
    }
    if (plan->reduce && to->reduce_next < pieces_of(plan, member)) {
        piece = to->reduce_next++;
        take_frame(x, member, MESH_REDUCE, member, piece,
                   plan->input + piece_at(plan, member, piece));
        return 1;
    }
    if (part == plan->parts && !to->closing && is_whole(plan)) {
        to->closing = 1;
        take_frame(x, member, MESH_DONE, 0, 0, NULL);
        return 1;
    }
    return 0;
}

enum mesh_result mesh_push(struct mesh_exchange *x, uint32_t member)
{
    struct mesh_plan *plan = x->plan;
    struct sending *to = &x->to[member];
    for (int turn = 0; turn < TURN; turn++) {
        if (!to->total && !mesh_next_frame(x, member))
            return MESH_FINISHED;
        struct iovec parts[2];
        struct msghdr message = {.msg_iov = parts};
        if (to->done < MESH_HEADER_BYTES)
            parts[message.msg_iovlen++] = (struct iovec){(unsigned char *)&to->header + to->done,
                                                         MESH_HEADER_BYTES - to->done};
        uint32_t after = to->done > MESH_HEADER_BYTES ? to->done - MESH_HEADER_BYTES : 0;
        if (after < to->header.length)
            parts[message.msg_iovlen++] =
                (struct iovec){(unsigned char *)to->payload + after, to->header.length - after};
        ssize_t count = sendmsg(plan->fd[member], &message, MSG_NOSIGNAL | MSG_DONTWAIT);
        plan->calls++;
        if (count < 0) {
            if (errno == EINTR)
                continue;
            if (errno != EAGAIN)
                return failed(x, member);
            to->blocked = 1;
            return MESH_FINISHED;
        }
        to->done += (uint32_t)count;
        plan->sent += (uint64_t)count;
        plan->moved += (uint64_t)count;
        if (to->done < to->total) {
            to->blocked = 1;
            return MESH_FINISHED;
        }
        to->total = 0;
    }
    return MESH_FINISHED;
}

