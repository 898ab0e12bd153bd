/* Processes of a job: a pid alone may be reused, a pid with its start time may not. */
#ifndef PS_PROCESS_H
#define PS_PROCESS_H

#include "ps_layout.h"

#define PS_START_UNKNOWN UINT64_MAX

/* Any process: when a process started, in clock ticks after boot; 0 if there is none, or only a
 * zombie. It lives as long as any of its threads, even if the first one has ended. If that cannot be
 * read (no file descriptor or memory is free), PS_START_UNKNOWN, and errno has the reason. */
uint64_t ps_start_ticks(int32_t pid);

/* Any process: whether a server serves, or a watchdog is there to start one. */
int ps_job_lives(const struct ps_control *control);

#endif
