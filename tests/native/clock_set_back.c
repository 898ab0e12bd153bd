/* Preloaded: the time of day is an hour ahead for the process, as if the kernel's clock had been
 * set back by an hour since. Waits until a time of day last an hour longer then. */
#define _GNU_SOURCE
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

int clock_gettime(clockid_t clock, struct timespec *now)
{
    int error = (int)syscall(SYS_clock_gettime, clock, now);
    if (!error && clock == CLOCK_REALTIME)
        now->tv_sec += 3600;
    return error;
}
