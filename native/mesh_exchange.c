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
#include "mesh_state.h"

#include <limits.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/socket.h>

/* Bytes that are worth waking up for, of a frame that has begun. */
#define ENOUGH (1 << 17)

/* What depends on others, too, is due later than what depends on its sender alone. */
#define DEPENDENT 3

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
    uint64_t left_ms = next ? (next - now) / 1000000 + 1 : 0;
    *timeout_ms = !next ? -1 : left_ms < INT_MAX ? (int)left_ms : INT_MAX;
    return MESH_FINISHED;
}

/* Moves what can be moved on one connection. */
static enum mesh_result move(struct mesh_exchange *x, uint32_t member, int readable)
{
    enum mesh_result result = readable ? mesh_pull(x, member) : MESH_FINISHED;
    if (result == MESH_FINISHED && !x->to[member].blocked)
        result = mesh_push(x, member);
    return result;
}

static int has_to_send(struct mesh_exchange *x, uint32_t member)
{
    return !x->to[member].blocked && (x->to[member].total || mesh_next_frame(x, member));
}

/* Lets the kernel wake this process when enough has come. Never for more than the frame in hand:
 * what follows it may depend on what this member does with it. */
static void want(struct mesh_exchange *x, uint32_t member)
{
    struct receiving *from = &x->from[member];
    int enough = 0;
    if (from->payload) {
        uint32_t rest = from->header.length - from->payload_done;
        enough = rest < ENOUGH ? (int)rest : ENOUGH;
    }
    if (enough == from->enough)
        return;
    setsockopt(x->plan->fd[member], SOL_SOCKET, SO_RCVLOWAT, &enough, sizeof enough);
    x->plan->calls++;
    from->enough = enough;
}

enum mesh_result mesh_run(struct mesh_exchange *x)
{
    struct mesh_plan *plan = x->plan;
    struct pollfd fds[MESH_MEMBERS + 1];
    enum mesh_result result = MESH_FINISHED;
    for (;;) {
        for (uint32_t i = 0; i < plan->members; i++)
            if (i != plan->me)
                want(x, i);
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
