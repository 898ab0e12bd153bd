/*
 * One exchange of a group: the loop over all connections of a member.
 *
 * On each connection a member sends, in one stream: the pieces of its input that the other one sums
 * (REDUCE), the pieces of the parts that it gives (GATHER), each as soon as it is summed, and at last
 * DONE, when it holds the whole result. It has finished when it has DONE from all: then every
 * member holds the whole result. Sending, receiving and summing overlap.
 *
 * A piece that arrives before another member's same piece waits in a slot. When a member's slots are
 * full its connection is not read, and TCP holds it back. Nothing waits in a circle: REDUCE pieces
 * depend on nothing but their sender, GATHER pieces are always read.
 */
#define _GNU_SOURCE
#include "mesh.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>

#define TURN 4 /* frames of one connection before the others have their turn */
/* What depends on others, too, is due later than what depends on its sender alone. */
#define DEPENDENT 3

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
    uint64_t samples, last_ns;
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

static uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static uint32_t pieces_of(const struct mesh_plan *plan, uint32_t part)
{
    uint64_t values = plan->part_at[part + 1] - plan->part_at[part];
    return (uint32_t)((values + plan->piece - 1) / plan->piece);
}

static uint64_t piece_at(const struct mesh_plan *plan, uint32_t part, uint32_t piece)
{
    return plan->part_at[part] + (uint64_t)piece * plan->piece;
}

static uint32_t piece_bytes(const struct mesh_plan *plan, uint32_t part, uint32_t piece)
{
    uint64_t left = plan->part_at[part + 1] - piece_at(plan, part, piece);
    return 4 * (uint32_t)(left < plan->piece ? left : plan->piece);
}

static float *slot(const struct mesh_plan *plan, uint32_t member, uint32_t piece)
{
    return plan->scratch + ((uint64_t)member * plan->slots + piece % plan->slots) * plan->piece;
}

/* The first part of `wanted` from `part` on that has pieces; `parts` if there is none. */
static uint32_t part_from(const struct mesh_plan *plan, uint64_t wanted, uint32_t part)
{
    while (part < plan->parts && (!(wanted >> part & 1) || !pieces_of(plan, part)))
        part++;
    return part;
}

static int is_whole(const struct mesh_plan *plan)
{
    uint64_t all = plan->parts < 64 ? ((uint64_t)1 << plan->parts) - 1 : ~(uint64_t)0;
    return plan->held == all;
}

struct mesh_exchange *mesh_begin(struct mesh_plan *plan)
{
    struct mesh_exchange *exchange = calloc(1, sizeof *exchange);
    if (!exchange)
        return NULL;
    uint32_t pieces = plan->reduce ? pieces_of(plan, plan->me) : 0;
    exchange->piece_sums = calloc(pieces + 1, sizeof *exchange->piece_sums);
    exchange->piece_summed = calloc(pieces + 1, 1);
    if (!exchange->piece_sums || !exchange->piece_summed) {
        mesh_end(exchange);
        return NULL;
    }
    exchange->plan = plan;
    exchange->began_ns = now_ns();
    for (uint32_t i = 0; i < plan->parts; i++) {
        if (!pieces_of(plan, i))
            plan->held |= (uint64_t)1 << i;
        if (plan->held >> i & 1)
            exchange->ready[i] = pieces_of(plan, i);
    }
    for (uint32_t i = 0; i < plan->members; i++) {
        exchange->to[i].gather_part = part_from(plan, plan->give[i], 0);
        exchange->from[i].gather_part = part_from(plan, plan->want[i], 0);
    }
    plan->culprit = -1;
    plan->error = 0;
    return exchange;
}

void mesh_end(struct mesh_exchange *exchange)
{
    free(exchange->piece_sums);
    free(exchange->piece_summed);
    free(exchange);
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

/* Takes the next frame for a member in hand; 0 if nothing can be sent to it now. */
static int next_frame(struct mesh_exchange *x, uint32_t member)
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

static enum mesh_result blame(struct mesh_exchange *x, uint32_t member, enum mesh_result why)
{
    x->plan->culprit = (int32_t)member;
    return why;
}

static enum mesh_result failed(struct mesh_exchange *x, uint32_t member)
{
    x->plan->error = errno;
    int closed = errno == EPIPE || errno == ECONNRESET;
    return blame(x, member, closed ? MESH_CLOSED : MESH_FAILED);
}

static enum mesh_result push(struct mesh_exchange *x, uint32_t member)
{
    struct mesh_plan *plan = x->plan;
    struct sending *to = &x->to[member];
    for (int turn = 0; turn < TURN; turn++) {
        if (!to->total && !next_frame(x, member))
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
static enum mesh_result pull(struct mesh_exchange *x, uint32_t member)
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
        from->begun = 1;
        from->last_ns = now_ns();
        size_t of_payload = (size_t)count < rest ? (size_t)count : rest;
        size_t of_header = (size_t)count - of_payload;
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

static int is_over(const struct mesh_exchange *x)
{
    for (uint32_t i = 0; i < x->plan->members; i++)
        if (i != x->plan->me &&
            (!x->from[i].done || !x->to[i].closing || x->to[i].total))
            return 0;
    return 1;
}

static uint64_t later(uint64_t one, uint64_t other)
{
    return one > other ? one : other;
}

/* When a member is overdue, in ns; 0: it owes nothing now, or may take its time. */
static uint64_t due(const struct mesh_exchange *x, uint32_t member)
{
    const struct mesh_plan *plan = x->plan;
    const struct receiving *from = &x->from[member];
    if (from->done || from->paused)
        return 0;
    if (!from->begun)
        return plan->start_ns ? x->began_ns + plan->start_ns : 0;
    uint32_t owed = plan->reduce ? pieces_of(plan, plan->me) : 0;
    if (from->reduce_seen < owed || from->payload || from->header_done)
        return from->last_ns + plan->piece_ns;
    if (!x->all_begun_ns)
        return 0;
    return later(later(from->last_ns, plan->alive_ns[member]), x->all_begun_ns) +
           DEPENDENT * plan->piece_ns;
}

/* How far a member's frames have come; of several that are overdue the one behind is to blame. */
static uint64_t progress(const struct receiving *from)
{
    return ((uint64_t)from->reduce_seen << 32) + ((uint64_t)from->gather_part << 24) +
           from->gather_next;
}

/* Looks for members that are overdue, and says in how many ms the next one may be; -1: never. */
static enum mesh_result look_at_clock(struct mesh_exchange *x, int *timeout_ms)
{
    const struct mesh_plan *plan = x->plan;
    uint64_t now = now_ns(), next = 0;
    int behind = -1, begun = 1;
    for (uint32_t i = 0; i < plan->members; i++)
        begun = begun && (i == plan->me || x->from[i].begun);
    if (begun && !x->all_begun_ns)
        x->all_begun_ns = now;
    for (uint32_t i = 0; i < plan->members; i++) {
        uint64_t when = i == plan->me ? 0 : due(x, i);
        if (!when)
            continue;
        if (when <= now) {
            if (behind < 0 || progress(&x->from[i]) < progress(&x->from[behind]))
                behind = (int)i;
        } else if (!next || when < next) {
            next = when;
        }
    }
    if (behind >= 0)
        return blame(x, (uint32_t)behind, x->from[behind].begun ? MESH_SILENT : MESH_ABSENT);
    *timeout_ms = next ? (int)((next - now) / 1000000 + 1) : -1;
    return MESH_FINISHED;
}

/* Moves what can be moved on one connection. */
static enum mesh_result move(struct mesh_exchange *x, uint32_t member, int readable)
{
    enum mesh_result result = readable ? pull(x, member) : MESH_FINISHED;
    if (result == MESH_FINISHED && !x->to[member].blocked)
        result = push(x, member);
    return result;
}

static int has_to_send(struct mesh_exchange *x, uint32_t member)
{
    return !x->to[member].blocked && (x->to[member].total || next_frame(x, member));
}

enum mesh_result mesh_run(struct mesh_exchange *x)
{
    struct mesh_plan *plan = x->plan;
    struct pollfd fds[MESH_MEMBERS + 1];
    enum mesh_result result = MESH_FINISHED;
    for (;;) {
        if (is_over(x))
            return MESH_FINISHED;
        int timeout = 0, more = 0;
        for (uint32_t i = 0; i < plan->members; i++)
            more |= i != plan->me && has_to_send(x, i);
        result = look_at_clock(x, &timeout);
        if (result != MESH_FINISHED)
            return result;
        for (uint32_t i = 0; i < plan->members; i++) {
            int reads = !x->from[i].done && !x->from[i].paused;
            short events = (short)((reads ? POLLIN : 0) | (x->to[i].blocked ? POLLOUT : 0));
            fds[i] = (struct pollfd){i == plan->me || !events ? -1 : plan->fd[i], events, 0};
        }
        fds[plan->members] = (struct pollfd){plan->wake, POLLIN, 0};
        int count = poll(fds, plan->members + 1, more ? 0 : timeout);
        plan->calls++;
        if (count < 0 && errno == EINTR)
            return MESH_INTERRUPTED;
        if (count < 0) {
            plan->error = errno;
            return MESH_FAILED;
        }
        if (fds[plan->members].revents)
            return MESH_WOKEN;
        for (uint32_t step = 1; step < plan->members; step++) {
            uint32_t i = (plan->me + step) % plan->members;
            if (fds[i].revents & ~POLLIN)
                x->to[i].blocked = 0;
            result = move(x, i, fds[i].revents & ~POLLOUT);
            if (result != MESH_FINISHED)
                return result;
        }
    }
}
