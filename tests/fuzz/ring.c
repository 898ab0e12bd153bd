/*
 * Fuzzes native/ps_ring.c against a ring whose learner writes anything into it at any time. The
 * server's functions must stay inside the segment, change no words but their own, and come back.
 *
 * The input is a list of steps: hostile writes, and calls of the server or of the learner. Before a
 * call of the learner the ring's geometry (slots, shards, where the slots lie) is set right again:
 * it was checked when the learner attached, and one that writes over its own afterwards hurts only
 * itself. The server never reads it from the ring.
 */
#include <assert.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "input.h"
#include "ps_ring.h"
#include "ps_atomic.h"

enum { SLOTS = 2, SHARDS = 3, ROW = 5, RINGS = 3, PART = 256, MANY = 300 };
#define AT(word) ((uint64_t)(uintptr_t)(word))

static struct ps_control *control;
static struct ps_ring *rings[RINGS];
static size_t ring_bytes;

static void set_right(struct ps_ring *ring)
{
    ring->header.index = ROW;
    ring->slots = SLOTS;
    ring->shards = SHARDS;
    ring->slot_bytes = PS_PAYLOAD_AT + 64;
    ring->slots_at = (sizeof *ring + 63) / 64 * 64;
}

/* Any head, and tails near it: what a ring looks like late in its life. */
static void move_on(struct input *in, struct ps_ring *ring)
{
    ring->head = next(in, 8);
    for (uint32_t shard = 0; shard < SHARDS; shard++)
        ring->tail[shard].value = ring->head - next(in, 1) % (SLOTS + 2);
}

static void serve(struct input *in, struct ps_ring *ring)
{
    static struct ps_ring before;
    before = *ring;
    switch (next(in, 1) % 2) {
    case 0: {
        uint64_t shard = next(in, 1) % PS_MAX_SHARDS, tail = next(in, 8);
        ps_release(AT(ring), shard, tail);
        assert(ring->tail[shard].value == tail);
        assert(ring->released - before.released == (before.waits_slot != 0));
        before.tail[shard].value = tail;
        before.released = ring->released;
        break;
    }
    default: {
        uint64_t number = next(in, 8), item = next(in, 8);
        ps_hand_out(AT(ring), number, item);
        assert(ring->work_head == (uint32_t)number + 1);
        assert(ring->work_items[number % PS_AHEAD] == item);
        before.work_head = ring->work_head;
        before.work_items[number % PS_AHEAD] = item;
    }
    }
    assert(!memcmp(&before, ring, sizeof before)); /* nothing but its own words */
}

static void sleep_on(struct input *in)
{
    uint64_t address[MANY], seen[MANY];
    uint64_t count = next(in, 2) % (MANY + 1), head = next(in, 8);
    uint64_t shard = next(in, 1) % PS_MAX_SHARDS;
    uint32_t bell = (uint32_t)next(in, 1);
    for (uint64_t i = 0; i < count; i++) {
        address[i] = AT(rings[i % RINGS]);
        seen[i] = i % 2 && !head ? rings[i % RINGS]->head : head; /* as it is, or another */
    }
    if (head % 3 == 0)
        for (uint64_t i = 0; i < count; i++)
            seen[i] = rings[i % RINGS]->head;
    ps_shard_sleep(AT(control), shard, AT(address), AT(seen), 0, count, bell, 0);
    assert(!control->sleepers);
}

static void learn(struct input *in, struct ps_ring *ring)
{
    uint64_t item;
    int result;
    set_right(ring);
    control->stop = (uint32_t)next(in, 1) % 3;
    switch (next(in, 1) % 5) {
    case 0: {
        struct ps_frame *frame = ps_claim(ring, control, 0, &result);
        if (frame) { /* whatever the head and the tails say, it is a slot */
            memset(frame, 0xff, ring->slot_bytes);
            set_right(ring);
            ps_publish(ring, control);
        }
        break;
    }
    case 1:
        ps_wait_applied(ring, control, next(in, 8), 0);
        break;
    case 2:
        ps_wait_grant(ring, control, next(in, 8), 0);
        break;
    case 3:
        ps_take_work(ring, control, 0, &item);
        break;
    default:
        ps_publish(ring, control);
    }
}

static void pull(struct input *in)
{
    char *from = malloc(PART), *to = malloc(PART);
    uint32_t shard = (uint32_t)next(in, 1) % PS_MAX_SHARDS;
    assert(from && to);
    memset(from, 7, PART);
    control->shard[shard].sequence = next(in, 8);
    size_t bytes = next(in, 1);
    int whole = ps_snapshot(control, shard, to, from, bytes);
    assert(whole == !(control->shard[shard].sequence & 1)); /* nobody writes meanwhile */
    assert(!whole || !memcmp(to, from, bytes));
    free(from);
    free(to);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct input in = {data, size};
    if (!control) {
        control = calloc(1, sizeof *control);
        ring_bytes = (sizeof(struct ps_ring) + 63) / 64 * 64 + SLOTS * (PS_PAYLOAD_AT + 64);
        for (int i = 0; i < RINGS; i++)
            rings[i] = aligned_alloc(64, ring_bytes);
    }
    control->phase = PS_PHASE_SERVING;
    control->stop = control->sleepers = 0;
    control->roster[ROW].wanted = 9;
    control->roster[ROW].grant = next(&in, 1);
    control->work = (uint32_t)next(&in, 1) % 3;
    for (int i = 0; i < RINGS; i++) {
        memset(rings[i], 0, sizeof *rings[i]);
        rings[i]->header.generation = 9;
        set_right(rings[i]);
    }
    while (in.left) {
        struct ps_ring *ring = rings[next(&in, 1) % RINGS];
        switch (next(&in, 1) % 6) {
        case 0:
            scribble(&in, ring, sizeof *ring, 64); /* hostile */
            break;
        case 1:
            move_on(&in, ring);
            break;
        case 2:
            serve(&in, ring);
            break;
        case 3:
            sleep_on(&in);
            break;
        case 4:
            learn(&in, ring);
            break;
        default:
            pull(&in);
        }
    }
    return 0;
}
