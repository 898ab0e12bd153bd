/* Put before a learner's sources (cc -include): for its waits a second is over in a twentieth. */
#define _GNU_SOURCE /* as sources that define it before their first header */
#include "ps_atomic.h"

#define ps_now_ns() (20 * (ps_now_ns)())
