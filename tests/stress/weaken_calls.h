/* For calls.c: a thread that leaves orders nothing, which the check must notice. */
#undef __ATOMIC_RELEASE
#define __ATOMIC_RELEASE __ATOMIC_RELAXED
