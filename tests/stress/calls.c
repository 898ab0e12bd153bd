/*
 * The words that hold a learner to one thread (native/ps_calls.c), under ThreadSanitizer.
 *
 * Threads count in plain memory while they are inside. If two were inside at once, or if a thread
 * did not see what the one before it has written, the tool would say so. One more thread ends while
 * it is inside, which holds up nobody. At the end the main thread shuts, and counts on alone.
 *
 * calls SECONDS THREADS
 */
#include "ps_calls.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#define MOST 16

static struct ps_calls calls;
static unsigned long pushed; /* by the thread that is inside */
static unsigned rounds[MOST];

static void fail(const char *what)
{
    fprintf(stderr, "FAILED: %s\n", what);
    exit(1);
}

static void *push(void *mine)
{
    for (;;) {
        switch (ps_enter(&calls, PS_PUSHING)) {
        case PS_BUSY:
            continue;
        case PS_LEFT:
            return NULL;
        case 0:
            break;
        default:
            fail("a thread is inside that has not entered");
        }
        if (ps_others(&calls))
            fail("a thread that has left has a slot claimed");
        ps_set_claimer(&calls, ps_me());
        if (ps_enter(&calls, PS_PUSHING) == 0)
            fail("a thread has entered twice");
        pushed++;
        if (ps_check_claimed(&calls))
            fail("the slot is not that of the thread which has claimed it");
        ps_set_claimer(&calls, 0);
        ps_leave(&calls, PS_PUSHING);
        __atomic_add_fetch((unsigned *)mine, 1, __ATOMIC_RELAXED);
    }
}

static void *end_inside(void *unused)
{
    while (ps_enter(&calls, PS_PUSHING))
        ;
    return unused;
}

int main(int argc, char **argv)
{
    double seconds = argc > 1 ? atof(argv[1]) : 1.0;
    int count = argc > 2 ? atoi(argv[2]) : 3;
    pthread_t dying, threads[MOST];
    ps_own_calls(&calls);
    if (pthread_create(&dying, NULL, end_inside, NULL) || pthread_join(dying, NULL))
        fail("no thread");
    if (count > MOST)
        count = MOST;
    for (int i = 0; i < count; i++)
        if (pthread_create(&threads[i], NULL, push, &rounds[i]))
            fail("no thread");
    struct timespec pause = {(time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9)};
    nanosleep(&pause, NULL);
    for (int i = 0; i < count; i++) /* each has had its turn */
        while (__atomic_load_n(&rounds[i], __ATOMIC_RELAXED) < 10)
            nanosleep(&(struct timespec){0, 1000000}, NULL);
    ps_shut(&calls);
    unsigned long before = ++pushed; /* nobody is inside */
    if (!ps_has_left(&calls))
        fail("it has not left");
    for (int i = 0; i < count; i++)
        pthread_join(threads[i], NULL);
    if (pushed != before)
        fail("a thread has pushed after the learner had left");
    printf("%lu pushes of %d threads, none after the end\n", before - 1, count);
}
