/*
 * While the handler looks for the memory that its thread was using, after its load number argv[1],
 * another thread drops a guarded range below and guards one above. What lies between, and the new
 * range, are not part of this fault. Prints how many loads the handler made.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "ps_atomic.h"

static _Thread_local volatile int faulting;
static volatile int loads, chosen, stage; /* stage 1: the other thread's turn; 2: it is done */

static uint64_t hooked(const uint64_t *word)
{
    uint64_t value = ps_load_acquire(word);
    if (faulting && loads++ == chosen) {
        __atomic_store_n(&stage, 1, __ATOMIC_SEQ_CST);
        while (__atomic_load_n(&stage, __ATOMIC_SEQ_CST) != 2)
            sched_yield();
    }
    return value;
}
#define ps_load_acquire hooked
#include "ps_guard.c"
#undef ps_load_acquire

#define PAGE 4096
static char *low, *high;
static uint64_t words[3];

static void *other(void *unused)
{
    while (__atomic_load_n(&stage, __ATOMIC_SEQ_CST) != 1)
        sched_yield();
    ps_unguard((uint64_t)low);
    ps_guard((uint64_t)high, PAGE, (uint64_t)&words[2], 1);
    __atomic_store_n(&stage, 2, __ATOMIC_SEQ_CST);
    return unused;
}

int main(int count, char **arguments)
{
    pthread_t thread;
    int file = memfd_create("ring", 0);
    char *all = mmap(0, 16 * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    char *weights = all + 5 * PAGE;
    if (count != 2 || file < 0 || all == MAP_FAILED || ftruncate(file, PAGE))
        return 2;
    chosen = atoi(arguments[1]);
    low = all;
    high = all + 10 * PAGE;
    char *ring = mmap(all + 3 * PAGE, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0);
    strcpy(weights, "weights");
    strcpy(high, "high");
    ps_guard((uint64_t)low, PAGE, (uint64_t)&words[0], 1);
    ps_guard((uint64_t)ring, PAGE, (uint64_t)&words[1], 1);
    if (pthread_create(&thread, 0, other, 0) || ftruncate(file, 0))
        return 2;
    faulting = 1;
    char zero = *(volatile char *)ring;
    faulting = 0;
    if (loads <= chosen)
        __atomic_store_n(&stage, 1, __ATOMIC_SEQ_CST); /* the other thread ends, too late */
    pthread_join(thread, 0);
    printf("%d\n", loads);
    return zero || words[0] || words[1] != 1 || words[2] || strcmp(weights, "weights") ||
           strcmp(high, "high");
}
