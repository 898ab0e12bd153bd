/* Sees what other processes store into words of shared memory. A shared library for traces.py.
 *
 * A sample is the value of each word; it is kept if it differs from the one before. */
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/user.h>
#include <sys/wait.h>

#define WORDS 24
#define REGISTERS 4

struct word {
    uint64_t address; /* in this process */
    uint64_t bytes;   /* 4 or 8 */
};

struct samples {
    uint64_t *values; /* room * count */
    int64_t room, kept;
    const struct word *words;
    int64_t count;
};

static void look(const struct samples *samples, uint64_t *values)
{
    for (int64_t i = 0; i < samples->count; i++) {
        const struct word *word = &samples->words[i];
        if (word->bytes == 4)
            values[i] = __atomic_load_n((const uint32_t *)word->address, __ATOMIC_ACQUIRE);
        else
            values[i] = __atomic_load_n((const uint64_t *)word->address, __ATOMIC_ACQUIRE);
    }
}

/* 0: there is no room. */
static int keep(struct samples *samples, const uint64_t *values)
{
    size_t bytes = (size_t)samples->count * sizeof *values;
    uint64_t *next = samples->values + samples->kept * samples->count;
    if (samples->kept && !memcmp(next - samples->count, values, bytes))
        return 1;
    if (samples->kept == samples->room)
        return 0;
    memcpy(next, values, bytes);
    samples->kept++;
    return 1;
}

/* What is there now. */
int sample(struct samples *samples)
{
    uint64_t values[WORDS];
    look(samples, values);
    return keep(samples, values);
}

/* Has the processor stop the traced process, which is stopped, after each of its stores to one of
 * the first words: as many as the processor can watch. Returns how many, 0 on another machine. */
int guard(const struct samples *samples, int pid)
{
    int64_t guarded = 0;
#ifdef __x86_64__
    unsigned long control = 0;
    const size_t registers = offsetof(struct user, u_debugreg);
    for (; guarded < samples->count && guarded < REGISTERS; guarded++) {
        unsigned long length = samples->words[guarded].bytes == 8 ? 2 : 3;
        control |= 1ul << 2 * guarded | (1ul | length << 2) << (16 + 4 * guarded);
        if (ptrace(PTRACE_POKEUSER, pid, registers + 8 * (size_t)guarded,
                   samples->words[guarded].address))
            return 0;
    }
    if (ptrace(PTRACE_POKEUSER, pid, registers + 8 * 7, control))
        return 0;
#else
    (void)samples, (void)pid;
#endif
    return (int)guarded;
}

/* Lets a traced process of one thread, which is stopped, continue until another sample is kept.
 * guarded: it is stopped after its stores to the first words; else it goes by single instructions.
 * most: no more than so many of these; 0: no limit. Returns 0 if the process ends, or there is no
 * room. */
int go_on(struct samples *samples, int pid, int guarded, int64_t most)
{
    int64_t before = samples->kept, done = 0;
    int number = 0, status;
    while (samples->kept == before && (!most || done++ < most)) {
        if (ptrace(guarded && !most ? PTRACE_CONT : PTRACE_SINGLESTEP, pid, 0, number) ||
            waitpid(pid, &status, __WALL) < 0 || !WIFSTOPPED(status))
            return 0;
        number = WSTOPSIG(status) == SIGTRAP ? 0 : WSTOPSIG(status); /* others are passed on */
        if (!sample(samples))
            return 0;
    }
    return 1;
}

/* Looks until *stop, without a pause. A sample is kept if a second look sees the same, so it is what
 * was there at one instant. Returns 0 if there is no room. */
int watch(struct samples *samples, const uint32_t *stop)
{
    uint64_t before[WORDS], values[WORDS];
    size_t bytes = (size_t)samples->count * sizeof *values;
    look(samples, before);
    while (!__atomic_load_n(stop, __ATOMIC_ACQUIRE)) {
        look(samples, values);
        if (memcmp(before, values, bytes))
            memcpy(before, values, bytes);
        else if (!keep(samples, values))
            return 0;
    }
    return 1;
}
