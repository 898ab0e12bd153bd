/*
 * A learner belongs to one thread at a time. These words hold threads to it: of two that call at
 * once the second is refused, and a slot is published by the thread that has claimed it, or by none.
 * They lie in the learner's private memory. A child of fork() has a copy of them, but the ring is its
 * parent's, so the process is compared where a thread enters and where a slot is claimed. Hooks of
 * fork() would not do: C code and ctypes fork without those of Python.
 *
 *   enter    inside: 0 -> this thread, acquire; refused if another one is inside
 *   leave    inside: 0, release: the next thread sees what this one has written
 *   shut     left = 1, then waits until no thread pushes, and never leaves: nothing is published
 *            any more
 *
 * A thread that has ended inside, by pthread_exit or cancellation, holds up nobody: the kernel is
 * asked whether the thread that is in the way still runs. Only if another thread of the process gets
 * its number meanwhile, which takes as many new threads as the machine has numbers, is it waited for
 * until that one ends too.
 */
#ifndef PS_CALLS_H
#define PS_CALLS_H

#include <stdint.h>

/* Calls that change the same words. Calls of different kinds may run beside each other. */
enum ps_call { PS_PUSHING, PS_TAKING, PS_COPYING, PS_CALLS };

struct ps_calls {
    uint32_t inside[PS_CALLS]; /* the thread that is in a call of this kind; 0: none */
    uint32_t left;             /* 1: the learner has detached */
    uint32_t claimer;          /* the thread that has claimed a slot and not published it; 0: none */
    uint64_t claimed;          /* sequence number of that slot; both are the pushing thread's */
    int32_t process;           /* that the learner belongs to */
};

/* Why a thread is refused; beside the results of waits in ps_ring.h. */
enum { PS_BUSY = -7, PS_OTHERS = -8, PS_UNCLAIMED = -9, PS_LEFT = -10, PS_FORKED = -11 };
#define PS_NESTED 1 /* this thread is inside already; it leaves once */

/* That reason as a line for the user. */
const char *ps_refusal(int result);

/* The calling thread, never 0. */
uint32_t ps_me(void);

/* Whether a thread of this process still runs. */
int ps_thread_lives(uint32_t thread);

/* Begins with this process as the one that the learner belongs to. */
void ps_own_calls(struct ps_calls *calls);

/* Whether this process is another one: a child of fork(). */
int ps_is_forked(const struct ps_calls *calls);

/* Returns 0, PS_NESTED, PS_BUSY, PS_LEFT or PS_FORKED. */
int ps_enter(struct ps_calls *calls, enum ps_call kind);
void ps_leave(struct ps_calls *calls, enum ps_call kind);

/* PS_OTHERS if another thread has claimed a slot, else 0. A thread that has ended has none;
 * one that is about to end is waited for, 0.1 s at most. */
int ps_others(const struct ps_calls *calls);

/* The thread that has claimed a slot; 0: none has. */
void ps_set_claimer(struct ps_calls *calls, uint32_t thread);

/* Whether this thread may publish: 0, PS_OTHERS or PS_UNCLAIMED. */
int ps_check_claimed(const struct ps_calls *calls);

/* From its return on nothing is published. Waits for the push that is under way, if there is one;
 * a push that waits for its turn or for a slot ends with PS_LEFT. */
void ps_shut(struct ps_calls *calls);

int ps_has_left(const struct ps_calls *calls);

#endif
