/* A learner's consistent copies of the weights; see ps_learner.h. */
#include "ps_learner.h"
#include "ps_atomic.h"

#define HELD_NS 30000000ull /* longer than the shards hold back a gradient after one request */
#define PAUSE_NS 20000l

void ps_shard_range(uint64_t elements, uint32_t shards, uint32_t index, uint64_t *low,
                    uint64_t *high)
{
    uint64_t chunks = (elements + PS_CHUNK - 1) / PS_CHUNK;
    *low = chunks * index / shards * PS_CHUNK;
    *high = chunks * (index + 1) / shards * PS_CHUNK;
    if (*high > elements)
        *high = elements;
}

void ps_copy_begin(struct ps_learner *learner, float *to)
{
    learner->copying.to = to;
    learner->copying.copied = 0;
    learner->copying.asked_ns = 0;
}

static void ask_to_hold(struct ps_learner *learner, uint64_t now)
{
    struct ps_copying *copying = &learner->copying;
    if (copying->asked_ns && now - copying->asked_ns <= HELD_NS)
        return;
    copying->requests = copying->requests == UINT32_MAX ? 1 : copying->requests + 1;
    ps_store_release32(&learner->ring->hold, copying->requests);
    copying->asked_ns = now;
}

int ps_copy_on(struct ps_learner *learner, uint64_t timeout_ns)
{
    struct ps_copying *copying = &learner->copying;
    const struct ps_weights *weights = learner->weights;
    const float *from = (const float *)((const char *)weights + weights->data_at);
    const uint32_t shards = learner->control->shards;
    const uint64_t end = ps_now_ns() + timeout_ns;
    const struct timespec pause = {0, PAUSE_NS};
    while (copying->copied < shards) {
        uint64_t low, high;
        ps_shard_range(weights->elements, shards, copying->copied, &low, &high);
        if (ps_snapshot(learner->control, copying->copied, copying->to + low, from + low,
                        (high - low) * sizeof(float))) {
            copying->copied++;
            continue;
        }
        uint64_t now = ps_now_ns();
        if (now >= end)
            return PS_TIMEOUT;
        ask_to_hold(learner, now);
        nanosleep(&pause, NULL);
    }
    return 0;
}

void ps_copy_end(struct ps_learner *learner)
{
    ps_store_release32(&learner->ring->hold, 0);
}
