/* What went wrong last; see gadei_learner.h. */
#include "gadei_learner.h"

#include <stdarg.h>
#include <stdio.h>

static _Thread_local char attach_error[ERROR_BYTES];

int ps_fail(gadei_learner *learner, int code, const char *format, ...)
{
    va_list list;
    va_start(list, format);
    vsnprintf(learner->error, sizeof learner->error, format, list);
    va_end(list);
    return code;
}

void ps_attach_failed(const char *error)
{
    snprintf(attach_error, sizeof attach_error, "%s", error);
}

const char *gadei_error(const gadei_learner *learner)
{
    return learner ? learner->error : attach_error;
}
