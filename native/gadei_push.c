/* Gradients; see gadei.h. */
#include "gadei_learner.h"

#include <math.h>
#include <string.h>

#include "ps_atomic.h"

static_assert((int)GADEI_FLOAT32 == PS_FLOAT32 && (int)GADEI_BFLOAT16 == PS_BFLOAT16 &&
              (int)GADEI_FLOAT16 == PS_FLOAT16 && GADEI_MAX_DIMS == PS_MAX_DIMS, "formats");

#define WAITS_TURN "no grant to continue"
#define WAITS_SLOT "no slot came free: does the server apply gradients?"

uint64_t gadei_published(const gadei_learner *learner) { return learner ? learner->common.published : 0; }
int gadei_wanted(const gadei_learner *learner) { return learner && ps_wanted(&learner->common); }

int gadei_set_wire(gadei_learner *learner, uint32_t dtype)
{
    PS_ENTER(learner);
    if (dtype != GADEI_FLOAT32 && dtype != GADEI_BFLOAT16 && dtype != GADEI_FLOAT16)
        return ps_fail(learner, GADEI_ERROR, "unknown number format %u", dtype);
    if (learner->claimed_once)
        return ps_fail(learner, GADEI_ERROR, "the number format is chosen before the first claim");
    learner->common.dtype = dtype;
    return GADEI_OK;
}

/* -- waits ------------------------------------------------------------------------------------- */

static int try_turn(gadei_learner *learner, uint64_t ns)
{
    struct ps_learner *common = &learner->common;
    return ps_wait_grant(common->ring, common->control, common->published, ns);
}

static int try_mini_batch(gadei_learner *learner, uint64_t ns)
{
    struct ps_learner *common = &learner->common;
    return ps_wait_grant(common->ring, common->control, ps_turn(common, learner->mini_batch), ns);
}

static int try_slot(gadei_learner *learner, uint64_t ns)
{
    int result;
    learner->slot = ps_frame_claim(&learner->common, ns, &result);
    return result;
}

static int try_applied(gadei_learner *learner, uint64_t ns)
{
    struct ps_learner *common = &learner->common;
    return ps_wait_applied(common->ring, common->control, common->published - 1, ns);
}

int gadei_wait_turn(gadei_learner *learner, int64_t timeout_ms)
{
    PS_ENTER(learner);
    int result = ps_wait_for(learner, try_turn, ps_limit_of(timeout_ms), WAITS_TURN);
    if (!result) {
        learner->common.version = ps_load_acquire(&learner->common.control->version);
        learner->common.started = ps_clock();
    }
    return result;
}

int gadei_wait_mini_batch(gadei_learner *learner, uint32_t number, int64_t timeout_ms)
{
    PS_ENTER(learner);
    learner->mini_batch = number;
    double begin = ps_clock();
    int result = ps_wait_for(learner, try_mini_batch, ps_limit_of(timeout_ms), WAITS_TURN);
    learner->common.started += ps_clock() - begin;
    return result;
}

/* The next gradient from live weights comes from them as they are then. */
static int wait_until_applied(gadei_learner *learner, struct ps_limit limit, const char *late)
{
    struct ps_learner *common = &learner->common;
    int result = ps_wait_for(learner, try_applied, limit, late);
    if (!result && !common->copies)
        common->version = ps_load_acquire(&common->control->version);
    return result;
}

int gadei_wait_applied(gadei_learner *learner, int64_t timeout_ms)
{
    PS_ENTER(learner);
    if (!learner->common.published)
        return GADEI_OK;
    return wait_until_applied(learner, ps_limit_of(timeout_ms), "the gradient was not applied");
}

/* Releases the claimed slot, if there is one. */
static void drop_slot(gadei_learner *learner)
{
    learner->slot = NULL;
    ps_frame_drop(&learner->common);
}

/* Waits for the turn and for a slot, within one limit. */
static int claim_slot(gadei_learner *learner, int64_t timeout_ms)
{
    struct ps_limit limit = ps_limit_of(timeout_ms);
    drop_slot(learner);
    int result = ps_wait_for(learner, try_turn, limit, WAITS_TURN);
    if (!result)
        result = ps_wait_for(learner, try_slot, limit, WAITS_SLOT);
    learner->claimed_once |= !result;
    return result;
}

static char *payload(const gadei_learner *learner)
{
    return (char *)learner->slot + PS_PAYLOAD_AT;
}

static int claim(gadei_learner *learner, int64_t timeout_ms, enum ps_frame_kind kind)
{
    int result = claim_slot(learner, timeout_ms);
    if (!result) {
        ps_frame_begin(&learner->common, payload(learner), kind);
        memset(learner->written, 0, learner->tensor_count);
    }
    return result;
}

int gadei_claim(gadei_learner *learner, int64_t timeout_ms)
{
    PS_ENTER(learner);
    return claim(learner, timeout_ms, PS_DENSE);
}

int gadei_claim_rows(gadei_learner *learner, int64_t timeout_ms)
{
    PS_ENTER(learner);
    return claim(learner, timeout_ms, PS_ROWS);
}

/* -- writing ----------------------------------------------------------------------------------- */

static int is_rows(const gadei_learner *learner) { return learner->common.writing.kind == PS_ROWS; }

static int check_tensor(gadei_learner *learner, uint32_t index)
{
    if (!learner->slot)
        return ps_fail(learner, GADEI_ERROR, "%s", ps_refusal(PS_UNCLAIMED));
    if (index >= learner->tensor_count)
        return ps_fail(learner, GADEI_ERROR, "no tensor %u: the model has %u", index,
                       learner->tensor_count);
    if (learner->tensors[index].role == GADEI_BUFFER)
        return ps_fail(learner, GADEI_ERROR,
                       "'%s' is a buffer, which no gradient changes: write it with gadei_assign",
                       learner->tensors[index].name);
    if (is_rows(learner) && learner->written[index])
        return ps_fail(learner, GADEI_ERROR, "'%s' is written already",
                       learner->tensors[index].name);
    return GADEI_OK;
}

/* Reports a row that the tensor lacks, or a lack of memory. */
static int not_written(gadei_learner *learner, int result, uint64_t index, int64_t row)
{
    const struct gadei_tensor *tensor = &learner->tensors[index];
    if (result == PS_NO_MEMORY)
        return ps_fail(learner, GADEI_ERROR, "no memory to sort the rows of '%s'", tensor->name);
    return ps_fail(learner, GADEI_ERROR, "'%s' has no row %lld of %llu", tensor->name,
                   (long long)row,
                   (unsigned long long)(tensor->dims ? tensor->shape[0] : 1));
}

static int append(gadei_learner *learner, uint32_t index, const struct ps_gradient *gradient)
{
    uint64_t bad = 0;
    double squares = 0.0;
    int result = ps_frame_append(&learner->common, index, gradient, &squares, &bad);
    if (result)
        return not_written(learner, result, index,
                           result == PS_BAD_ROW ? gradient->indices[bad] : 0);
    learner->written[index] = 1;
    return isfinite(squares) ? GADEI_OK : GADEI_NONFINITE;
}

int gadei_write(gadei_learner *learner, uint32_t index, const float *values)
{
    PS_ENTER(learner);
    if (check_tensor(learner, index))
        return GADEI_ERROR;
    if (is_rows(learner))
        return values ? append(learner, index, &(struct ps_gradient){.values = values})
                      : ps_fail(learner, GADEI_ERROR, "'%s' is given without values",
                                learner->tensors[index].name);
    learner->squares[index] = ps_frame_dense(&learner->common, index, values);
    learner->written[index] = 1;
    return isfinite(learner->squares[index]) ? GADEI_OK : GADEI_NONFINITE;
}

int gadei_write_rows(gadei_learner *learner, uint32_t index, const int64_t *indices,
                     const float *values, uint64_t count)
{
    PS_ENTER(learner);
    static const int64_t none; /* an empty list of rows still needs an address */
    if (check_tensor(learner, index))
        return GADEI_ERROR;
    if (!is_rows(learner))
        return ps_fail(learner, GADEI_ERROR, "rows go into a slot of gadei_claim_rows");
    if (count && !(indices && values))
        return ps_fail(learner, GADEI_ERROR, "rows of '%s' are given without indices or values",
                       learner->tensors[index].name);
    struct ps_gradient gradient = {values, count ? indices : &none, count, NULL};
    return append(learner, index, &gradient);
}

/* -- publishing -------------------------------------------------------------------------------- */

static int publish_with(gadei_learner *learner, const struct ps_facts *facts)
{
    int64_t result = ps_frame_publish(&learner->common, facts);
    learner->slot = NULL;
    if (result == PS_STOPPED)
        return ps_ended(learner, GADEI_STOPPED);
    if (result == PS_EVICTED)
        return ps_evicted(learner);
    if (result < 0)
        return ps_fail(learner, GADEI_ERROR, "%s", ps_refusal((int)result));
    return GADEI_OK;
}

/* The frame answers the oldest batch that is not answered yet. */
static int publish_frame(gadei_learner *learner, struct ps_facts facts)
{
    facts.version = learner->common.version;
    facts.batch = learner->taken_count ? learner->taken[learner->taken_first] : PS_NO_BATCH;
    int result = publish_with(learner, &facts);
    if (result)
        return result;
    if (learner->taken_count) {
        learner->taken_first = (learner->taken_first + 1) % PS_AHEAD;
        learner->taken_count--;
    }
    return GADEI_OK;
}

static void finish_dense(gadei_learner *learner)
{
    double squares = 0.0;
    for (uint32_t i = 0; i < learner->tensor_count; i++) {
        if (learner->tensors[i].role == GADEI_BUFFER)
            break;
        if (!learner->written[i])
            learner->squares[i] = ps_frame_dense(&learner->common, i, NULL);
        squares += learner->squares[i];
    }
    learner->common.writing.payload.squares = squares;
}

int gadei_publish(gadei_learner *learner, double loss, uint32_t samples, float rate_scale)
{
    PS_ENTER(learner);
    if (!learner->slot)
        return ps_fail(learner, GADEI_ERROR, "%s", ps_refusal(PS_UNCLAIMED));
    struct ps_facts facts = {.samples = samples, .loss = loss};
    facts = ps_scaled(facts, rate_scale);
    const char *wrong = ps_wrong_scales(&learner->common, &facts);
    if (wrong)
        return ps_fail(learner, GADEI_ERROR, "%s", wrong);
    if (!is_rows(learner))
        finish_dense(learner);
    return publish_frame(learner, facts);
}

/* computed: 1 if the iteration took the time of a whole one. */
static int publish_nothing(gadei_learner *learner, uint32_t computed, int64_t timeout_ms)
{
    int result = claim_slot(learner, timeout_ms);
    if (result)
        return result;
    ps_frame_empty(&learner->common, computed);
    return publish_frame(learner, ps_scaled((struct ps_facts){.loss = NAN}, 1.0f));
}

int gadei_give_up(gadei_learner *learner, int64_t timeout_ms)
{
    PS_ENTER(learner);
    return publish_nothing(learner, 0, timeout_ms);
}

int gadei_push(gadei_learner *learner, const float *gradient, double loss, uint32_t samples,
               int64_t timeout_ms)
{
    PS_ENTER(learner);
    uint64_t number = 0, bad;
    if (!gradient)
        return ps_fail(learner, GADEI_ERROR, "the gradient is NULL");
    if (!gadei_wanted(learner))
        return publish_nothing(learner, 1, timeout_ms);
    int result = claim_slot(learner, timeout_ms);
    if (result)
        return result;
    for (uint32_t i = 0; i < learner->tensor_count; i++)
        learner->gradients[i].values = gradient + learner->tensors[i].start;
    result = ps_frame_whole(&learner->common, payload(learner), learner->gradients, &number, &bad);
    if (result) {
        drop_slot(learner);
        return not_written(learner, result, number, 0);
    }
    struct ps_facts facts = {.samples = samples, .loss = loss};
    result = publish_frame(learner, ps_scaled(facts, 1.0f));
    if (result)
        return result;
    return isfinite(learner->common.writing.payload.squares) ? GADEI_OK : GADEI_NONFINITE;
}

/* -- assignments ------------------------------------------------------------------------------- */

static int check_finite(gadei_learner *learner, const float *const *values)
{
    if (!learner->common.control->refuse_nonfinite)
        return GADEI_OK;
    for (uint32_t i = 0; i < learner->tensor_count; i++)
        for (uint64_t k = 0; values[i] && learner->tensors[i].role == GADEI_PARAMETER &&
                             k < learner->tensors[i].count; k++)
            if (!isfinite(values[i][k]))
                return ps_fail(learner, GADEI_ERROR,
                               "assign: '%s' holds a NaN or an infinity, which the job refuses; "
                               "nothing is changed",
                               learner->tensors[i].name);
    return GADEI_OK;
}

int gadei_assign(gadei_learner *learner, const float *const *values, int reset, int64_t timeout_ms)
{
    PS_ENTER(learner);
    struct ps_learner *common = &learner->common;
    struct ps_limit limit = ps_limit_of(timeout_ms);
    struct ps_facts facts = {.version = common->version, .batch = PS_NO_BATCH, .loss = NAN};
    facts = ps_scaled(facts, 1.0f);
    double started = common->started; /* of the current iteration, which continues */
    if (!values)
        return ps_fail(learner, GADEI_ERROR, "assign: values are NULL");
    if (learner->slot)
        return ps_fail(learner, GADEI_ERROR,
                       "assign: a gradient is begun and not pushed yet: push it first");
    int result = check_finite(learner, values);
    if (!result)
        result = ps_wait_for(learner, try_slot, limit, WAITS_SLOT);
    if (result)
        return result;
    for (uint32_t i = 0; i < learner->tensor_count; i++)
        learner->gradients[i].values = values[i];
    ps_frame_assign(common, payload(learner), learner->gradients, 0, reset ? PS_RESET : 0,
                    PS_SAME_STEPS);
    result = publish_with(learner, &facts);
    if (result)
        return result;
    common->started = started;
    return wait_until_applied(learner, limit, "the assignment was not applied");
}
