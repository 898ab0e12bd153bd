/*
 * The ring under threads: one learner, several shards, and a second ring of batches the other way.
 * Every shard must see every frame once, whole and in order, and every batch must arrive in order.
 * A snapshot must never be a mixture of two states. Prints nothing when all is well.
 *
 * Usage: ring_stress SHARDS SLOTS FRAMES SPIN_NS
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ps_ring.h"
#include "ps_sync.h"

enum { PAYLOAD = 256, LONG_NS = 1000000000 };

static struct ps_control *control;
static struct ps_ring *ring;
static uint64_t frames, guarded[PAYLOAD];

static void check(int right, const char *what, uint64_t got)
{
    if (right)
        return;
    fprintf(stderr, "%s: %llu\n", what, (unsigned long long)got);
    exit(1);
}

static uint64_t *payload(uint64_t sequence)
{
    return (uint64_t *)((char *)ring + ring->slots_at +
                        sequence % ring->slots * ring->slot_bytes + PS_PAYLOAD_AT);
}

static void *shard(void *argument)
{
    const uint64_t me = (uint64_t)(uintptr_t)argument, address = (uint64_t)(uintptr_t)ring;
    uint64_t handed = 0;
    for (uint64_t tail = 0; tail < frames;) {
        uint32_t bell = ps_get32((uint64_t)(uintptr_t)&control->shard_bell);
        while (me == 0 && handed < frames && handed < tail + PS_AHEAD) /* each frame answers one */
        {
            ps_hand_out(address, handed, handed << 32 | 7);
            handed++;
        }
        uint64_t head = ps_get((uint64_t)(uintptr_t)&ring->head);
        if (head == tail) {
            ps_shard_sleep((uint64_t)(uintptr_t)control, me, (uint64_t)(uintptr_t)&address,
                           (uint64_t)(uintptr_t)&tail, 1, bell, 1000000);
            continue;
        }
        check(head - tail <= ring->slots, "more frames than slots", head - tail);
        const uint64_t *values = payload(tail);
        if (me == 0) { /* as a shard writes its part of the weights */
            uint64_t lock = (uint64_t)(uintptr_t)&control->shard[0].sequence;
            ps_set(lock, ps_get(lock) + 1);
            ps_full_fence();
            for (int i = 0; i < PAYLOAD; i++)
                __atomic_store_n(&guarded[i], values[i], __ATOMIC_RELAXED);
            ps_set(lock, ps_get(lock) + 1);
        }
        for (int i = 0; i < PAYLOAD; i++)
            check(values[i] == tail, "a frame is torn or out of order", values[i]);
        ps_release(address, me, ++tail);
    }
    return NULL;
}

static void *puller(void *argument)
{
    uint64_t copy[PAYLOAD], last = 0, end = frames - 1;
    (void)argument;
    while (last < end) {
        if (!ps_snapshot(control, 0, copy, guarded, sizeof copy))
            continue;
        for (int i = 1; i < PAYLOAD; i++)
            check(copy[i] == copy[0], "a snapshot is torn", copy[i]);
        check(copy[0] >= last, "a snapshot went back", copy[0]);
        last = copy[0];
    }
    return NULL;
}

static void learn(void)
{
    for (uint64_t sequence = 0; sequence < frames; sequence++) {
        uint64_t item = 0;
        int result;
        while ((result = ps_take_work(ring, control, LONG_NS, &item)) == PS_TIMEOUT)
            ;
        check(!result && item == (sequence << 32 | 7), "a batch is out of order", item);
        while (!ps_claim(ring, control, LONG_NS, &result))
            check(result == PS_TIMEOUT, "claim", (uint64_t)-result);
        for (int i = 0; i < PAYLOAD; i++)
            payload(sequence)[i] = sequence;
        ps_publish(ring, control);
    }
    while (ps_wait_applied(ring, control, frames - 1, LONG_NS))
        ;
}

int main(int count, char **arguments)
{
    if (count != 5)
        return 2;
    uint32_t shards = (uint32_t)atoi(arguments[1]), slots = (uint32_t)atoi(arguments[2]);
    frames = strtoull(arguments[3], NULL, 10);
    uint64_t slot_bytes = PS_PAYLOAD_AT + sizeof(uint64_t) * PAYLOAD;
    control = aligned_alloc(4096, (sizeof *control + 4095) / 4096 * 4096);
    ring = aligned_alloc(4096, (sizeof *ring + slots * slot_bytes + 3 * 4095) / 4096 * 4096);
if (!control || !ring)
        return 2;
    memset(control, 0, sizeof *control);
    memset(ring, 0, sizeof *ring);
    control->spin_ns = strtoull(arguments[4], NULL, 10);
    control->phase = PS_PHASE_SERVING;
    control->work = PS_WORKING;
    control->roster[3].wanted = ring->header.generation = 9;
    ring->header.index = 3;
    ring->shards = shards;
    ring->slots = slots;
    ring->slot_bytes = slot_bytes;
    ring->slots_at = (sizeof *ring + 4095) / 4096 * 4096;

    pthread_t threads[PS_MAX_SHARDS], pull;
    for (uint32_t i = 0; i < shards; i++)
        if (pthread_create(&threads[i], NULL, shard, (void *)(uintptr_t)i))
            return 2;
    if (pthread_create(&pull, NULL, puller, NULL))
        return 2;
    learn();
    for (uint32_t i = 0; i < shards; i++)
        pthread_join(threads[i], NULL);
    pthread_join(pull, NULL);
    free(control);
    free(ring);
    return 0;
}
