/* The model and its weights; see gadei.h. */
#include "gadei_learner.h"

#include <string.h>

#include "ps_atomic.h"

const struct gadei_tensor *gadei_tensors(const gadei_learner *learner, uint32_t *count)
{
    if (count)
        *count = learner ? learner->tensor_count : 0;
    return learner ? learner->tensors : NULL;
}

int gadei_find(gadei_learner *learner, const char *name)
{
    if (!learner)
        return ps_check_process(learner);
    if (!name)
        return ps_fail(learner, GADEI_ERROR, "the tensor's name is NULL");
    for (uint32_t i = 0; i < learner->tensor_count; i++)
        if (!strcmp(learner->tensors[i].name, name))
            return (int)i;
    return ps_fail(learner, GADEI_ERROR, "the job's model has no tensor '%.120s'", name);
}

uint64_t gadei_elements(const gadei_learner *learner) { return learner ? learner->elements : 0; }

const float *gadei_weights(const gadei_learner *learner)
{
    return learner ? learner->weights : NULL;
}

uint64_t gadei_version(const gadei_learner *learner)
{
    return learner ? ps_load_acquire(&learner->common.control->version) : 0; /* SYNC POINT: applied */
}

void gadei_pull(gadei_learner *learner, float *weights)
{
    if (!learner || !weights)
        return;
    learner->common.version = gadei_version(learner);
    learner->common.copies = 1;
    memcpy(weights, learner->weights, learner->elements * sizeof(float));
}

static int try_copy(gadei_learner *learner, uint64_t ns)
{
    return ps_copy_on(&learner->common, ns);
}

int gadei_pull_consistent(gadei_learner *learner, float *weights, int64_t timeout_ms)
{
    PS_ENTER(learner);
    uint64_t version = gadei_version(learner);
    if (!weights)
        return ps_fail(learner, GADEI_ERROR, "the place for the weights is NULL");
    ps_copy_begin(&learner->common, weights);
    int result = ps_wait_for(learner, try_copy, ps_limit_of(timeout_ms), "no consistent copy");
    ps_copy_end(&learner->common);
    if (!result) {
        learner->common.version = version;
        learner->common.copies = 1;
    }
    return result;
}
