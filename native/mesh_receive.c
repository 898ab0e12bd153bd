/* The receiving side of an exchange, and the sums; see mesh_exchange.c. */
#define _GNU_SOURCE
#include "mesh_state.h"

#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>

static float *slot(const struct mesh_plan *plan, uint32_t member, uint32_t piece)
{
    return plan->scratch + ((uint64_t)member * plan->slots + piece % plan->slots) * plan->piece;
}

/* Looks at a header that has arrived: checks it, and says where its payload goes. */
static enum mesh_result take_header(struct mesh_exchange *x, uint32_t member)
{
    struct mesh_plan *plan = x->plan;
    struct receiving *from = &x->from[member];
    const struct mesh_header *header = &from->header;
    if (!mesh_header_holds(header) || header->sender != member)
        return blame(x, member, MESH_BAD_HEADER);
    if (header->generation != plan->generation || header->round != plan->round)
        return blame(x, member, MESH_OTHER_ROUND);
    if (header->kind == MESH_REDUCE) {
        uint32_t piece = from->reduce_seen;
        if (!plan->reduce || header->part != plan->me || header->piece != piece ||
            piece >= pieces_of(plan, plan->me) ||
            header->length != piece_bytes(plan, plan->me, piece) ||
            (piece && header->samples != from->samples))
            return blame(x, member, MESH_UNEXPECTED);
        from->samples = header->samples;
        from->paused = piece >= x->summed + plan->slots;
        if (!from->paused)
            from->payload = (unsigned char *)slot(plan, member, piece);
    } else if (header->kind == MESH_GATHER) {
        uint32_t part = from->gather_part;
        if (part == plan->parts || header->part != part || header->piece != from->gather_next ||
            header->length != piece_bytes(plan, part, from->gather_next))
            return blame(x, member, MESH_UNEXPECTED);
        from->payload = (unsigned char *)(plan->out + piece_at(plan, part, from->gather_next));
    } else {
        uint32_t due = plan->reduce ? pieces_of(plan, plan->me) : 0;
        if (header->kind != MESH_DONE || header->length || from->gather_part < plan->parts ||
            from->reduce_seen < due)
            return blame(x, member, MESH_UNEXPECTED);
        from->done = 1;
    }
    return MESH_FINISHED;
}

/* The weights of all members, once each has told its samples; alike if there are none. */
static void find_weights(struct mesh_exchange *x)
{
    const struct mesh_plan *plan = x->plan;
    x->from[plan->me].samples = plan->samples;
    double total = 0;
    for (uint32_t i = 0; i < plan->members; i++)
        total += (double)x->from[i].samples;
    for (uint32_t i = 0; i < plan->members; i++)
        x->weight[i] = (float)(total > 0 ? (double)x->from[i].samples / total
                                         : 1.0 / (double)plan->members);
}

/* Sums the pieces of which all members' have come. */
static void sum_up(struct mesh_exchange *x)
{
    struct mesh_plan *plan = x->plan;
    uint32_t pieces = pieces_of(plan, plan->me), seen = pieces;
    for (uint32_t i = 0; i < plan->members; i++)
        if (i != plan->me && x->from[i].reduce_seen < seen)
            seen = x->from[i].reduce_seen;
    if (seen <= x->summed)
        return;
    if (!x->summed)
        find_weights(x);
    for (; x->summed < seen; x->summed++) {
        const float *from[MESH_MEMBERS];
        uint64_t at = piece_at(plan, plan->me, x->summed);
        for (uint32_t i = 0; i < plan->members; i++)
            from[i] = i == plan->me ? plan->input + at : slot(plan, i, x->summed);
        mesh_sum(plan->out + at, from, x->weight, plan->members,
                 piece_bytes(plan, plan->me, x->summed) / 4);
    }
    x->ready[plan->me] = x->summed;
    if (x->summed == pieces)
        plan->held |= (uint64_t)1 << plan->me;
    for (uint32_t i = 0; i < plan->members; i++) {
        struct receiving *from = &x->from[i];
        if (from->paused && from->reduce_seen < x->summed + plan->slots) {
            from->paused = 0;
            from->payload = (unsigned char *)slot(plan, i, from->reduce_seen);
            from->last_ns = now_ns();
        }
    }
}

static enum mesh_result take_payload(struct mesh_exchange *x, uint32_t member)
{
    struct mesh_plan *plan = x->plan;
    struct receiving *from = &x->from[member];
    if (mesh_checksum(from->payload, from->header.length) != from->header.payload_sum)
        return blame(x, member, MESH_BAD_PAYLOAD);
    from->payload = NULL;
    from->payload_done = 0;
    if (from->header.kind == MESH_REDUCE) {
        from->reduce_seen++;
        sum_up(x);
        return MESH_FINISHED;
    }
    if (++from->gather_next == pieces_of(plan, from->gather_part)) {
        plan->held |= (uint64_t)1 << from->gather_part;
        from->gather_part = part_from(plan, plan->want[member], from->gather_part + 1);
        from->gather_next = 0;
    }
    return MESH_FINISHED;
}

/* Reads the rest of a payload together with the header that follows it. */
enum mesh_result mesh_pull(struct mesh_exchange *x, uint32_t member)
{
    struct mesh_plan *plan = x->plan;
    struct receiving *from = &x->from[member];
    for (int turn = 0; turn < TURN && !from->done && !from->paused; turn++) {
        struct iovec parts[2];
        struct msghdr message = {.msg_iov = parts};
        size_t wanted = 0, rest = 0;
        if (from->payload) {
            rest = from->header.length - from->payload_done;
            parts[message.msg_iovlen++] =
                (struct iovec){from->payload + from->payload_done, rest};
            wanted = rest;
        }
        struct mesh_header next;
        unsigned char *header = (unsigned char *)(from->payload ? &next : &from->header);
        size_t have = from->payload ? 0 : from->header_done;
        parts[message.msg_iovlen++] = (struct iovec){header + have, MESH_HEADER_BYTES - have};
        wanted += MESH_HEADER_BYTES - have;
        ssize_t count = recvmsg(plan->fd[member], &message, MSG_DONTWAIT);
        plan->calls++;
        if (count < 0) {
            if (errno == EINTR)
                continue;
            return errno == EAGAIN ? MESH_FINISHED : failed(x, member);
        }
        if (count == 0)
            return blame(x, member, MESH_CLOSED);
        plan->received += (uint64_t)count;
        plan->moved += (uint64_t)count;
        size_t of_payload = (size_t)count < rest ? (size_t)count : rest;
        size_t of_header = (size_t)count - of_payload;
        /* Neither single bytes nor the rest of a frame put its end off. */
        if (from->payload ? of_payload == rest : !have)
            from->last_ns = now_ns();
        from->begun = 1;
        if (from->payload) {
            from->payload_done += (uint32_t)of_payload;
            if (of_payload < rest)
                return MESH_FINISHED;
            enum mesh_result result = take_payload(x, member);
            if (result != MESH_FINISHED)
                return result;
            memcpy(&from->header, &next, of_header);
            have = 0;
        }
        from->header_done = (uint32_t)(have + of_header);
        if (from->header_done == MESH_HEADER_BYTES) {
            from->header_done = 0;
            enum mesh_result result = take_header(x, member);
            if (result != MESH_FINISHED)
                return result;
        }
        if ((size_t)count < wanted)
            return MESH_FINISHED;
    }
    return MESH_FINISHED;
}

