/* See ps_lease.h. */
#define _GNU_SOURCE /* pthread_mutex_clocklock */
#include "ps_lease.h"

#include <errno.h>
#include <pthread.h>
#include <string.h>
#include <time.h>

#include "ps_ring.h"

static_assert(sizeof(pthread_mutex_t) <= 64, "a lease has one line");

/* A wait by the time of day would last longer by what the clock is set back meanwhile. The C
 * libraries without pthread_mutex_clocklock() have nothing better. */
#if defined(__GLIBC__) && __GLIBC_PREREQ(2, 30)
#define CLOCK CLOCK_MONOTONIC
#define lock_until(mutex, until) pthread_mutex_clocklock(mutex, CLOCK, until)
#else
#define CLOCK CLOCK_REALTIME
#define lock_until(mutex, until) pthread_mutex_timedlock(mutex, until)
#endif

int ps_lease_make(uint64_t lease)
{
    pthread_mutexattr_t how;
    int error = pthread_mutexattr_init(&how);
    if (error)
        return -error;
    error = pthread_mutexattr_setpshared(&how, PTHREAD_PROCESS_SHARED);
    if (!error)
        error = pthread_mutexattr_setrobust(&how, PTHREAD_MUTEX_ROBUST);
    if (!error) {
        memset((void *)lease, 0, 64);
        error = pthread_mutex_init((pthread_mutex_t *)lease, &how);
    }
    pthread_mutexattr_destroy(&how);
    return -error;
}

int ps_lease_take(uint64_t lease, uint64_t timeout_ns)
{
    pthread_mutex_t *mutex = (pthread_mutex_t *)lease;
    int error = pthread_mutex_trylock(mutex);
    if (error == EBUSY && timeout_ns) {
        struct timespec until;
        clock_gettime(CLOCK, &until);
        uint64_t ns = (uint64_t)until.tv_nsec + timeout_ns;
        until.tv_sec += (time_t)(ns / 1000000000ull);
        until.tv_nsec = (long)(ns % 1000000000ull);
        error = lock_until(mutex, &until);
    }
    switch (error) {
    case 0:
        return PS_LEASE_CLEAN;
    case EOWNERDEAD: /* SYNC POINT: lease. The dead thread's stores are visible from here on. */
        pthread_mutex_consistent(mutex);
        return PS_LEASE_DIED;
    case EBUSY:
    case ETIMEDOUT:
        return PS_TIMEOUT;
    default:
        return -1000 - error;
    }
}

void ps_lease_release(uint64_t lease)
{
    pthread_mutex_unlock((pthread_mutex_t *)lease); /* SYNC POINT: lease */
}
