/*
 * Waits. Each comes back every SLICE_NS to look whether the job lives; learners/client.py does the
 * same in Python, where signals and other threads want their turn between two slices.
 */
#include "gadei_learner.h"

#include "ps_process.h"
#include "ps_atomic.h"

#define SLICE_NS 100000000ull
#define LONGEST_MS 1000000000000 /* thirty years: no sum of it overflows */
#define GONE_NS 10000000000ull   /* how long a job may be without server and watchdog */

static_assert((int)GADEI_TIMEOUT == PS_TIMEOUT && (int)GADEI_STOPPED == PS_STOPPED &&
              (int)GADEI_EVICTED == PS_EVICTED && (int)GADEI_FINISHED == PS_FINISHED, "results");

int ps_check_process(gadei_learner *learner)
{
    if (!learner)
        return ps_fail(NULL, GADEI_ERROR, "the learner is NULL");
    if (!ps_is_forked(&learner->common.calls))
        return GADEI_OK;
    return ps_fail(learner, GADEI_ERROR, "%s", ps_refusal(PS_FORKED));
}

static int refuse(const gadei_learner *learner, int result)
{
    ps_set_refusal(learner, ps_refusal(result));
    return GADEI_ERROR;
}

int ps_begin_call(gadei_learner *learner)
{
    ps_set_refusal(learner, NULL);
    int result = ps_check_process(learner);
    if (result)
        return result;
    struct ps_calls *calls = &learner->common.calls;
    result = ps_others(calls);
    if (!result)
        result = ps_enter(calls, PS_PUSHING);
    if (result) /* also PS_NESTED: a signal handler must not change what it has interrupted */
        return refuse(learner, result == PS_NESTED ? PS_BUSY : result);
    result = ps_others(calls);
    if (result) {
        ps_leave(calls, PS_PUSHING);
        return refuse(learner, result);
    }
    return GADEI_OK;
}

void ps_end_call(gadei_learner **learner) { ps_leave(&(*learner)->common.calls, PS_PUSHING); }

int ps_ended(gadei_learner *learner, int code)
{
    if (ps_load_acquire32(&learner->common.control->phase) == PS_PHASE_FAILED)
        return ps_fail(learner, GADEI_FAILED, "job '%s' has failed: its parameter server died",
                       learner->job);
    return ps_fail(learner, code, "job '%s' has been stopped", learner->job);
}

int ps_evicted(gadei_learner *learner)
{
    return ps_fail(learner, GADEI_EVICTED, "job '%s' has evicted this learner",
                   learner->job);
}

struct ps_limit ps_limit_of(int64_t timeout_ms)
{
    uint64_t ms = timeout_ms < LONGEST_MS ? (uint64_t)timeout_ms : LONGEST_MS;
    uint64_t until = timeout_ms < 0 ? UINT64_MAX : ps_now_ns() + ms * 1000000ull;
    return (struct ps_limit){until, timeout_ms};
}

int ps_wait_for(gadei_learner *learner, int (*attempt)(gadei_learner *, uint64_t),
                struct ps_limit limit, const char *what)
{
    for (uint64_t now = ps_now_ns();;) {
        uint64_t rest = limit.until > now ? limit.until - now : 0;
        int result = attempt(learner, rest < SLICE_NS ? rest : SLICE_NS);
        if (!result || result == PS_FINISHED) {
            learner->gone_since = 0;
            return result;
        }
        if (result <= PS_BUSY)
            return ps_fail(learner, GADEI_ERROR, "%s", ps_refusal(result));
        if (result == PS_STOPPED)
            return ps_ended(learner, GADEI_STOPPED);
        if (result == PS_EVICTED)
            return ps_evicted(learner);
        if (ps_has_left(&learner->common.calls))
            return ps_fail(learner, GADEI_ERROR, "%s", ps_refusal(PS_LEFT));
        now = ps_now_ns();
        if (ps_job_lives(learner->common.control))
            learner->gone_since = 0;
        else if (!learner->gone_since)
            learner->gone_since = now;
        else if (now - learner->gone_since > GONE_NS)
            return ps_fail(learner, GADEI_FAILED,
                           "the server and the watchdog of job '%s' are gone", learner->job);
        if (now >= limit.until)
            return ps_fail(learner, GADEI_TIMEOUT, "%s within %lld ms", what,
                           (long long)limit.timeout_ms);
    }
}
