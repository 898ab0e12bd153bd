/* See ps_guard.h. */
#define _GNU_SOURCE
#include "ps_guard.h"

#include <errno.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>

#include "ps_atomic.h"

/* The handler reads these in any thread, so `begin` is stored last. It finds the entry of memory
 * that its thread is using, which nobody changes meanwhile. */
static struct {
    uint64_t begin; /* 0: free */
    uint64_t end, word, value;
} guards[PS_GUARDS];
static struct sigaction previous;

static int replaced(uint64_t at)
{
    for (int i = 0; i < PS_GUARDS; i++) {
        uint64_t begin = ps_load_acquire(&guards[i].begin);
        if (!begin || at < begin || at >= guards[i].end)
            continue;
        ps_store_release((uint64_t *)guards[i].word, guards[i].value);
        return mmap((void *)begin, guards[i].end - begin, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0) != MAP_FAILED;
    }
    return 0;
}

static void on_bus_error(int number, siginfo_t *info, void *context)
{
    (void)context;
    int error = errno;
    int sent = info->si_code <= 0; /* by a process, not by an access */
    if (sent || !replaced((uint64_t)info->si_addr)) {
        /* The handler before gets it: the access is repeated, or the signal sent again. */
        sigaction(number, &previous, NULL);
        memset(&previous, 0, sizeof previous); /* SIG_DFL, should that one come back to us */
        if (sent)
            raise(number);
    }
    errno = error;
}

int ps_guard(uint64_t address, uint64_t bytes, uint64_t word, uint64_t value)
{
    struct sigaction ours, now;
    if (sigaction(SIGBUS, NULL, &now))
        return -errno;
    if (now.sa_sigaction != on_bus_error) {
        previous = now;
        memset(&ours, 0, sizeof ours);
        ours.sa_sigaction = on_bus_error;
        ours.sa_flags = SA_SIGINFO;
        sigemptyset(&ours.sa_mask);
        if (sigaction(SIGBUS, &ours, NULL))
            return -errno;
    }
    for (int i = 0; i < PS_GUARDS; i++)
        if (!guards[i].begin) {
            guards[i].end = address + bytes;
            guards[i].word = word;
            guards[i].value = value;
            ps_store_release(&guards[i].begin, address);
            return 0;
        }
    return -ENOSPC;
}

void ps_unguard(uint64_t address)
{
    for (int i = 0; i < PS_GUARDS; i++)
        if (guards[i].begin == address)
            ps_store_release(&guards[i].begin, 0);
}
