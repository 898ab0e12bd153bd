/* A learner's frames, except for their payload (ps_payload.c); see ps_learner.h. */
#include <float.h>
#include <math.h>
#include <string.h>

#include "ps_learner.h"
#include "ps_atomic.h"

/* Indices into the hyper-parameters, and codes, as gadei_ps/kernels/optimizers.py packs them. */
enum { HYPER_KIND = 0, HYPER_LR = 1, HYPER_WEIGHT_DECAY = 6 };
enum { KIND_SGD = 1, KIND_ADAGRAD = 4, KIND_ADD = 7 };

/* Whether rows whose gradient is zero move nothing: not where weights decay. */
static uint32_t ps_zeros_are_skipped(const struct ps_control *control)
{
    const double kind = control->hyper[0][HYPER_KIND];
    for (uint32_t i = 0; i < control->groups && i < PS_MAX_GROUPS; i++)
        if (control->hyper[i][HYPER_WEIGHT_DECAY] != 0.0 && kind != KIND_ADD)
            return 0;
    return kind == KIND_ADD || kind == KIND_SGD || kind == KIND_ADAGRAD;
}

void ps_learner_begin(struct ps_learner *learner, struct ps_ring *ring,
                      const struct ps_control *control, const struct ps_weights *weights)
{
    uint64_t numbers = ps_load_acquire(&control->numbers_done); /* first: they are looked at again */
    *learner = (struct ps_learner){
        .ring = ring,
        .control = control,
        .weights = weights,
        .dtype = PS_FLOAT32,
        .numbers = numbers,
        .skips_zeros = ps_zeros_are_skipped(control),
        .version = ps_load_acquire(&control->version),
        .started = ps_clock(),
    };
    ps_own_calls(&learner->calls);
}

const char *ps_wrong_scales(const struct ps_learner *learner, const struct ps_facts *facts)
{
    const struct ps_control *control = learner->control;
    for (uint32_t i = 0; i < PS_MAX_GROUPS; i++) {
        double scale = facts->rate_scale[i];
        if (!(scale >= 0.0 && scale <= FLT_MAX))
            return "rate_scale is negative or not finite";
        if (i < control->groups && scale * control->hyper[i][HYPER_LR] > FLT_MAX)
            return "rate_scale times the job's learning rate is more than float32 holds";
    }
    return NULL;
}

int ps_wanted(const struct ps_learner *learner)
{
    const struct ps_entry *entry = &learner->control->roster[learner->ring->header.index];
    return learner->published >= ps_load_acquire(&entry->obsolete);
}

uint64_t ps_turn(const struct ps_learner *learner, uint64_t number)
{
    uint64_t wave = ps_load_acquire(&learner->control->wave);
    return learner->published - (number + 1 < wave && learner->published);
}

void ps_frame_drop(struct ps_learner *learner)
{
    ps_set_claimer(&learner->calls, 0);
    learner->writing.kind = 0;
}

struct ps_frame *ps_frame_claim(struct ps_learner *learner, uint64_t timeout_ns, int *result)
{
    *result = ps_has_left(&learner->calls) ? PS_LEFT : ps_others(&learner->calls);
    if (ps_is_forked(&learner->calls))
        *result = PS_FORKED;
    if (*result)
        return NULL;
    ps_frame_drop(learner);
    struct ps_frame *slot = ps_claim(learner->ring, learner->control, timeout_ns, result);
    if (slot) {
        uint64_t numbers = ps_load_acquire(&learner->control->numbers_done);
        if (numbers != learner->numbers) {
            learner->numbers = numbers;
            learner->skips_zeros = ps_zeros_are_skipped(learner->control);
        }
        ps_set_claimer(&learner->calls, ps_me());
        learner->calls.claimed = learner->ring->head;
    }
    return slot;
}

void ps_frame_empty(struct ps_learner *learner, uint32_t computed)
{
    learner->writing = (struct ps_writing){.kind = PS_EMPTY, .blocks = computed, .sorted = 1};
}

static struct ps_frame header(const struct ps_learner *learner, const struct ps_facts *facts)
{
    struct ps_frame frame = {
        .sequence = learner->calls.claimed,
        .clock = learner->published,
        .version = facts->version,
        .dtype = learner->dtype,
        .batch = facts->batch,
        .samples = facts->samples,
        .momentum = facts->momentum,
        .loss = facts->loss,
        .started = learner->started,
    };
    memcpy(frame.rate_scale, facts->rate_scale, sizeof frame.rate_scale);
    return frame;
}

void ps_frame_counted(struct ps_learner *learner)
{
    learner->writing.kind = 0;
    learner->published++;
    learner->started = ps_clock();
    if (!learner->copies)
        learner->version = ps_load_acquire(&learner->control->version);
    ps_set_claimer(&learner->calls, 0); /* last: another thread may push from here on */
}

int64_t ps_frame_publish(struct ps_learner *learner, const struct ps_facts *facts)
{
    struct ps_writing *writing = &learner->writing;
    int refused = ps_check_claimed(&learner->calls);
    if (refused)
        return refused;
    if (writing->kind == PS_ROWS && !writing->sorted)
        ps_sort_blocks(writing->payload.at, writing->blocks);
    struct ps_frame frame = header(learner, facts);
    frame.kind = writing->kind;
    frame.blocks = writing->blocks;
    frame.payload_bytes = writing->payload.end;
    frame.squares = writing->payload.squares;
    frame.flags = writing->flags;
    frame.stream = writing->stream;
    frame.steps = writing->steps;
    if (writing->kind == PS_ASSIGN)
        frame.dtype = PS_FLOAT32;
    frame.finished = ps_clock();
    refused = ps_publish_frame(learner->ring, learner->control, frame);
    ps_set_claimer(&learner->calls, 0);
    if (refused)
        return refused;
    ps_frame_counted(learner);
    return (int64_t)frame.sequence;
}

int ps_frame_land(struct ps_learner *learner, struct ps_landing *landing,
                  const struct ps_landed *landed, const struct ps_facts *facts)
{
    int refused = ps_check_claimed(&learner->calls);
    if (refused)
        return refused;
    *landing = (struct ps_landing){
        .calls = &learner->calls,
        .ring = learner->ring,
        .control = learner->control,
        .sums = landed->sums,
        .tensors = learner->weights->tensors,
        .parts = landed->parts,
        .loss_there = landed->loss_there,
        .frame = header(learner, facts),
    };
    landing->frame.kind = landed->kind;
    landing->frame.blocks = landed->blocks;
    landing->frame.payload_bytes = landed->bytes;
    return 0;
}
