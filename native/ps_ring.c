/* The ring's protocol; see ps_ring.h for the picture. */
#include "ps_ring.h"

#include <math.h>
#include <string.h>

#include "ps_atomic.h"
#include "ps_calls.h"

#ifndef SYS_futex_waitv
#define SYS_futex_waitv 449
#endif

/* Our own copy of the kernel's struct: headers older than 5.16 lack it. */
struct waitv {
    uint64_t expected;
    uint64_t address;
    uint32_t flags;
    uint32_t reserved;
};
#define WAITV_SIZE_U32 2u
#define CPUS 1024 /* of a mask of affinity */
#define ASIDE_NS 1000000ull
#define VAIN_LIMIT 4
#define VAIN_PERIOD 16

/* The number of shards is read where the learner cannot have overwritten it. */
static uint64_t slowest_tail(const struct ps_ring *ring, const struct ps_control *control)
{
    uint64_t slowest = UINT64_MAX;
    for (uint32_t shard = 0; shard < control->shards; shard++) {
        uint64_t tail = ps_load_acquire(&ring->tail[shard].value); /* SYNC POINT: slot */
        if (tail < slowest)
            slowest = tail;
    }
    return slowest;
}

static int is_wanted(const struct ps_ring *ring, const struct ps_control *control)
{
    const struct ps_entry *entry = &control->roster[ring->header.index];
    return __atomic_load_n(&entry->wanted, __ATOMIC_RELAXED) == ring->header.generation;
}

static int may_go_on(const struct ps_ring *ring, const struct ps_control *control)
{
    uint32_t stop = __atomic_load_n(&control->stop, __ATOMIC_ACQUIRE);
    if (stop >= PS_STOP_NOW || __atomic_load_n(&control->phase, __ATOMIC_RELAXED) >= PS_PHASE_STOPPED)
        return PS_STOPPED;
    return is_wanted(ring, control) ? 0 : PS_EVICTED;
}

/* Waits of this thread in a row that have spun in vain, or not at all. */
static _Thread_local uint32_t in_vain;

/* How long a learner spins. What has not come by then takes longer than being woken does. A thread
 * whose spins are in vain, because others need the cores, spins in one wait of VAIN_PERIOD only. */
static uint64_t alone_ns(const struct ps_control *control)
{
    if (in_vain >= VAIN_LIMIT && in_vain % VAIN_PERIOD)
        return 0;
    return control->spin_ns < PS_SPIN_ALONE_NS ? control->spin_ns : PS_SPIN_ALONE_NS;
}

/* Moves a learner away from the core of a shard. If waits spin and both are on one core, each
 * blocks the other until it stops spinning: a round trip takes 19 µs instead of 5. The scheduler
 * keeps two threads that wake each other on one core for seconds, even if other cores are idle. */
static void step_aside(const struct ps_control *control, uint64_t now)
{
    static _Thread_local uint64_t last;
    uint64_t allowed[CPUS / 64] = {0}, others[CPUS / 64];
    uint32_t here = ps_cpu(); /* plus 1 */
    int together = 0, elsewhere = 0;
    for (uint32_t shard = 0; shard < control->shards; shard++)
        together |= __atomic_load_n(&control->shard[shard].cpu, __ATOMIC_RELAXED) == here;
    if (!here || here > CPUS || !together || now - last < ASIDE_NS)
        return;
    last = now;
    if (syscall(SYS_sched_getaffinity, 0, sizeof allowed, allowed) < 0)
        return;
    memcpy(others, allowed, sizeof others);
    others[(here - 1) / 64] &= ~(1ull << (here - 1) % 64);
    for (int i = 0; i < CPUS / 64; i++)
        elsewhere |= others[i] != 0;
    if (elsewhere && !syscall(SYS_sched_setaffinity, 0, sizeof others, others))
        syscall(SYS_sched_setaffinity, 0, sizeof allowed, allowed);
}

/* A learner's wait: spins briefly, then sleeps on `bell`, for at most timeout_ns. `flag`, in the
 * ring, requests a wake from the server. The fence pairs with the server's fence between its
 * store and its load of the flag. */
#define WAIT_UNTIL(condition, flag, bell)                                                        \
    do {                                                                                         \
        if (condition) /* the usual case, which needs no look at the clock */                    \
            break;                                                                               \
        uint64_t begin = ps_now_ns(), end = begin + timeout_ns, spin = begin + alone_ns(control); \
        int slept = 0;                                                                           \
        for (;;) {                                                                               \
            if (condition)                                                                       \
                break;                                                                           \
            int verdict = may_go_on(ring, control);                                              \
            if (verdict)                                                                         \
                return verdict;                                                                  \
            uint64_t now = ps_now_ns();                                                          \
            if (now >= end)                                                                      \
                return PS_TIMEOUT;                                                               \
            if (now < spin) {                                                                    \
                ps_relax();                                                                      \
                continue;                                                                        \
            }                                                                                    \
            if (control->spin_ns >= PS_SPIN_ALONE_NS)                                            \
                step_aside(control, now);                                                        \
            const uint32_t *word = (bell);                                                       \
            uint32_t seen = ps_load_acquire32(word); /* SYNC POINT: released */                  \
            __atomic_store_n((flag), 1, __ATOMIC_RELAXED);                                       \
            ps_fence(); /* SYNC POINT: waits_slot */                                             \
            if (!(condition)) {                                                                  \
                uint64_t rest = end - now;                                                       \
                slept = 1;                                                                       \
                ps_futex_wait(word, seen, rest < 50000000ull ? rest : 50000000ull);              \
            }                                                                                    \
            __atomic_store_n((flag), 0, __ATOMIC_RELAXED);                                       \
        }                                                                                        \
        in_vain = slept ? in_vain + 1 : 0;                                                       \
    } while (0)

static int wait_slot(struct ps_ring *ring, const struct ps_control *control, uint64_t timeout_ns)
{
    WAIT_UNTIL(ring->head - slowest_tail(ring, control) < ring->slots, &ring->waits_slot,
               &ring->released);
    return may_go_on(ring, control);
}

struct ps_frame *ps_claim(struct ps_ring *ring, const struct ps_control *control,
                          uint64_t timeout_ns, int *result)
{
    *result = wait_slot(ring, control, timeout_ns);
    if (*result)
        return NULL;
    __atomic_fetch_add(&ring->heartbeat, 1, __ATOMIC_RELAXED);
    return ps_slot(ring, ring->head);
}

void ps_publish(struct ps_ring *ring, const struct ps_control *control)
{
    ps_store_release(&ring->head, ring->head + 1); /* SYNC POINT: frame */
    ps_store_release32(&ring->publishing, 0);
    ps_fence(); /* SYNC POINT: sleepers. Either we see it asleep or it sees head. */
    if (__atomic_load_n(&control->sleepers, __ATOMIC_RELAXED))
        ps_futex_wake(ps_low_half(&ring->head));
}

int ps_publish_frame(struct ps_ring *ring, const struct ps_control *control,
                     struct ps_frame frame)
{
    if (ps_load_acquire(&ring->detached))
        return PS_LEFT;
    if (ring->head != frame.sequence)
        return PS_UNCLAIMED;
    /* Either we see that the rings are closed, or the watchdog sees that this frame is coming, and
     * waits for it. */
    __atomic_store_n(&ring->publishing, 1, __ATOMIC_RELAXED);
    ps_fence();
    if (ps_load_acquire32(&control->stop) == PS_STOP_CLOSED) { /* SYNC POINT: closed */
        ps_store_release32(&ring->publishing, 0);
        return PS_STOPPED;
    }
    /* A watchdog that resumes after such a stop opens the rings again, but not those of learners
     * that were evicted meanwhile: `wanted` was 0 before `stop` was PS_GO again. */
    if (!is_wanted(ring, control)) {
        ps_store_release32(&ring->publishing, 0);
        return PS_EVICTED;
    }
    frame.generation = ring->header.generation;
    frame.flags = (frame.flags & (PS_RESET | PS_ADD)) | PS_CHECKED;
    frame.flags |= isfinite(frame.squares) ? 0u : PS_NONFINITE;
    *ps_slot(ring, frame.sequence) = frame;
    ring->pulled = frame.version;
    ps_publish(ring, control);
    return 0;
}

static void wake_shards(struct ps_ring *ring, const struct ps_control *control)
{
    ps_fence();
    if (__atomic_load_n(&control->sleepers, __ATOMIC_RELAXED))
        ps_futex_wake(ps_low_half(&ring->head));
}

/* Requests `what` from shard 0, which reads this word whenever it is awake. */
static void ask(struct ps_ring *ring, const struct ps_control *control, uint32_t what)
{
    /* Atomic, because the thread that takes batches and the thread that pushes may both ask. */
    if (__atomic_load_n(&ring->wants, __ATOMIC_RELAXED) & what)
        return;
    __atomic_fetch_or(&ring->wants, what, __ATOMIC_SEQ_CST);
    wake_shards(ring, control);
}

void ps_pause(struct ps_ring *ring, const struct ps_control *control, int on)
{
    if (on)
        __atomic_fetch_or(&ring->wants, (uint32_t)PS_WANTS_PAUSE, __ATOMIC_SEQ_CST);
    else
        __atomic_fetch_and(&ring->wants, ~(uint32_t)PS_WANTS_PAUSE, __ATOMIC_SEQ_CST);
    __atomic_fetch_add(&ring->heartbeat, 1, __ATOMIC_RELAXED);
    wake_shards(ring, control);
}

void ps_ask_exclusive(struct ps_ring *ring, const struct ps_control *control, int on)
{
    uint64_t pauses = (ring->exclusive >> 32) + (on != 0);
    uint64_t asks = pauses << 32 | (on ? (uint32_t)ring->header.generation : 0);
    ps_store_release(&ring->exclusive, asks); /* SYNC POINT: exclusive */
    /* Shard 0 reads this word and notifies the manager. */
    if (on)
        __atomic_fetch_or(&ring->wants, (uint32_t)PS_WANTS_EXCLUSIVE, __ATOMIC_SEQ_CST);
    else
        __atomic_fetch_and(&ring->wants, ~(uint32_t)PS_WANTS_EXCLUSIVE, __ATOMIC_SEQ_CST);
    ps_beat(ring);
    wake_shards(ring, control);
}

void ps_beat(struct ps_ring *ring)
{
    __atomic_fetch_add(&ring->heartbeat, 1, __ATOMIC_RELAXED);
}

int ps_is_exclusive(const struct ps_ring *ring, const struct ps_control *control)
{
    const struct ps_entry *entry = &control->roster[ring->header.index];
    return ps_load_acquire(&entry->exclusive) == ring->exclusive; /* SYNC POINT: exclusive */
}

int ps_wait_exclusive(struct ps_ring *ring, const struct ps_control *control, uint64_t timeout_ns)
{
    const struct ps_entry *entry = &control->roster[ring->header.index];
    uint32_t unused; /* as in wait_grant */
    WAIT_UNTIL(ps_is_exclusive(ring, control) || __atomic_load_n(&control->stop, __ATOMIC_ACQUIRE) != PS_GO,
               &unused, &entry->grant_seq);
    (void)unused;
    return ps_is_exclusive(ring, control) ? 0 : PS_STOPPED;
}

/* A learner that takes batches is waited for only while it has some. When all are done and it wants a
 * turn, it computes with data of its own. */
static void ask_for_turn(struct ps_ring *ring, const struct ps_control *control)
{
    uint32_t wants = __atomic_load_n(&ring->wants, __ATOMIC_RELAXED);
    if (wants & PS_WANTS_WORK && __atomic_load_n(&control->work, __ATOMIC_ACQUIRE) == PS_WORK_DONE) {
        __atomic_fetch_and(&ring->wants, ~(uint32_t)PS_WANTS_WORK, __ATOMIC_SEQ_CST);
        wake_shards(ring, control);
    }
    ask(ring, control, PS_WANTS_TURN);
}

static int wait_grant(struct ps_ring *ring, const struct ps_control *control, uint64_t clock,
                      uint64_t timeout_ns)
{
    const struct ps_entry *entry = &control->roster[ring->header.index];
    /* The flag is unused: the server wakes the learner after every change of a grant. */
    uint32_t unused;
    if (clock >= ps_load_acquire(&entry->grant)) /* SYNC POINT: grant */
        ask_for_turn(ring, control);
    WAIT_UNTIL(clock < ps_load_acquire(&entry->grant), &unused, &entry->grant_seq);
    (void)unused;
    return 0;
}

int ps_wait_grant(struct ps_ring *ring, const struct ps_control *control, uint64_t clock,
                  uint64_t timeout_ns)
{
    /* Where it need not wait, too: barriers await the iteration that it begins. */
    ask(ring, control, PS_WANTS_TURN);
    return wait_grant(ring, control, clock, timeout_ns);
}

int ps_try_grant(struct ps_ring *ring, const struct ps_control *control, uint64_t clock)
{
    return wait_grant(ring, control, clock, 0);
}

int ps_wait_applied(struct ps_ring *ring, const struct ps_control *control, uint64_t sequence,
                    uint64_t timeout_ns)
{
    WAIT_UNTIL(slowest_tail(ring, control) > sequence, &ring->waits_slot, &ring->released);
    return 0;
}

int ps_take_work(struct ps_ring *ring, const struct ps_control *control, uint64_t timeout_ns,
                 uint64_t *item)
{
    uint32_t tail = (uint32_t)ring->work_tail;
    if (__atomic_load_n(&control->stop, __ATOMIC_ACQUIRE) != PS_GO)
        return PS_FINISHED;
    ask(ring, control, PS_WANTS_WORK);
    if (ps_load_acquire32(&ring->work_head) == tail) {
        WAIT_UNTIL(ps_load_acquire32(&ring->work_head) != tail || /* SYNC POINT: batch */
                       __atomic_load_n(&control->work, __ATOMIC_ACQUIRE) == PS_WORK_DONE ||
                       __atomic_load_n(&control->stop, __ATOMIC_ACQUIRE) != PS_GO,
                   &ring->waits_work, &ring->work_head);
        if (ps_load_acquire32(&ring->work_head) == tail)
            return PS_FINISHED;
    }
    *item = ring->work_items[tail % PS_AHEAD];
    ring->work_tail++;
    __atomic_fetch_add(&ring->heartbeat, 1, __ATOMIC_RELAXED);
    return 0;
}

int ps_snapshot(const struct ps_control *control, uint32_t shard, void *to, const void *from,
                uint64_t bytes)
{
    const uint64_t *sequence = &control->shard[shard].sequence;
    uint64_t before = ps_load_acquire(sequence); /* SYNC POINT: chunk of weights */
    if (before & 1)
        return 0;
    memcpy(to, from, bytes);
    __atomic_thread_fence(__ATOMIC_ACQUIRE); /* keeps the copy's loads before the second load */
    return __atomic_load_n(sequence, __ATOMIC_RELAXED) == before;
}

uint64_t ps_get(uint64_t address) { return ps_load_acquire((const uint64_t *)address); }
void ps_set(uint64_t address, uint64_t value) { ps_store_release((uint64_t *)address, value); }
uint32_t ps_get32(uint64_t address) { return ps_load_acquire32((const uint32_t *)address); }
void ps_set32(uint64_t address, uint32_t value) { ps_store_release32((uint32_t *)address, value); }
void ps_full_fence(void) { ps_fence(); }
void ps_wake(uint64_t address) { ps_futex_wake((const uint32_t *)address); }
void ps_bell(uint64_t address) { ps_ring_bell((uint32_t *)address); }
double ps_clock(void) { return (double)ps_now_ns() * 1e-9; }
void ps_spin_once(void) { ps_relax(); }
void ps_spin_on(double since) { ps_spin((uint64_t)((ps_clock() - since) * 1e9)); }
uint32_t ps_cpu(void)
{
    unsigned int cpu;
    return syscall(SYS_getcpu, &cpu, NULL, NULL) < 0 ? 0 : cpu + 1;
}
uint32_t ps_thread_id(void) { return (uint32_t)syscall(SYS_gettid); }

void ps_release(uint64_t ring_address, uint64_t shard, uint64_t tail)
{
    struct ps_ring *ring = (struct ps_ring *)ring_address;
    ps_store_release(&ring->tail[shard].value, tail); /* SYNC POINT: slot */
    ps_fence(); /* SYNC POINT: waits_slot */
    if (__atomic_load_n(&ring->waits_slot, __ATOMIC_RELAXED))
        ps_ring_bell(&ring->released); /* SYNC POINT: released */
}

void ps_pass(uint64_t ring_address, uint64_t shard, uint64_t tail)
{
    struct ps_ring *ring = (struct ps_ring *)ring_address;
    ps_store_release(&ring->tail[shard].value, tail); /* SYNC POINT: slot */
}

void ps_hand_out(uint64_t ring_address, uint64_t number, uint64_t item)
{
    struct ps_ring *ring = (struct ps_ring *)ring_address;
    ring->work_items[number % PS_AHEAD] = item;
    ps_store_release32(&ring->work_head, (uint32_t)number + 1); /* SYNC POINT: batch */
    ps_fence();
    if (__atomic_load_n(&ring->waits_work, __ATOMIC_RELAXED))
        ps_futex_wake(&ring->work_head);
}

void ps_wide_awake(uint64_t control_address, uint64_t shard)
{
    struct ps_control *control = (struct ps_control *)control_address;
    __atomic_fetch_and(&control->sleepers, ~(1ull << shard), __ATOMIC_SEQ_CST);
}

static int wait_any(struct waitv *waits, uint32_t count, uint64_t timeout_ns)
{
    uint64_t end = ps_now_ns() + timeout_ns;
    struct timespec limit = {(time_t)(end / 1000000000ull), (long)(end % 1000000000ull)};
    if (syscall(SYS_futex_waitv, waits, count, 0, &limit, CLOCK_MONOTONIC) >= 0)
        return 0;
    return errno == EAGAIN || errno == ETIMEDOUT || errno == EINTR ? 0 : errno;
}

static struct waitv watch(const uint64_t *word, uint64_t value)
{
    return (struct waitv){(uint32_t)value, (uint64_t)ps_low_half(word), WAITV_SIZE_U32, 0};
}

int ps_wait_any(const uint64_t *words, const uint64_t *values, uint64_t count, uint64_t timeout_ns)
{
    struct waitv waits[PS_WORDS];
    if (count > PS_WORDS)
        return EINVAL;
    for (uint64_t i = 0; i < count; i++)
        waits[i] = watch((const uint64_t *)words[i], values[i]);
    return wait_any(waits, (uint32_t)count, timeout_ns);
}

/* Sleeps until one of the rings has a head other than seen[i], the shard bell rings, or the time is
 * up. Heads of rings that are apart[i] (apart: 0 or an address) are looked at only: another thread
 * watches them and rings the bell (watchers.py). If the kernel has no futex_waitv (before 5.16), or
 * there are more rings than it takes, sleeps on the bell alone and returns at least every 200 µs. */
void ps_shard_sleep(uint64_t control_address, uint64_t shard, uint64_t rings, uint64_t seen,
                    uint64_t apart, uint64_t count, uint32_t bell, uint64_t timeout_ns)
{
    static int no_waitv; /* 1 once any thread has found that the kernel lacks it */
    struct ps_control *control = (struct ps_control *)control_address;
    const uint64_t *ring_address = (const uint64_t *)rings, *head_seen = (const uint64_t *)seen;
    const uint64_t *is_apart = (const uint64_t *)apart;
    struct waitv waits[PS_WORDS];
    uint32_t entries = 0;
    int all = 1;

    /* A bit and not a count, so that the successor of a shard that died asleep can clear it. */
    __atomic_fetch_or(&control->sleepers, 1ull << shard, __ATOMIC_SEQ_CST);
    ps_fence(); /* SYNC POINT: sleepers */
    waits[entries++] = (struct waitv){bell, (uint64_t)&control->shard_bell, WAITV_SIZE_U32, 0};
    for (uint64_t i = 0; i < count; i++) {
        const struct ps_ring *ring = (const struct ps_ring *)ring_address[i];
        if (ps_load_acquire(&ring->head) != head_seen[i])
            goto awake;
        if (is_apart && is_apart[i])
            continue;
        if (entries < PS_WORDS)
            waits[entries++] = watch(&ring->head, head_seen[i]);
        else
            all = 0;
    }
    if (!__atomic_load_n(&no_waitv, __ATOMIC_RELAXED) && all) {
        int error = wait_any(waits, entries, timeout_ns);
        if (error == ENOSYS || error == EPERM)
            __atomic_store_n(&no_waitv, 1, __ATOMIC_RELAXED);
    } else {
        ps_futex_wait(&control->shard_bell, bell, timeout_ns < 200000 ? timeout_ns : 200000);
    }
awake:
    ps_wide_awake(control_address, shard);
}
