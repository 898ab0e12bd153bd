/*
 * The real ring (native/ps_ring.c) under threads that play the processes of a job: learners that
 * produce, shards that each consume all rings and hand out work, a manager that grants turns, and a
 * reader that makes consistent pulls. Made for ThreadSanitizer, and of use without it.
 *
 * Checked: every shard sees every frame of every ring once, whole and in order; every batch arrives
 * in order; no snapshot that counts as whole is a mixture; no frame is overwritten before all
 * shards have read it; the sum of all frames is in the weights; no wake-up is lost (sleeps.h).
 *
 * Link with -Wl,--wrap=syscall.
 *
 * Usage: ring SECONDS LEARNERS SHARDS SLOTS SPIN_NS [hurry] [no-waitv] [pipeline]
 * hurry: nobody pauses at random, so that the sides meet as closely as they can.
 * no-waitv: as on a kernel before 5.16, where shards sleep on their bell alone and look at the
 * rings every 200 µs.
 * pipeline: batches are taken by another thread of the learner, as learners/pipeline.py does.
 */
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ps_ring.h"
#include "sleeps.h"

enum { MAX_RINGS = 4, MAX_PARTS = 8, PAYLOAD = 64, PART = 512, ROW = 3, AHEAD_OF_TAIL = 2 };
#define FOREVER_NS 3600000000000ull

static struct ps_control *control;
static struct ps_ring *rings[MAX_RINGS];
static uint32_t learners, shards;
static int without_waitv, hurry, pipeline;
static uint64_t weights[MAX_PARTS][PART]; /* under the shards' sequence locks: see races.supp */
static uint64_t total[MAX_RINGS];       /* of what each learner has pushed; read after the join */
static uint64_t stop_learning, producing, consuming, taking;
static uint64_t taken[MAX_RINGS]; /* by a taker, for the learner's other thread */
static uint64_t snapshots, retries, frames;

/* -- what is slept for -------------------------------------------------------------------------- */

static uint64_t slowest(uint64_t ring)
{
    uint64_t least = UINT64_MAX;
    for (uint32_t i = 0; i < shards; i++) {
        uint64_t tail = ps_load_acquire(&rings[ring]->tail[i].value);
        least = tail < least ? tail : least;
    }
    return least;
}

static int slot_free(uint64_t ring, uint64_t head)
{
    return head - slowest(ring) < rings[ring]->slots;
}
static int is_applied(uint64_t ring, uint64_t sequence) { return slowest(ring) > sequence; }
static int work_there(uint64_t ring, uint64_t taken)
{
    return ps_load_acquire32(&rings[ring]->work_head) != (uint32_t)taken;
}
static int granted(uint64_t ring, uint64_t clock)
{
    return clock < ps_load_acquire(&control->roster[ROW + ring].grant);
}
static int frame_there(uint64_t shard, uint64_t unused)
{
    (void)unused;
    for (uint32_t i = 0; i < learners; i++)
        if (ps_load_acquire(&rings[i]->head) != ps_load_acquire(&rings[i]->tail[shard].value))
            return 1;
    return 0;
}
static int grant_due(uint64_t unused, uint64_t unused_too)
{
    (void)unused;
    (void)unused_too;
    for (uint64_t i = 0; i < learners; i++)
        if (ps_load_acquire(&control->roster[ROW + i].grant) != slowest(i) + AHEAD_OF_TAIL)
            return 1;
    return 0;
}

/* -- frames ------------------------------------------------------------------------------------ */

static uint64_t mix(uint64_t x)
{
    x = (x ^ x >> 31) * 0x9e3779b97f4a7c15ull;
    return x ^ x >> 29;
}

static uint64_t value(uint64_t ring, uint64_t sequence, uint64_t i)
{
    return mix(ring << 56 ^ sequence << 8 ^ i);
}

static struct ps_frame *frame_at(const struct ps_ring *ring, uint64_t sequence)
{
    return (struct ps_frame *)((char *)ring + ring->slots_at +
                               sequence % ring->slots * ring->slot_bytes);
}

static uint64_t *payload(struct ps_frame *frame)
{
    return (uint64_t *)((char *)frame + PS_PAYLOAD_AT);
}

/* Sometimes a pause, so that the sides wait for each other in every order. */
static void dawdle(uint64_t *random)
{
    *random = mix(*random + 1);
    if (hurry)
        return;
    if (*random % 64 == 0) {
        struct timespec pause = {0, (long)(*random >> 8) % 100000};
        nanosleep(&pause, NULL);
    } else if (*random % 8 == 0) {
        sched_yield();
    }
}

/* -- the processes ----------------------------------------------------------------------------- */

static void take(uint64_t me, uint64_t sequence)
{
    uint64_t item = 0;
    await("batch for learner", work_there, me, sequence);
    int result = ps_take_work(rings[me], control, FOREVER_NS, &item);
    check(!result, "ps_take_work", (uint64_t)-result);
    check(item == (me << 48 | sequence), "a batch is lost or out of order", item);
}

/* The main thread of a learner with a pipeline, until all work is done. */
static void *taker(void *argument)
{
    const uint64_t me = AT(argument);
    uint64_t item = 0;
    for (uint64_t sequence = 0;; sequence++) {
        await("batch for learner", work_there, me, sequence);
        if (ps_take_work(rings[me], control, FOREVER_NS, &item) == PS_FINISHED)
            break;
        check(item == (me << 48 | sequence), "a batch is lost or out of order", item);
        ps_set(AT(&taken[me]), sequence + 1);
    }
    __atomic_fetch_sub(&taking, 1, __ATOMIC_SEQ_CST);
    return NULL;
}

static void *learner(void *argument)
{
    const uint64_t me = AT(argument);
    struct ps_ring *ring = rings[me];
    uint64_t random = me, sequence = 0, sum = 0;
    for (; !ps_load_acquire(&stop_learning); sequence++) {
        int result;
        if (!pipeline)
            take(me, sequence);
        while (pipeline && ps_get(AT(&taken[me])) <= sequence)
            sched_yield(); /* as the queue between its threads */
        dawdle(&random);
        await("turn for learner", granted, me, sequence);
        result = ps_wait_grant(ring, control, sequence, FOREVER_NS);
        check(!result, "ps_wait_grant", (uint64_t)-result);
        await("slot for learner", slot_free, me, sequence);
        struct ps_frame *frame = ps_claim(ring, control, FOREVER_NS, &result);
        check(frame == frame_at(ring, sequence), "ps_claim", (uint64_t)-result);
        memset(frame, 0xaa, sizeof *frame); /* a frame seen early is seen to be half made */
        for (uint64_t i = 0; i < PAYLOAD; i++)
            payload(frame)[i] = value(me, sequence, i);
        *frame = (struct ps_frame){.sequence = sequence, .generation = ring->header.generation,
                                   .payload_bytes = PAYLOAD * sizeof(uint64_t),
                                   .batch = me << 48 | sequence};
        sum += value(me, sequence, 0);
        ps_publish(ring, control);
        if (sequence % 16 == 15) {
            await("gradient of learner", is_applied, me, sequence);
            result = ps_wait_applied(ring, control, sequence, FOREVER_NS);
            check(!result, "ps_wait_applied", (uint64_t)-result);
        }
    }
    if (sequence) {
        await("gradient of learner", is_applied, me, sequence - 1);
        check(!ps_wait_applied(ring, control, sequence - 1, FOREVER_NS), "ps_wait_applied", me);
    }
    total[me] = sum;
    __atomic_fetch_add(&frames, sequence, __ATOMIC_RELAXED);
    return NULL;
}

/* Adds a frame to this shard's part of the weights, as apply.py does: odd, fence, values, even. */
static void apply(uint64_t me, uint64_t delta)
{
    uint64_t *sequence = &control->shard[me].sequence;
    ps_set(AT(sequence), ps_get(AT(sequence)) + 1);
    ps_full_fence();
    for (uint64_t i = 0; i < PART; i++)
        __atomic_store_n(&weights[me][i], weights[me][i] + delta, __ATOMIC_RELAXED);
    ps_set(AT(sequence), ps_get(AT(sequence)) + 1);
}

static void consume(uint64_t me, uint64_t i, uint64_t tail)
{
    struct ps_frame *frame = frame_at(rings[i], tail);
    check(frame->sequence == tail, "a frame is lost, torn or out of order", frame->sequence);
    check(frame->generation == rings[i]->header.generation, "generation", frame->generation);
    check(frame->payload_bytes == PAYLOAD * sizeof(uint64_t), "size", frame->payload_bytes);
    check(frame->batch == (i << 48 | tail), "batch", frame->batch);
    for (uint64_t k = 0; k < PAYLOAD; k++)
        check(payload(frame)[k] == value(i, tail, k), "a payload is torn", tail);
    apply(me, value(i, tail, 0));
}

static void *shard(void *argument)
{
    const uint64_t me = AT(argument);
    uint64_t seen[MAX_RINGS] = {0}, address[MAX_RINGS], handed[MAX_RINGS] = {0}, random = ~me;
    for (uint32_t i = 0; i < learners; i++)
        address[i] = AT(rings[i]);
    for (;;) {
        uint32_t bell = ps_get32(AT(&control->shard_bell));
        int over = ps_get(AT(&consuming)) == 0, progress = 0;
        for (uint32_t i = 0; i < learners; i++) {
            uint64_t head = ps_get(AT(&rings[i]->head));
            check(head - seen[i] <= rings[i]->slots, "more frames than slots", head);
            if (head != seen[i]) { /* all that is there, and one wake */
                while (head != seen[i]) {
                    consume(me, i, seen[i]);
                    ps_pass(address[i], me, ++seen[i]);
                    dawdle(&random);
                }
                ps_release(address[i], me, seen[i]);
                progress = 1;
            }
            while (me == 0 && handed[i] < seen[i] + PS_AHEAD) { /* as many as are answered */
                ps_hand_out(address[i], handed[i], (uint64_t)i << 48 | handed[i]);
                handed[i]++;
            }
        }
        if (progress) {
            ps_bell(AT(&control->manager_bell));
            continue;
        }
        if (over)
            return NULL;
        await("frame for shard", frame_there, me, seen[0]);
        ps_shard_sleep(AT(control), me, AT(address), AT(seen), 0, learners, bell, FOREVER_NS);
    }
}

/* As server.py's manager: it looks at its bell, then at everything, then sleeps on the bell. */
static void *manager(void *unused)
{
    (void)unused;
    while (ps_get(AT(&consuming))) {
        uint32_t bell = ps_get32(AT(&control->manager_bell));
        for (uint64_t i = 0; i < learners; i++) {
            struct ps_entry *entry = &control->roster[ROW + i];
            uint64_t grant = slowest(i) + AHEAD_OF_TAIL;
            if (grant != entry->grant) {
                ps_set(AT(&entry->grant), grant);
                ps_bell(AT(&entry->grant_seq));
            }
        }
        await("grant by the manager", grant_due, 0, bell);
        ps_futex_wait(&control->manager_bell, bell, FOREVER_NS);
    }
    return NULL;
}

static void *reader(void *unused)
{
    uint64_t copy[PART], last[MAX_PARTS] = {0}, random = 77;
    (void)unused;
    for (uint64_t round = 0; ps_get(AT(&producing)); round++) {
        uint32_t of = (uint32_t)(round % shards);
        if (ps_snapshot(control, of, copy, weights[of], sizeof copy)) {
            for (int i = 1; i < PART; i++)
                check(copy[i] - copy[0] == (uint64_t)i, "a snapshot is torn", copy[i] - copy[0]);
            last[of] = copy[0];
            count_one(&snapshots);
        } else {
            count_one(&retries);
        }
        dawdle(&random);
    }
    return last[0] ? NULL : unused;
}

/* -- the job ----------------------------------------------------------------------------------- */

static void *room(size_t bytes)
{
    void *at = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    if (!at)
        exit(2);
    return memset(at, 0, bytes);
}

static void make_job(uint32_t slots, uint64_t spin_ns)
{
    const uint64_t slot_bytes = PS_PAYLOAD_AT + sizeof(uint64_t) * PAYLOAD;
    control = room(sizeof *control);
    control->shards = shards;
    control->spin_ns = spin_ns;
    control->phase = PS_PHASE_SERVING;
    control->work = PS_WORKING;
    polled = without_waitv ? &control->shard_bell : NULL;
    for (uint32_t i = 0; i < learners; i++) {
        struct ps_ring *ring = rings[i] = room(sizeof *ring + slots * slot_bytes + 4096);
        control->roster[ROW + i].wanted = ring->header.generation = 10 + i;
        ring->header.index = ROW + i;
        ring->shards = shards;
        ring->slots = slots;
        ring->slot_bytes = slot_bytes;
        ring->slots_at = (sizeof *ring + 63) / 64 * 64;
    }
    for (uint32_t of = 0; of < shards; of++)
        for (uint64_t i = 0; i < PART; i++)
            weights[of][i] = i;
}

static pthread_t start(void *(*run)(void *), uint64_t argument)
{
    pthread_t thread;
    if (pthread_create(&thread, NULL, run, (void *)(uintptr_t)argument))
        exit(2);
    return thread;
}

int main(int count, char **arguments)
{
    for (int i = 6; i < count; i++) {
        hurry |= !strcmp(arguments[i], "hurry");
        without_waitv |= !strcmp(arguments[i], "no-waitv");
        pipeline |= !strcmp(arguments[i], "pipeline");
    }
    if (count != 6 + hurry + without_waitv + pipeline) {
        fprintf(stderr, "usage: ring SECONDS LEARNERS SHARDS SLOTS SPIN_NS [hurry] [no-waitv] "
                        "[pipeline]\n");
        return 2;
    }
    const double seconds = atof(arguments[1]);
    const uint32_t slots = (uint32_t)atoi(arguments[4]);
    learners = (uint32_t)atoi(arguments[2]);
    shards = (uint32_t)atoi(arguments[3]);
    if (learners < 1 || learners > MAX_RINGS || shards < 1 || shards > MAX_PARTS || slots < 1)
        return 2;
    make_job(slots, strtoull(arguments[5], NULL, 10));
    producing = consuming = 1;

    pthread_t learning[MAX_RINGS], taking_work[MAX_RINGS], serving[MAX_PARTS];
    for (uint64_t i = 0; i < shards; i++)
        serving[i] = start(shard, i);
    pthread_t managing = start(manager, 0), reading = start(reader, 0);
    for (uint64_t i = 0; i < learners; i++)
        learning[i] = start(learner, i);
    taking = pipeline ? learners : 0;
    for (uint64_t i = 0; i < taking; i++)
        taking_work[i] = start(taker, i);

    struct timespec pause = {(time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9)};
    nanosleep(&pause, NULL);
    ps_set(AT(&stop_learning), 1);
    for (uint32_t i = 0; i < learners; i++)
        pthread_join(learning[i], NULL);
    /* Done work is signalled by a wake only, which comes too early for one about to sleep. */
    ps_set32(AT(&control->work), PS_WORK_DONE);
    for (; ps_get(AT(&taking)); sched_yield())
        for (uint32_t i = 0; i < learners; i++)
            ps_wake(AT(&rings[i]->work_head));
    for (uint32_t i = 0; pipeline && i < learners; i++)
        pthread_join(taking_work[i], NULL);
    ps_set(AT(&producing), 0);
    pthread_join(reading, NULL);
    ps_set(AT(&consuming), 0);
    ps_bell(AT(&control->shard_bell));
    ps_bell(AT(&control->manager_bell));
    for (uint32_t i = 0; i < shards; i++)
        pthread_join(serving[i], NULL);
    pthread_join(managing, NULL);

    uint64_t sum = 0;
    for (uint32_t i = 0; i < learners; i++) {
        sum += total[i];
        for (uint32_t of = 0; of < shards; of++)
            check(rings[i]->tail[of].value == rings[i]->head, "frames not consumed", of);
    }
    for (uint32_t of = 0; of < shards; of++)
        for (uint64_t i = 0; i < PART; i++)
            check(weights[of][i] == sum + i, "the weights are not the sum of the frames", of);
    check(frames > 0 && control->sleepers == 0, "nothing done, or sleepers left", frames);
    printf("%u learners, %u shards, %u slots, spin %s ns%s%s%s: %llu frames to each shard, "
           "%llu sleeps ended by %llu wakes, %llu snapshots whole and %llu tried again; "
           "0 lost wake-ups\n",
           learners, shards, slots, arguments[5], hurry ? ", hurry" : "",
           without_waitv ? ", no futex_waitv" : "", pipeline ? ", pipeline" : "",
           (unsigned long long)frames, (unsigned long long)sleeps, (unsigned long long)wakes,
           (unsigned long long)snapshots, (unsigned long long)retries);
    for (uint32_t i = 0; i < learners; i++)
        free(rings[i]);
    free(control);
    return 0;
}
