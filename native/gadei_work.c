/* Batches, the stop request, waves and pauses; see gadei.h. */
#include "gadei_learner.h"

#include <stdio.h>

#include "ps_atomic.h"

int gadei_stopping(const gadei_learner *learner)
{
    return !learner || ps_load_acquire32(&learner->common.control->stop) != PS_GO;
}

uint32_t gadei_wave(const gadei_learner *learner)
{
    uint64_t wave = learner ? ps_load_acquire(&learner->common.control->wave) : 1;
    return wave ? (uint32_t)wave : 1;
}

static int pause_learner(gadei_learner *learner, int on)
{
    PS_ENTER(learner);
    ps_pause(learner->common.ring, learner->common.control, on);
    return GADEI_OK;
}

int gadei_pause(gadei_learner *learner) { return pause_learner(learner, 1); }
int gadei_resume(gadei_learner *learner) { return pause_learner(learner, 0); }

int gadei_set_work(gadei_learner *learner, uint32_t batches, uint32_t epochs, uint64_t seed)
{
    PS_ENTER(learner);
    char json[192];
    if (!batches || !epochs)
        return ps_fail(learner, GADEI_ERROR, "batches and epochs must be above 0");
    snprintf(json, sizeof json,
             "{\"v\":1,\"op\":\"work\",\"batches\":%u,\"epochs\":%u,\"seed\":%llu}", batches,
             epochs, (unsigned long long)seed);
    return ps_request(learner, json, NULL, 0, PS_PATIENCE_NS);
}

static int try_work(gadei_learner *learner, uint64_t ns)
{
    return ps_take_work(learner->common.ring, learner->common.control, ns, &learner->item);
}

int gadei_take_batch(gadei_learner *learner, uint32_t *epoch, uint32_t *index, int64_t timeout_ms)
{
    PS_ENTER(learner);
    if (!epoch || !index)
        return ps_fail(learner, GADEI_ERROR, "the place for the batch's epoch or index is NULL");
    uint32_t most = learner->common.control->ahead;
    if (learner->taken_count >= (most < PS_AHEAD ? most : PS_AHEAD))
        return ps_fail(learner, GADEI_ERROR,
                       "batches that wait for their gradients: %u; push once for each batch",
                       learner->taken_count);
    int result = ps_wait_for(learner, try_work, ps_limit_of(timeout_ms), "no batch was handed out");
    if (result == GADEI_FINISHED || result == GADEI_STOPPED) {
        if (gadei_stopping(learner) || result == GADEI_STOPPED)
            return ps_ended(learner, GADEI_FINISHED);
        return ps_fail(learner, GADEI_FINISHED, "all batches of job '%s' are done", learner->job);
    }
    if (result)
        return result;
    learner->taken[(learner->taken_first + learner->taken_count++) % PS_AHEAD] = learner->item;
    *epoch = (uint32_t)(learner->item >> 32);
    *index = (uint32_t)learner->item;
    return GADEI_OK;
}
