/*
 * Runs the code of a shard and stops it after each instruction, to see what SIGKILL would leave.
 *
 * The job's segments are mapped twice, one after the other without gaps. The shard's code uses the
 * `guarded` mapping, which it cannot write; this file uses the `open` one. A store of the shard
 * faults, and is done in the open mapping with a trap behind it. There is a moment between two
 * instructions, at which SIGKILL may come, and the segments' content is the image that it leaves.
 * An instruction that stores nothing leaves the image before it, so it needs no trap. With `every`
 * the processor's trap flag is set all the time, and each instruction is stopped after and counted.
 *
 * An image that was not seen before waits in a queue. next_images() puts the oldest one back into
 * the segments, gives the shard new private memory, as a process that is started has, and runs it
 * until it is about to sleep. New images of that run wait in the queue, too. When the queue is
 * empty, every death is recovered from, at any instruction, also of any number of recoveries.
 *
 * x86-64 only. One thread; the signal handlers are set only while it runs the shard.
 */
#include "steps_operand.h"

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include "steps_images.h"

#define TRAP_FLAG 0x100
#define MOST_STORES 400000 /* of one run; more means that it does not come to rest */
#define MOST_PLACES 4096   /* a power of 2: instructions that store */
#define COPY 32            /* bytes for the copy of one */

/* An instruction that stores, and a copy of it with a trap behind it. */
static struct place {
    const uint8_t *at;
    struct operand operand;
    uint8_t *copy;
} places[MOST_PLACES];
static uint8_t *copies;
static int place_count;

/* The store that is being done. */
static struct {
    const struct place *place;
    int in_copy, in_guarded; /* how; else in the open mapping, with the trap flag set */
    greg_t base;
    uint64_t at; /* offset */
} store;
static volatile sig_atomic_t running, starting;
static int every, lost;
static uint64_t stores, die_at, trail_room, *trail;

static const struct place *place_of(const uint8_t *at)
{
    uint64_t number = mixed((uint64_t)at) & (MOST_PLACES - 1);
    for (; places[number].at; number = (number + 1) & (MOST_PLACES - 1))
        if (places[number].at == at)
            return &places[number];
    if (2 * place_count > MOST_PLACES)
        siglongjmp(out, TOO_MUCH);
    struct place *one = &places[number];
    one->at = at;
    one->operand = operand_of(at);
    one->copy = copies + COPY * place_count++;
    memcpy(one->copy, at, one->operand.length);
    one->copy[one->operand.length] = 0xcc; /* int3 */
    return one;
}

static void protect(uint64_t page, int how)
{
    if (mprotect(it.guarded + page * PAGE, PAGE, how))
        _exit(97);
}

/* A store: lets it be done, with a trap behind it. */
static void on_fault(int number, siginfo_t *info, void *context)
{
    (void)number;
    greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
    uint8_t *at = info->si_addr;
    if (!running || store.place || at < it.guarded || at + LINE > it.guarded + it.bytes)
        siglongjmp(out, CRASHED);
    store.at = (uint64_t)(at - it.guarded);
    uint64_t page = store.at / PAGE;
    touch(page);
    touch((store.at + LINE - 1) / PAGE);
    store.place = place_of((const uint8_t *)registers[REG_RIP]);
    const struct operand *operand = &store.place->operand;
    if (operand->base < 0) {
        store.in_guarded = 1;
        protect(page, PROT_READ | PROT_WRITE);
        protect((store.at + LINE - 1) / PAGE, PROT_READ | PROT_WRITE);
        registers[REG_EFL] |= TRAP_FLAG;
        return;
    }
    store.base = registers[operand->base];
    registers[operand->base] += it.open - it.guarded;
    store.in_copy = operand->length && !every;
    if (store.in_copy)
        registers[REG_RIP] = (greg_t)store.place->copy;
    else
        registers[REG_EFL] |= TRAP_FLAG;
}

/* The registers are as if the store had been done where it belongs. */
static void end_store(greg_t *registers)
{
    const struct operand *operand = &store.place->operand;
    if (store.in_copy)
        registers[REG_RIP] = (greg_t)store.place->at + operand->length;
    if (store.in_guarded) {
        protect(store.at / PAGE, PROT_READ);
        protect((store.at + LINE - 1) / PAGE, PROT_READ);
    } else if (operand->moves) {
        registers[operand->base] -= it.open - it.guarded;
    } else if (registers[operand->base] == store.base + (it.open - it.guarded)) {
        registers[operand->base] = store.base;
    }
    store.place = NULL;
    store.in_guarded = store.in_copy = 0;
}

static void on_trap(int number, siginfo_t *info, void *context)
{
    (void)number, (void)info;
    greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
    if (running && every)
        registers[REG_EFL] |= TRAP_FLAG;
    else
        registers[REG_EFL] &= ~TRAP_FLAG;
    if (starting || !running) {
        starting = 0;
        return;
    }
    told.instructions++;
    if (!store.place)
        return;
    uint64_t first = store.at / LINE, end = (store.at + LINE - 1) / LINE + 1;
    int changed = look(first * LINE / 8, end * LINE / 8);
    end_store(registers);
    told.stores++;
    if (++stores > MOST_STORES)
        siglongjmp(out, ENDLESS);
    if (changed && stores <= trail_room)
        memcpy(trail + 2 * stores - 2, hash, sizeof hash);
    if (die_at && stores == die_at)
        kill(getpid(), SIGKILL);
    if (changed && !lost && is_new())
        keep_image(stores);
    if (word_of(it.open, it.sleepers) & it.sleeper) { /* it is about to sleep */
        *it.quit = 1;
        (*(uint32_t *)(it.open + it.bell))++; /* it will not */
    }
}

static void begin_steps(void)
{
    running = starting = 1;
    raise(SIGTRAP);
}

static int64_t call(entry function)
{
    int64_t result = 0;
    void *error = NULL;
    if (function(&result, &error, NULL, NULL, 1, (int64_t)it.part_bytes, it.part, 1,
                 (int64_t)it.part_bytes))
        siglongjmp(out, RAISED);
    return result;
}

/* Whether a server that began to serve with this memory and these private words has come to rest
 * before: then this one does, because it reads nothing else. */
static int is_known(uint64_t *key)
{
    const uint64_t *words = it.part;
    identity(key);
    for (uint64_t i = 0; i < it.part_bytes / 8; i++) {
        key[0] = (key[0] ^ words[i]) * 0x9e3779b97f4a7c15ull;
        key[0] ^= key[0] >> 29;
        key[1] = (key[1] + words[i]) * 0xbf58476d1ce4e5b9ull;
        key[1] ^= key[1] >> 31;
    }
    return has(&served, key);
}

/* The life of a server's thread from its lease on (shard.stand_by), until it would sleep. */
static int live(void)
{
    struct sigaction old_fault, old_trap;
    struct sigaction fault = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO};
    struct sigaction trap = {.sa_sigaction = on_trap, .sa_flags = SA_SIGINFO};
    sigaction(SIGSEGV, &fault, &old_fault);
    sigaction(SIGTRAP, &trap, &old_trap);
    for (int i = 0; i < 2; i++)
        memcpy(it.private[i].at, it.private[i].fresh, it.private[i].bytes);
    if (lost)
        *it.broken = it.generation;
    stores = told.in_hand = 0;
    store.place = NULL;
    store.in_guarded = store.in_copy = 0;
    told.runs++;
    uint64_t key[2];
    int how = sigsetjmp(out, 1);
    if (!how) {
        begin_steps();
        *(volatile uint32_t *)(it.guarded + it.obeyed) = 0;
        if (!call(it.can_recover))
            siglongjmp(out, NOT_READY);
        told.in_hand = (uint64_t)call(it.recover);
        running = 0;
        volatile int known = !lost && !die_at && is_known(key);
        if (!known) {
            begin_steps();
            call(it.serve);
            running = 0;
        }
        how = depth && !lost ? compare(!known) : RESTED;
        if (how == RESTED && !lost)
            add(&served, key);
    }
    running = 0;
    if (store.in_guarded) {
        protect(store.at / PAGE, PROT_READ);
        protect((store.at + LINE - 1) / PAGE, PROT_READ);
    }
    sigaction(SIGSEGV, &old_fault, NULL);
    sigaction(SIGTRAP, &old_trap, NULL);
    return how;
}

/* -- what Python calls ----------------------------------------------------------------------- */

/* Maps shared memory again, one range after the other. */
uint8_t *map_again(uint8_t *const *ranges, const uint64_t *sizes, int count)
{
    uint64_t bytes = 0;
    for (int i = 0; i < count; i++)
        bytes += sizes[i];
    uint8_t *at = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED)
        return NULL;
    for (uint64_t i = 0, done = 0; i < (uint64_t)count; done += sizes[i++])
        if (mremap(ranges[i], 0, sizes[i], MREMAP_MAYMOVE | MREMAP_FIXED, at + done) == MAP_FAILED)
            return NULL;
    return at;
}

int unmap(uint8_t *at, uint64_t bytes) { return munmap(at, bytes); }

/* Begins a count from what the segments hold now. */
int begin(const struct setting *setting)
{
    while (taken < queued)
        free(queue[taken++].data);
    drop(&seen);
    drop(&served);
    free(is_touched);
    queued = taken = touched_count = 0;
    it = *setting;
    memset(&told, 0, sizeof told);
    memcpy(it.base, it.open, it.bytes);
    memcpy(it.shadow, it.open, it.bytes);
    is_touched = calloc(it.bytes / PAGE, 1);
    if (!copies) {
        copies = mmap(NULL, MOST_PLACES * COPY, PROT_READ | PROT_WRITE | PROT_EXEC,
                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (copies == MAP_FAILED)
            return -1;
    }
    return is_touched && !mprotect(it.guarded, it.bytes, PROT_READ) ? 0 : -1;
}

/* The undisturbed run; where it comes to rest is right. all: every instruction is counted. die:
 * after that many stores the process gets SIGKILL; 0: never. hashes: room for those of `count`
 * images, by store. */
int first_run(int all, uint64_t die, uint64_t *hashes, uint64_t count)
{
    every = all;
    die_at = die;
    depth = 0;
    trail = hashes;
    trail_room = count;
    put_back(NULL);
    if (seen.count == 0)
        add(&seen, hash); /* the base is known */
    int how = live();
    die_at = trail_room = 0;
    if (how == RESTED && !is_woken())
        how = DIFFERENT;
    memcpy(it.final, it.base, it.bytes);
    for (uint64_t i = 0; i < touched_count; i++)
        memcpy(it.final + touched[i] * (uint64_t)PAGE, it.open + touched[i] * (uint64_t)PAGE, PAGE);
    return how;
}

static int next_image(void)
{
    if (taken == queued)
        return NO_IMAGE;
    struct image one = queue[taken++];
    depth = told.depth = one.depth;
    told.ordinal = one.ordinal;
    put_back(&one);
    int how = live();
    told.wrong += how != RESTED;
    free(one.data);
    return how;
}

/* Recovers the oldest `count` images of the queue; stops at a wrong one. */
int next_images(uint64_t count)
{
    int how = RESTED;
    every = 0;
    while (count-- && how == RESTED)
        how = next_image();
    return how;
}

/* Recovers the oldest image of the queue; zeros are in the place of the first learner's ring. */
int next_without_ring(void)
{
    if (taken == queued)
        return NO_IMAGE;
    struct image one = queue[taken++];
    for (uint64_t page = it.ring / PAGE; page < (it.ring + it.ring_bytes) / PAGE; page++)
        touch(page);
    touch(it.damaged / PAGE);
    every = 0;
    told.ordinal = one.ordinal;
    depth = told.depth = one.depth;
    put_back(&one);
    memset(it.open + it.ring, 0, it.ring_bytes);
    memset(it.shadow + it.ring, 0, it.ring_bytes);
    *(uint64_t *)(it.open + it.damaged) = it.generation;
    lost = 1;
    int how = live();
    lost = 0;
    free(one.data);
    return how;
}

const struct told *figures(void) { return &told; }

/* The hash of what the segments hold now. */
void hash_now(uint64_t *to)
{
    hash[0] = hash[1] = 1;
    for (uint64_t at = 0; at < it.bytes; at += 8)
        leave_out(at, 1);
    memcpy(to, hash, sizeof hash);
}
