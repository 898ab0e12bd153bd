/*
 * All atomics and futex calls of the project.
 *
 * Futexes are not private: waiter and waker are different processes. FUTEX_WAIT and FUTEX_WAKE
 * only read the word's page, so both work on a read-only mapping. Every wait has a time-out, so
 * that a process that dies between its store and its wake delays its peer but does not block it.
 */
#ifndef PS_ATOMIC_H
#define PS_ATOMIC_H

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static inline uint64_t ps_load_acquire(const uint64_t *word)
{
    return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}

static inline uint32_t ps_load_acquire32(const uint32_t *word)
{
    return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}

static inline void ps_store_release(uint64_t *word, uint64_t value)
{
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
}

static inline void ps_store_release32(uint32_t *word, uint32_t value)
{
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
}

static inline void ps_fence(void)
{
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}

static inline uint64_t ps_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000ull + (uint64_t)now.tv_nsec;
}

static inline void ps_relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield" ::: "memory");
#else
    __asm__ volatile("" ::: "memory");
#endif
}

/* One turn of a server's spinning. A learner may need the same core, so each turn after the first
 * microseconds yields it; otherwise each would block the other until its spinning ends. */
#define PS_SPIN_ALONE_NS 8000
static inline void ps_spin(uint64_t spun_ns)
{
    if (spun_ns < PS_SPIN_ALONE_NS)
        ps_relax();
    else
        sched_yield();
}

/* Sleeps while *word == expected, at most timeout_ns. May return early. */
static inline void ps_futex_wait(const uint32_t *word, uint32_t expected, uint64_t timeout_ns)
{
    struct timespec limit = {(time_t)(timeout_ns / 1000000000ull),
                             (long)(timeout_ns % 1000000000ull)};
    syscall(SYS_futex, word, FUTEX_WAIT, expected, &limit, NULL, 0);
}

static inline void ps_futex_wake(const uint32_t *word)
{
    syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

static inline void ps_ring_bell(uint32_t *word)
{
    __atomic_fetch_add(word, 1, __ATOMIC_SEQ_CST); /* SYNC POINT: bells */
    ps_futex_wake(word);
}

/* The low half of a 64-bit word: a futex compares 32 bits. */
static inline const uint32_t *ps_low_half(const uint64_t *word)
{
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    return (const uint32_t *)word + 1;
#else
    return (const uint32_t *)word;
#endif
}

#endif
