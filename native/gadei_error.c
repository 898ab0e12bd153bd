/* What went wrong last; see gadei_learner.h. */
#include "gadei_learner.h"

#include <stdarg.h>
#include <stdio.h>

static _Thread_local char thread_error[ERROR_BYTES];
static _Thread_local const gadei_learner *refused;
static _Thread_local const char *why_refused;

void ps_set_refusal(const gadei_learner *learner, const char *why)
{
    if (why || refused == learner)
        refused = why ? learner : NULL;
    why_refused = why;
}

int ps_fail(gadei_learner *learner, int code, const char *format, ...)
{
    va_list list;
    va_start(list, format);
    vsnprintf(learner ? learner->error : thread_error, ERROR_BYTES, format, list);
    va_end(list);
    return code;
}

void ps_attach_failed(const char *error)
{
    snprintf(thread_error, sizeof thread_error, "%s", error);
}

const char *gadei_error(const gadei_learner *learner)
{
    if (learner && learner == refused)
        return why_refused;
    return learner ? learner->error : thread_error;
}
