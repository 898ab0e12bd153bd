/*
 * The fences of the real ring (native/ps_ring.c), instruction by instruction: each stands between a
 * side's store and its look at a word of the other side, which does the same. Without it the look
 * may come first, on every machine: a wake-up is lost, or a frame gets into a closed ring.
 *
 * Each function is run with a trap after each instruction (the trap flag of x86-64). Between the
 * first word's store and what must come after the fence, a full fence must be executed.
 *
 * Compile with -D_GNU_SOURCE, link with -Wl,--wrap=syscall. Print a line for each
 * function; the exit code counts those that lack their fence.
 */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <ucontext.h>

#include "ps_atomic.h"
#include "ps_ring.h"

enum { SLOT_BYTES = 4096 };
/* Changes the trap flag; the first and the last instruction keep the red zone. */
#define STEP(change)                                                                               \
    __asm__ volatile("lea -128(%%rsp), %%rsp; pushfq; " change ", (%%rsp); popfq; "                \
                     "lea 128(%%rsp), %%rsp" : : : "memory", "cc")

static struct ps_control *control;
static struct ps_ring *ring;
static uint32_t asleep, one = 1;

/* Until this word has the value nothing counts, and nothing any more once the second one moves. */
static const uint32_t *volatile first, *volatile second;
static volatile uint32_t value, before;
static volatile int stored, over, fenced;

static void on_trap(int number, siginfo_t *info, void *context)
{
    const greg_t *registers = ((const ucontext_t *)context)->uc_mcontext.gregs;
    const unsigned char *next = (const unsigned char *)registers[REG_RIP];
    int mfence = next[0] == 0x0f && next[1] == 0xae && next[2] == 0xf0, lock = next[0] == 0xf0;
    (void)number;
    (void)info;
    stored |= *first == value;
    over |= stored && second && *second != before;
    fenced |= stored && !over && (mfence || lock);
}

long __real_syscall(long number, ...);
long __wrap_syscall(long number, long a, long b, long c, long d, long e, long f);

/* A sleep ends at once, and what it was for is there. */
long __wrap_syscall(long number, long a, long b, long c, long d, long e, long f)
{
    if (number != SYS_futex && number != 449)
        return __real_syscall(number, a, b, c, d, e, f);
    asleep = 1;
    ring->tail[0].value = 1;
    return 0;
}

static void release(void) { ps_release((uint64_t)ring, 0, 1); }
static void hand_out(void) { ps_hand_out((uint64_t)ring, 0, 7); }
static void publish(void) { ps_publish(ring, control); }
static void push(void) { ps_publish_frame(ring, control, (struct ps_frame){.samples = 1}); }
static void wait(void) { ps_wait_applied(ring, control, 0, 3600000000000ull); }
static void ask(void) { ps_wait_grant(ring, control, 0, 0); }
static void sleep_on(void) { ps_shard_sleep((uint64_t)control, 0, 0, 0, 0, 0, 0, 1); }

static int lacks(const char *name, void (*run)(void), const uint32_t *word, uint32_t then,
                 const uint32_t *after)
{
    for (int again = 0; again < 2; again++) { /* the second time, all is loaded and bound */
        *control = (struct ps_control){.shards = 1};
        *ring = (struct ps_ring){.slots = 2, .slot_bytes = SLOT_BYTES};
        ring->slots_at = (sizeof *ring + 63) / 64 * 64;
        control->roster[0].wanted = ring->header.generation = 1;
        asleep = 0;
        first = word, value = then, second = after, before = after ? *after : 0;
        stored = over = fenced = 0;
        STEP("orq $0x100");
        run();
        STEP("andq $-0x101");
    }
    printf("%s %s\n", name, fenced ? "fenced" : stored ? "not fenced" : "stores nothing");
    return !fenced;
}

int main(void)
{
    struct sigaction how = {.sa_sigaction = on_trap, .sa_flags = SA_SIGINFO};
    sigaction(SIGTRAP, &how, NULL);
    control = aligned_alloc(4096, (sizeof *control + 4095) / 4096 * 4096);
    ring = aligned_alloc(4096, (sizeof *ring + 4 * SLOT_BYTES) / 4096 * 4096);
    int lacking = 0;
    lacking += lacks("ps_release", release, (uint32_t *)&ring->tail[0].value, 1, NULL);
    lacking += lacks("ps_hand_out", hand_out, &ring->work_head, 1, NULL);
    lacking += lacks("ps_publish", publish, (uint32_t *)&ring->head, 1, NULL);
    lacking += lacks("ps_publish_frame", push, &ring->publishing, 1, (uint32_t *)&ring->head);
    lacking += lacks("ps_wait_applied", wait, &ring->waits_slot, 1, &asleep);
    lacking += lacks("ps_wait_grant", ask, &ring->wants, PS_WANTS_TURN, NULL);
    lacking += lacks("ps_shard_sleep", sleep_on, (uint32_t *)&control->sleepers, 1, &asleep);
    lacking += lacks("ps_full_fence", ps_full_fence, &one, 1, NULL);
    return lacking;
}
