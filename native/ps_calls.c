/* See ps_calls.h. */
#include "ps_calls.h"

#include <errno.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define NAP_NS 50000l
#define ENDS_NS 100000000l /* how long a thread that was joined may take to end for the kernel */

static _Thread_local uint32_t me;
static int32_t *process; /* its number, or 0; in a page that is zero in a child, however it is forked */

static void forget_me(void) { me = 0; }

/* The only thread of a child of fork() has another number than the one that it is a copy of. */
__attribute__((constructor)) static void look_for_forks(void)
{
    size_t size = (size_t)sysconf(_SC_PAGESIZE);
    void *page = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (page != MAP_FAILED && !madvise(page, size, MADV_WIPEONFORK))
        process = page;
    pthread_atfork(NULL, NULL, forget_me);
}

/* The number of this process. A system call takes as long as a tenth of a small push. */
static int32_t this_process(void)
{
    if (!process)
        return getpid();
    int32_t found = __atomic_load_n(process, __ATOMIC_RELAXED);
    if (!found)
        __atomic_store_n(process, found = getpid(), __ATOMIC_RELAXED);
    return found;
}

uint32_t ps_me(void)
{
    if (!me)
        me = (uint32_t)syscall(SYS_gettid);
    return me;
}

int ps_thread_lives(uint32_t thread)
{
    return !syscall(SYS_tgkill, getpid(), thread, 0) || errno != ESRCH;
}

const char *ps_refusal(int result)
{
    switch (result) {
    case PS_BUSY:
        return "another thread is in a call of this learner: a learner belongs to one thread at a "
               "time";
    case PS_OTHERS:
        return "another thread has claimed a slot of this learner and not published it: a learner "
               "belongs to one thread at a time";
    case PS_UNCLAIMED:
        return "no slot is claimed";
    case PS_FORKED:
        return "this learner belongs to the parent process; attach after the fork";
    default:
        return "this learner has detached from its job; attach again";
    }
}

int ps_has_left(const struct ps_calls *calls)
{
    return __atomic_load_n(&calls->left, __ATOMIC_ACQUIRE) != 0;
}

void ps_own_calls(struct ps_calls *calls) { calls->process = this_process(); }

int ps_is_forked(const struct ps_calls *calls) { return calls->process != this_process(); }

int ps_enter(struct ps_calls *calls, enum ps_call kind)
{
    if (ps_is_forked(calls))
        return PS_FORKED;
    uint32_t *word = &calls->inside[kind], mine = ps_me(), holder = 0;
    while (!__atomic_compare_exchange_n(word, &holder, mine, 0, __ATOMIC_ACQUIRE,
                                        __ATOMIC_RELAXED)) {
        if (holder == mine)
            return ps_has_left(calls) ? PS_LEFT : PS_NESTED;
        if (holder && ps_thread_lives(holder))
            return ps_has_left(calls) ? PS_LEFT : PS_BUSY;
    }
    if (!ps_has_left(calls))
        return 0;
    ps_leave(calls, kind);
    return PS_LEFT;
}

void ps_leave(struct ps_calls *calls, enum ps_call kind)
{
    __atomic_store_n(&calls->inside[kind], 0, __ATOMIC_RELEASE);
}

/* Atomic, because a thread that is about to be refused reads it beside the one that writes it. */
void ps_set_claimer(struct ps_calls *calls, uint32_t thread)
{
    __atomic_store_n(&calls->claimer, thread, __ATOMIC_RELAXED);
}

int ps_others(const struct ps_calls *calls)
{
    const struct timespec nap = {0, NAP_NS};
    for (long waited = 0;; waited += NAP_NS) {
        uint32_t claimer = __atomic_load_n(&calls->claimer, __ATOMIC_RELAXED);
        if (!claimer || claimer == ps_me() || !ps_thread_lives(claimer))
            return 0;
        /* Python's join() returns a moment before the thread has ended. */
        if (waited >= ENDS_NS)
            return PS_OTHERS;
        nanosleep(&nap, NULL);
    }
}

int ps_check_claimed(const struct ps_calls *calls)
{
    if (__atomic_load_n(&calls->claimer, __ATOMIC_RELAXED) == ps_me())
        return 0;
    return ps_others(calls) ? PS_OTHERS : PS_UNCLAIMED;
}

void ps_shut(struct ps_calls *calls)
{
    const struct timespec nap = {0, NAP_NS};
    uint32_t *word = &calls->inside[PS_PUSHING], mine = ps_me(), holder = 0;
    if (__atomic_exchange_n(&calls->left, 1, __ATOMIC_SEQ_CST))
        return;
    while (!__atomic_compare_exchange_n(word, &holder, mine, 0, __ATOMIC_ACQUIRE,
                                        __ATOMIC_RELAXED)) {
        if (holder == mine)
            return;
        if (holder && ps_thread_lives(holder)) {
            nanosleep(&nap, NULL);
            holder = 0;
        }
    }
}
