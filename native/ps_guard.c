/* See ps_guard.h. */
#define _GNU_SOURCE
#include "ps_guard.h"

#include <errno.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "ps_atomic.h"

/* The handler reads these in any thread, while another one may change them. The entry of the memory
 * that its own thread is using is the only one that nobody changes then. So an entry that changes
 * while it is read is another's, and is left out: half of one range and half of the next would seem
 * to cover what lies between. */
static struct entry {
    uint64_t changes; /* odd: it is being changed */
    uint64_t begin;   /* 0: free */
    uint64_t end, word, value;
} guards[PS_GUARDS];
static struct sigaction previous;

/* Whether the entry stood still while it was copied. */
static int copied(const struct entry *from, struct entry *to)
{
    uint64_t changes = ps_load_acquire(&from->changes);
    to->begin = ps_load_acquire(&from->begin);
    to->end = ps_load_acquire(&from->end);
    to->word = ps_load_acquire(&from->word);
    to->value = ps_load_acquire(&from->value);
    return !(changes & 1) && ps_load_acquire(&from->changes) == changes;
}

/* One thread at a time. */
static void change(struct entry *to, uint64_t begin, uint64_t end, uint64_t word, uint64_t value)
{
    __atomic_store_n(&to->changes, to->changes + 1, __ATOMIC_RELAXED);
    __atomic_thread_fence(__ATOMIC_RELEASE); /* a new word is seen with the odd number */
    __atomic_store_n(&to->begin, begin, __ATOMIC_RELAXED);
    __atomic_store_n(&to->end, end, __ATOMIC_RELAXED);
    __atomic_store_n(&to->word, word, __ATOMIC_RELAXED);
    __atomic_store_n(&to->value, value, __ATOMIC_RELAXED);
    ps_store_release(&to->changes, to->changes + 1);
}

static int replaced(uint64_t at)
{
    struct entry one;
    for (int i = 0; i < PS_GUARDS; i++) {
        if (!copied(&guards[i], &one) || !one.begin || at < one.begin || at >= one.end)
            continue;
        ps_store_release((uint64_t *)one.word, one.value);
        return mmap((void *)one.begin, one.end - one.begin, PROT_READ | PROT_WRITE,
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
            change(&guards[i], address, address + bytes, word, value);
            return 0;
        }
    return -ENOSPC;
}

void ps_unguard(uint64_t address)
{
    for (int i = 0; i < PS_GUARDS; i++)
        if (guards[i].begin == address)
            change(&guards[i], 0, 0, 0, 0);
}

static const char STORED[] =
    "gadei-ps: the script has written to a parameter in place, and the weights of a job can only be "
    "read here: write them with optimizer.assign({name: values}), or change them before "
    "Optimizer(model), or use Optimizer(model, view=False): its step() gives the "
    "job what was written\n";
static struct { uint64_t begin, end; } read_only[PS_READ_ONLY]; /* end 0: free */
static struct sigaction before_stores;

static void on_segmentation_fault(int number, siginfo_t *info, void *context)
{
    (void)context;
    int error = errno, sent = info->si_code <= 0;
    uint64_t at = (uint64_t)info->si_addr;
    for (int i = 0; !sent && i < PS_READ_ONLY; i++)
        if (at >= ps_load_acquire(&read_only[i].begin) && at < ps_load_acquire(&read_only[i].end)) {
            ssize_t written = write(STDERR_FILENO, STORED, sizeof STORED - 1);
            (void)written;
            break;
        }
    sigaction(number, &before_stores, NULL); /* the access is repeated, or the signal sent again */
    memset(&before_stores, 0, sizeof before_stores);
    if (sent)
        raise(number);
    errno = error;
}

void ps_tell_of_stores(uint64_t address, uint64_t bytes)
{
    struct sigaction ours, now;
    int free = -1;
    for (int i = 0; i < PS_READ_ONLY; i++) {
        if (read_only[i].end && read_only[i].begin == address) {
            ps_store_release(&read_only[i].end, bytes ? address + bytes : 0);
            return;
        }
        if (!read_only[i].end && free < 0)
            free = i;
    }
    if (!bytes || free < 0 || sigaction(SIGSEGV, NULL, &now))
        return;
    ps_store_release(&read_only[free].begin, address);
    ps_store_release(&read_only[free].end, address + bytes);
    if (now.sa_sigaction == on_segmentation_fault)
        return;
    before_stores = now;
    memset(&ours, 0, sizeof ours);
    ours.sa_sigaction = on_segmentation_fault;
    ours.sa_flags = SA_SIGINFO | SA_ONSTACK; /* a stack may have overflowed */
    sigemptyset(&ours.sa_mask);
    sigaction(SIGSEGV, &ours, NULL);
}
