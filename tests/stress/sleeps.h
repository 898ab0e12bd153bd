/*
 * Watches the sleeps of a stress test. Every futex call goes through __wrap_syscall below, where a
 * sleep ends by itself only after PATIENCE. If by then what the sleeper waits for had come, and
 * PATIENCE later still nobody has woken it, the wake-up is lost and the program fails. (In the
 * product a wait ends by itself after 50 or 100 ms, which would hide it.)
 *
 * Link with -Wl,--wrap=syscall. Each sleep must be announced by await().
 */
#ifndef SLEEPS_H
#define SLEEPS_H

#include <stdio.h>
#include <stdlib.h>

#include "ps_atomic.h"

#define PATIENCE_NS 2000000000ull
#define AT(word) ((uint64_t)(uintptr_t)(word))

/* NULL; or the word that shards poll, as on a kernel without futex_waitv. */
static const uint32_t *polled;
static uint64_t sleeps, wakes;

static void check(int right, const char *what, uint64_t got)
{
    if (right)
        return;
    fprintf(stderr, "FAILED: %s: %llu\n", what, (unsigned long long)got);
    fflush(stderr);
    _Exit(1);
}

static void count_one(uint64_t *counter)
{
    __atomic_fetch_add(counter, 1, __ATOMIC_RELAXED); /* relaxed: it orders nothing for the tool */
}

/* What this thread sleeps for: a function that says whether it has come, and its name. */
struct awaited {
    const char *what;
    int (*has_come)(uint64_t who, uint64_t mark);
    uint64_t who, mark;
};
static _Thread_local struct awaited awaited;

static void await(const char *what, int (*has_come)(uint64_t, uint64_t), uint64_t who,
                  uint64_t mark)
{
    awaited = (struct awaited){what, has_come, who, mark};
}

/* Names as the linker's --wrap wants them. */
long __real_syscall(long number, ...);
long __wrap_syscall(long number, long a, long b, long c, long d, long e, long f);

long __wrap_syscall(long number, long a, long b, long c, long d, long e, long f)
{
    int wait = number == SYS_futex && (b & FUTEX_CMD_MASK) == FUTEX_WAIT;
    int waitv = number == 449; /* futex_waitv, on every architecture */
    if (waitv && polled) {
        struct timespec pause = {0, 1000000}; /* so that the shards find out at the same time */
        nanosleep(&pause, NULL);
        errno = ENOSYS;
        return -1;
    }
    if (number == SYS_futex && (b & FUTEX_CMD_MASK) == FUTEX_WAKE)
        count_one(&wakes);
    /* Without futex_waitv a shard finds frames only by its time-out. */
    if (!(wait || waitv) || (polled && a == (long)AT(polled)))
        return __real_syscall(number, a, b, c, d, e, f);
    check(awaited.has_come != NULL, "a sleep that nobody has announced", (uint64_t)number);
    for (int overdue = 0;;) {
        long result;
        if (wait) {
            struct timespec limit = {PATIENCE_NS / 1000000000ull, PATIENCE_NS % 1000000000ull};
            result = __real_syscall(number, a, b, c, AT(&limit), e, f);
        } else {
            uint64_t end = ps_now_ns() + PATIENCE_NS;
            struct timespec limit = {(time_t)(end / 1000000000ull), (long)(end % 1000000000ull)};
            result = __real_syscall(number, a, b, c, AT(&limit), e, f);
        }
        if (result >= 0)
            count_one(&sleeps);
        if (result >= 0 || errno != ETIMEDOUT)
            return result;
        if (overdue) {
            fprintf(stderr, "LOST WAKE-UP: %s %llu sleeps at %llu, and it had come\n", awaited.what,
                    (unsigned long long)awaited.who, (unsigned long long)awaited.mark);
            fflush(stderr);
            _Exit(3);
        }
        overdue = awaited.has_come(awaited.who, awaited.mark);
    }
}

#endif
