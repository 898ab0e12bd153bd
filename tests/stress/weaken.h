/*
 * The protocol with less order than it needs: put before native/ps_ring.c (cc -include) to show
 * that the stress test sees the difference. What to leave out: -DWEAK_RELEASE, -DWEAK_ACQUIRE,
 * -DWEAK_FENCE.
 */
#include "ps_atomic.h"

#ifdef WEAK_RELEASE
#define ps_store_release(word, value) __atomic_store_n((word), (value), __ATOMIC_RELAXED)
#define ps_store_release32(word, value) __atomic_store_n((word), (value), __ATOMIC_RELAXED)
#endif
#ifdef WEAK_ACQUIRE
#define ps_load_acquire(word) __atomic_load_n((word), __ATOMIC_RELAXED)
#define ps_load_acquire32(word) __atomic_load_n((word), __ATOMIC_RELAXED)
#endif
#ifdef WEAK_FENCE
#define ps_fence() __asm__ volatile("" ::: "memory")
#endif
