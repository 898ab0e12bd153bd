/*
 * Litmus tests of the ring's protocol: each pair that docs/memory-order.md argues, cut down to its
 * stores and loads, run many times on two threads with the project's own primitives (ps_atomic.h).
 * Lists every outcome with its count; a forbidden one is a failure.
 *
 * A run shows what this processor did, not what another may do. On x86 loads are not reordered with
 * loads nor stores with stores, so most of these tests could not fail here whatever the code said:
 * the order on ARM or POWER is argued, not tested. What x86 does reorder is a store with a later
 * load of another word (store buffering), so the tests of sleeping and waking can fail on it. Each
 * test has a broken twin with weaker orders; its forbidden outcome may be seen, and then shows that
 * the test can fail.
 *
 * Usage: litmus SECONDS
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ps_atomic.h"

enum { CELLS = 128, REGISTERS = 4, VALUES = 4, OUTCOMES = VALUES * VALUES * VALUES * VALUES };

/* Words of one try, each on a line of its own as in the segments, and what was read. */
struct cell {
    struct { uint64_t word; uint64_t pad[7]; } at[4];
    struct { uint32_t value; uint32_t pad[15]; } seen[REGISTERS];
} __attribute__((aligned(64)));

#define WORD(n) (&c->at[n].word)
#define WORD32(n) ((uint32_t *)WORD(n))
#define R(n) (c->seen[n].value)
#define PLAIN_LOAD(word) __atomic_load_n((word), __ATOMIC_RELAXED)
#define PLAIN_STORE(word, value) __atomic_store_n((word), (value), __ATOMIC_RELAXED)
#define COMPILER_ONLY() __asm__ volatile("" ::: "memory")

/* One side of a test: what it does to each cell. */
#define SIDE(name)                                                     \
    static inline void name##_once(struct cell *c);                    \
    static void name(struct cell *cells)                               \
    {                                                                  \
        for (int i = 0; i < CELLS; i++)                                \
            name##_once(&cells[i]);                                    \
    }                                                                  \
    static inline void name##_once(struct cell *c)

/* -- frame: ps_publish's release, a shard's acquire of head ------------------------------------ */

SIDE(publish) { PLAIN_STORE(WORD(0), 1); ps_store_release(WORD(1), 1); }
SIDE(peek) { R(0) = (uint32_t)ps_load_acquire(WORD(1)); R(1) = (uint32_t)PLAIN_LOAD(WORD(0)); }
SIDE(publish_weak) { PLAIN_STORE(WORD(0), 1); COMPILER_ONLY(); PLAIN_STORE(WORD(1), 1); }
SIDE(peek_weak)
{
    R(0) = (uint32_t)PLAIN_LOAD(WORD(1));
    COMPILER_ONLY();
    R(1) = (uint32_t)PLAIN_LOAD(WORD(0));
}
static int passed_ahead(const uint32_t *r) { return r[0] == 1 && r[1] == 0; }

/* -- slot: ps_release's release after the last read, the learner's acquire of the tails -------- */

SIDE(consume) { R(0) = (uint32_t)PLAIN_LOAD(WORD(0)); ps_store_release(WORD(1), 1); }
SIDE(refill)
{
    R(1) = (uint32_t)ps_load_acquire(WORD(1));
    if (R(1))
        PLAIN_STORE(WORD(0), 2);
}
SIDE(consume_weak)
{
    R(0) = (uint32_t)PLAIN_LOAD(WORD(0));
    COMPILER_ONLY();
    PLAIN_STORE(WORD(1), 1);
}
SIDE(refill_weak)
{
    R(1) = (uint32_t)PLAIN_LOAD(WORD(1));
    COMPILER_ONLY();
    PLAIN_STORE(WORD(0), 2); /* without even waiting for it */
}
static int read_refilled(const uint32_t *r) { return r[0] == 2; }

/* -- head against sleepers: ps_publish and ps_shard_sleep -------------------------------------- */

SIDE(publish_wake)
{
    ps_store_release(WORD(0), 1);
    ps_fence();
    R(0) = PLAIN_LOAD(WORD(1)) != 0;
}
SIDE(shard_sleep)
{
    __atomic_fetch_or(WORD(1), 1, __ATOMIC_SEQ_CST);
    ps_fence();
    R(1) = (uint32_t)ps_load_acquire(WORD(0));
}
SIDE(publish_wake_weak)
{
    ps_store_release(WORD(0), 1);
    COMPILER_ONLY();
    R(0) = PLAIN_LOAD(WORD(1)) != 0;
}
static int both_missed(const uint32_t *r) { return r[0] == 0 && r[1] == 0; }

/* -- tail against waits_slot: ps_release and WAIT_UNTIL ---------------------------------------- */

SIDE(release_wake)
{
    ps_store_release(WORD(0), 1);
    ps_fence();
    R(0) = PLAIN_LOAD(WORD32(1));
}
SIDE(wait_slot)
{
    PLAIN_STORE(WORD32(1), 1);
    ps_fence();
    R(1) = (uint32_t)ps_load_acquire(WORD(0));
}
SIDE(release_wake_weak)
{
    ps_store_release(WORD(0), 1);
    COMPILER_ONLY();
    R(0) = PLAIN_LOAD(WORD32(1));
}
SIDE(wait_slot_weak)
{
    PLAIN_STORE(WORD32(1), 1);
    COMPILER_ONLY();
    R(1) = (uint32_t)ps_load_acquire(WORD(0));
}

/* -- tail before `released`: a waiter that has seen the bell ring has seen why ----------------- */

SIDE(release_bell)
{
    ps_store_release(WORD(0), 1);
    ps_fence();
    __atomic_fetch_add(WORD32(1), 1, __ATOMIC_SEQ_CST);
}
SIDE(hear_bell)
{
    R(0) = ps_load_acquire32(WORD32(1));
    PLAIN_STORE(WORD32(2), 1);
    ps_fence();
    R(1) = (uint32_t)ps_load_acquire(WORD(0));
}

/* -- batch: ps_hand_out and ps_take_work; work_head is data's flag and futex in one ------------ */

SIDE(hand_out)
{
    PLAIN_STORE(WORD(0), 1);
    ps_store_release32(WORD32(1), 1);
    ps_fence();
    R(2) = PLAIN_LOAD(WORD32(2));
}
SIDE(take_work)
{
    PLAIN_STORE(WORD32(2), 1);
    ps_fence();
    R(0) = ps_load_acquire32(WORD32(1));
    R(1) = (uint32_t)PLAIN_LOAD(WORD(0));
}
SIDE(hand_out_weak)
{
    PLAIN_STORE(WORD(0), 1);
    COMPILER_ONLY();
    PLAIN_STORE(WORD32(1), 1);
    COMPILER_ONLY();
    R(2) = PLAIN_LOAD(WORD32(2));
}
SIDE(take_work_weak)
{
    PLAIN_STORE(WORD32(2), 1);
    COMPILER_ONLY();
    R(0) = PLAIN_LOAD(WORD32(1));
    COMPILER_ONLY();
    R(1) = (uint32_t)PLAIN_LOAD(WORD(0));
}
static int batch_lost(const uint32_t *r)
{
    return (r[0] == 1 && r[1] == 0) || (r[0] == 0 && r[2] == 0);
}

/* -- grant: stored, then the bell; the learner looks at the bell, then at the grant ------------ */

SIDE(give_grant)
{
    ps_store_release(WORD(0), 1);
    __atomic_fetch_add(WORD32(1), 1, __ATOMIC_SEQ_CST);
}
SIDE(wait_grant)
{
    R(0) = ps_load_acquire32(WORD32(1));
    R(1) = (uint32_t)ps_load_acquire(WORD(0));
}

/* -- chunk of weights: the sequence lock ------------------------------------------------------- */

SIDE(write_chunk)
{
    ps_store_release(WORD(0), 1);
    ps_fence();
    PLAIN_STORE(WORD(1), 1);
    PLAIN_STORE(WORD(2), 1);
    ps_store_release(WORD(0), 2);
}
SIDE(snapshot)
{
    uint64_t before = ps_load_acquire(WORD(0));
    R(2) = (uint32_t)PLAIN_LOAD(WORD(1));
    R(3) = (uint32_t)PLAIN_LOAD(WORD(2));
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    R(0) = (uint32_t)before;
    R(1) = PLAIN_LOAD(WORD(0)) == before;
}
SIDE(write_chunk_weak)
{
    PLAIN_STORE(WORD(1), 1); /* before the lock is odd, as a processor without the fence may */
    PLAIN_STORE(WORD(0), 1);
    COMPILER_ONLY();
    PLAIN_STORE(WORD(2), 1);
    COMPILER_ONLY();
    PLAIN_STORE(WORD(0), 2);
}
static int torn(const uint32_t *r)
{
    return r[1] && ((r[0] == 0 && (r[2] || r[3])) || (r[0] == 2 && !(r[2] && r[3])));
}

/* -- the tests --------------------------------------------------------------------------------- */

struct test {
    const char *name;
    const char *argument; /* heading in docs/memory-order.md */
    const char *registers[REGISTERS];
    int (*forbidden)(const uint32_t *);
    const char *means; /* the forbidden outcome; of a broken twin, how it is broken */
    void (*left)(struct cell *), (*right)(struct cell *);
    int broken;
};

static const struct test tests[] = {
    {"message passing, head", "frame", {"head", "payload"}, passed_ahead,
     "a shard reads a frame that is not there yet", publish, peek, 0},
    {"message passing, head", "frame", {"head", "payload"}, passed_ahead,
     "every order relaxed", publish_weak, peek_weak, 1},
    {"reuse of a slot", "slot", {"payload", "tail"}, read_refilled,
     "a shard reads the next frame in the slot of this one", consume, refill, 0},
    {"reuse of a slot", "slot", {"payload", "tail"}, read_refilled,
     "the learner does not wait for the tail at all", consume_weak, refill_weak, 1},
    {"store buffering, head and sleepers", "sleepers", {"sleepers", "head"}, both_missed,
     "a shard sleeps, the frame is there, nobody wakes it", publish_wake, shard_sleep, 0},
    {"store buffering, head and sleepers", "sleepers", {"sleepers", "head"}, both_missed,
     "no fence in ps_publish", publish_wake_weak, shard_sleep, 1},
    {"store buffering, tail and waits_slot", "waits_slot", {"waits_slot", "tail"}, both_missed,
     "the learner sleeps, the slot is free, nobody wakes it", release_wake, wait_slot, 0},
    {"store buffering, tail and waits_slot", "waits_slot", {"waits_slot", "tail"}, both_missed,
     "no fence on either side", release_wake_weak, wait_slot_weak, 1},
    {"message passing, released", "released", {"released", "tail"}, passed_ahead,
     "the learner sleeps on the new bell though the tail has moved", release_bell, hear_bell, 0},
    {"message passing, released", "released", {"released", "tail"}, passed_ahead,
     "every order relaxed", publish_weak, peek_weak, 1},
    {"message passing and store buffering, work_head", "batch", {"work_head", "item", "waits_work"},
     batch_lost, "a batch is read before it is there, or nobody wakes the learner", hand_out,
     take_work, 0},
    {"message passing and store buffering, work_head", "batch", {"work_head", "item", "waits_work"},
     batch_lost, "every order relaxed, no fence on either side", hand_out_weak, take_work_weak, 1},
    {"message passing, grant_seq", "grant", {"grant_seq", "grant"}, passed_ahead,
     "the learner sleeps on the new bell though it may continue", give_grant, wait_grant, 0},
    {"message passing, grant_seq", "grant", {"grant_seq", "grant"}, passed_ahead,
     "every order relaxed", publish_weak, peek_weak, 1},
    {"sequence lock", "chunk of weights", {"before", "same", "first", "last"}, torn,
     "a snapshot that is taken for whole mixes two states", write_chunk, snapshot, 0},
    {"sequence lock", "chunk of weights", {"before", "same", "first", "last"}, torn,
     "a weight written before the lock is odd", write_chunk_weak, snapshot, 1},
};

static struct cell cells[CELLS];
static const struct test *volatile current;
static uint32_t arrived, turn;
static int over;

/* Both threads continue together. The one that waits yields its core: there may be only one. */
static void meet(void)
{
    uint32_t mine = ps_load_acquire32(&turn);
    if (__atomic_add_fetch(&arrived, 1, __ATOMIC_SEQ_CST) == 2) {
        __atomic_store_n(&arrived, 0, __ATOMIC_RELAXED);
        __atomic_fetch_add(&turn, 1, __ATOMIC_SEQ_CST);
        return;
    }
    for (uint32_t spins = 0; ps_load_acquire32(&turn) == mine; spins++)
        if (spins > 2000)
            sched_yield();
        else
            ps_relax();
}

static void *right_side(void *unused)
{
    (void)unused;
    for (;;) {
        meet();
        if (__atomic_load_n(&over, __ATOMIC_RELAXED))
            return NULL;
        current->right(cells);
        meet();
    }
}

/* Runs one test for a time; counts[outcome], outcomes being numbers in base VALUES. */
static void run(const struct test *test, uint64_t ns, uint64_t *counts)
{
    uint64_t end = ps_now_ns() + ns;
    uint32_t random = 1;
    do {
        memset(cells, 0, sizeof cells);
        current = test;
        meet();
        random = random * 1664525u + 1013904223u;
        for (uint32_t i = random >> 24; i; i--) /* the sides meet at another place each time */
            COMPILER_ONLY();
        test->left(cells);
        meet();
        for (int i = 0; i < CELLS; i++) {
            uint32_t outcome = 0;
            for (int n = 0; n < REGISTERS; n++)
                outcome = outcome * VALUES + cells[i].seen[n].value % VALUES;
            counts[outcome]++;
        }
    } while (ps_now_ns() < end);
}

/* Prints what was seen; returns how often it was what must not be. */
static uint64_t report(const struct test *test, const uint64_t *counts)
{
    uint64_t tries = 0, bad = 0;
    for (uint32_t outcome = 0; outcome < OUTCOMES; outcome++)
        tries += counts[outcome];
    printf("\n%s (docs/memory-order.md, '%s'), %llu tries\n", test->name, test->argument,
           (unsigned long long)tries);
    if (test->broken)
        printf("  BROKEN ON PURPOSE: %s\n", test->means);
    for (uint32_t outcome = 0; outcome < OUTCOMES; outcome++) {
        uint32_t value[REGISTERS] = {outcome / (VALUES * VALUES * VALUES),
                                     outcome / (VALUES * VALUES) % VALUES,
                                     outcome / VALUES % VALUES, outcome % VALUES};
        if (!counts[outcome])
            continue;
        int wrong = test->forbidden(value);
        bad += wrong ? counts[outcome] : 0;
        printf("  %-9s %10llu  ", wrong ? "FORBIDDEN" : "allowed",
               (unsigned long long)counts[outcome]);
        for (int n = 0; n < REGISTERS && test->registers[n]; n++)
            printf(" %s=%u", test->registers[n], value[n]);
        printf("\n");
    }
    if (test->broken)
        printf("  forbidden: %s\n",
               bad ? "seen, so the test above can fail" : "not seen on this machine");
    else
        printf("  forbidden: %s: %s\n", test->means, bad ? "SEEN" : "never seen");
    return bad;
}

int main(int count, char **arguments)
{
    const uint32_t number = sizeof tests / sizeof *tests;
    uint64_t ns = count == 2 ? (uint64_t)(atof(arguments[1]) * 1e9) / number : 0, wrong = 0;
    pthread_t thread;
    if (!ns) {
        fprintf(stderr, "usage: litmus SECONDS\n");
        return 2;
    }
#if defined(__x86_64__) || defined(__i386__)
    printf("x86: only store buffering can be seen here. Nothing below proves anything for ARM or "
           "POWER;\nfor those read the argument named with each test.\n");
#endif
    if (pthread_create(&thread, NULL, right_side, NULL))
        return 2;
    for (uint32_t i = 0; i < number; i++) {
        uint64_t counts[OUTCOMES] = {0};
        run(&tests[i], ns, counts);
        uint64_t bad = report(&tests[i], counts);
        wrong += tests[i].broken ? 0 : bad;
    }
    __atomic_store_n(&over, 1, __ATOMIC_RELAXED);
    meet();
    pthread_join(thread, NULL);
    printf("\n%s\n", wrong ? "FAILED: a forbidden outcome was seen" : "no forbidden outcome");
    return wrong ? 1 : 0;
}
