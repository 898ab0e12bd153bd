/*
 * Fuzzes how a learner in C attaches: any reply of the watchdog, and any bytes in the heads of the
 * three segments. What is refused must be refused cleanly; with what is accepted, every function of
 * gadei.h must stay inside the segments.
 *
 * The files of the client are compiled in here, so that segments come from memory that the
 * sanitizer guards to the byte: shm_open, fstat, mmap, munmap and close are replaced, and the clock
 * of waits. The socket is real, a pair.
 *
 * The input's first byte chooses: 0 a good reply and steps that change segments, attach and use the
 * learner; 1 a reply; 2 raw bytes where a reply is due.
 */
#define _GNU_SOURCE
#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <poll.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "input.h"
#include "ps_layout.h"
#include "ps_atomic.h"

enum { PARTS = 3, FAKE_FD = 100000, ELEMENTS = 2 * PS_CHUNK + 64, SLOTS = 2, SHARDS = 3, ROW = 3 };
#define GENERATION 11
static const char *const part_names[PARTS] = {"/c", "/w", "/r"};

/* A segment as it is for this input. */
static struct part {
    unsigned char *bytes, *good;
    size_t size, good_size;
    void *mapped;
} parts[PARTS];

static int fuzz_shm_open(const char *name, int flags, mode_t mode)
{
    (void)flags;
    (void)mode;
    for (int i = 0; i < PARTS; i++)
        if (!strcmp(name, part_names[i]))
            return FAKE_FD + i;
    errno = ENOENT;
    return -1;
}

static int fuzz_fstat(int fd, struct stat *status)
{
    assert(fd >= FAKE_FD && fd < FAKE_FD + PARTS);
    *status = (struct stat){.st_size = (off_t)parts[fd - FAKE_FD].size,
                            .st_mode = S_IFREG | 0600, .st_uid = geteuid(), .st_nlink = 1};
    return 0;
}

/* A copy of exactly so many bytes, page-aligned: one byte beyond is seen. */
static void *fuzz_mmap(void *at, size_t bytes, int protection, int flags, int fd, off_t offset)
{
    (void)at;
    (void)protection;
    (void)flags;
    (void)offset;
    void *memory;
    assert(fd >= FAKE_FD && fd < FAKE_FD + PARTS && bytes == parts[fd - FAKE_FD].size);
    if (posix_memalign(&memory, 4096, bytes))
        return MAP_FAILED;
    parts[fd - FAKE_FD].mapped = memory;
    return memcpy(memory, parts[fd - FAKE_FD].bytes, bytes);
}

static int fuzz_munmap(void *at, size_t bytes)
{
    (void)bytes;
    for (int i = 0; i < PARTS; i++)
        if (parts[i].mapped == at)
            parts[i].mapped = NULL;
    free(at);
    return 0;
}

/* No watchdog comes back: what waits for one waits in a time of its own, which passes at once. */
static uint64_t waited_ns;

static int fuzz_nanosleep(const struct timespec *nap, struct timespec *left)
{
    (void)nap;
    (void)left;
    waited_ns += 1000000000ull;
    return 0;
}

static uint64_t fuzz_now_ns(void) { return ps_now_ns() + waited_ns; }

static int fuzz_close(int fd) { return fd >= FAKE_FD ? 0 : close(fd); }

#define shm_open fuzz_shm_open
#define fstat(fd, status) fuzz_fstat(fd, status)
#define mmap fuzz_mmap
#define munmap fuzz_munmap
#define close fuzz_close
#define nanosleep fuzz_nanosleep
#define ps_now_ns fuzz_now_ns
#include "gadei_attach.c"
#include "gadei_control.c"
#include "gadei_error.c"
#include "gadei_pull.c"
#include "gadei_push.c"
#include "gadei_segments.c"
#include "gadei_wait.c"
#include "gadei_work.c"
#include "ps_pull.c"
#undef close

/* -- segments as they should be ---------------------------------------------------------------- */

static void *make_part(int number, enum ps_kind kind, size_t bytes)
{
    struct part *part = &parts[number];
    part->good_size = bytes;
    part->good = calloc(1, bytes);
    part->bytes = malloc(bytes);
    assert(part->good && part->bytes);
    *(struct ps_header *)(void *)part->good =
        (struct ps_header){.magic = PS_MAGIC, .layout_version = PS_LAYOUT_VERSION,
                           .kind = (uint32_t)kind, .bytes = bytes};
    return part->good;
}

static void make_parts(void)
{
    struct ps_control *control = make_part(0, PS_CONTROL, sizeof *control);
    control->build = PS_BUILD;
    control->phase = PS_PHASE_SERVING;
    control->work = PS_WORKING;
    control->shards = SHARDS;
    control->roster[ROW].wanted = GENERATION;
    control->roster[ROW].grant = PS_UNBOUNDED;
    struct ps_weights *weights = make_part(1, PS_WEIGHTS, 4096 + ELEMENTS * sizeof(float));
    weights->tensors = 2;
    weights->table_at = sizeof *weights;
    weights->data_at = 4096;
    weights->elements = weights->parameters = weights->values = weights->words = ELEMENTS;
    weights->trained = 2;
    struct ps_tensor *table = (struct ps_tensor *)(void *)((char *)weights + weights->table_at);
    table[0] = (struct ps_tensor){.name = "w", .dtype = "F32", .role = PS_PARAMETER, .dims = 2,
                                  .shape = {2, PS_CHUNK}, .start = 0, .count = 2 * PS_CHUNK};
    table[1] = (struct ps_tensor){.name = "b", .dtype = "F32", .role = PS_PARAMETER, .dims = 1, .shape = {64},
                                  .start = 2 * PS_CHUNK, .count = 64};
    const uint64_t slots_at = (sizeof(struct ps_ring) + 63) / 64 * 64;
    /* All tensors with their blocks, and the numbers of the two rows of w. */
    const uint64_t capacity = ELEMENTS * sizeof(float) + 64 + 2 * 64 + 64;
    const uint64_t slot_bytes = PS_PAYLOAD_AT + capacity;
    struct ps_ring *ring = make_part(2, PS_RING, slots_at + SLOTS * slot_bytes);
    ring->header.index = ROW;
    ring->header.generation = GENERATION;
    ring->slots = SLOTS;
    ring->shards = SHARDS;
    ring->slot_bytes = slot_bytes;
    ring->slots_at = slots_at;
    ring->capacity = capacity;
}

static void change(struct input *in)
{
    struct part *part = &parts[next(in, 1) % PARTS];
    if (next(in, 1) % 16) {
        scribble(in, part->bytes, part->good_size, 32);
        return;
    }
    part->size = 1 + next(in, 4) % part->good_size; /* another size, of which the header knows */
    if (part->size >= sizeof(struct ps_header))
        ((struct ps_header *)(void *)part->bytes)->bytes = part->size;
}

/* -- the learner ------------------------------------------------------------------------------- */

/* What server and watchdog may write at any time; not the geometry, which is written once. */
static void others_write(struct input *in, gadei_learner *learner)
{
    struct ps_control *control = learner->control_map.at;
    struct ps_ring *ring = learner->ring_map.at;
    uint32_t which = (uint32_t)next(in, 1) % 12, shard = (uint32_t)next(in, 1) % PS_MAX_SHARDS;
    uint64_t value = next(in, 8);
    switch (which) {
    case 0: control->stop = (uint32_t)value % 3; break;
    case 1: control->phase = (uint32_t)value % 6; break;
    case 2: control->work = (uint32_t)value % 3; break;
    case 3: control->version = value; break;
    case 4: control->shard[shard].sequence = value; break;
    case 5: control->roster[ROW].wanted = value; break;
    case 6: control->roster[ROW].grant = value; break;
    case 7:
        control->lease_pid = value & 1 ? getpid() : (int32_t)value;
        control->lease_start = value;
        break;
    case 8: ring->tail[shard].value = value; break;
    case 9: ring->work_head = (uint32_t)value; break;
    case 10: ring->work_items[shard % PS_AHEAD] = value; break;
    default: ring->head = value; /* it is the learner's own, but its program may be astray */
    }
}

static void use(struct input *in, gadei_learner *learner)
{
    const uint64_t elements = gadei_elements(learner);
    float *values = calloc(elements ? elements : 1, sizeof *values);
    uint32_t count, epoch, index;
    const struct gadei_tensor *tensors = gadei_tensors(learner, &count);
    assert(values);
    for (uint32_t i = 0; i < count; i++) {
        assert(tensors[i].count <= elements && tensors[i].start <= elements - tensors[i].count);
        assert(tensors[i].dims <= GADEI_MAX_DIMS);
        assert(gadei_find(learner, tensors[i].name) <= (int)i);
    }
    while (in->left)
        switch (next(in, 1) % 15) {
        case 0: gadei_pull(learner, values); break;
        case 1: gadei_pull_consistent(learner, values, 0); break;
        case 2: gadei_set_wire(learner, (uint32_t)next(in, 1) % 5); break;
        case 3: gadei_wait_turn(learner, 0); break;
        case 4: gadei_claim(learner, 0); break;
        case 5:
            index = (uint32_t)next(in, 1);
            gadei_write(learner, index, values + (index < count ? tensors[index].start : 0));
            break;
        case 6: gadei_publish(learner, 0.5, 1, 1.0f); break;
        case 7: gadei_push(learner, values, 0.5, 1, 0); break;
        case 8: gadei_wait_applied(learner, 0); break;
        case 9: gadei_take_batch(learner, &epoch, &index, 0); break;
        case 10: gadei_set_work(learner, 1, 1, next(in, 8)); break;
        case 11: gadei_claim_rows(learner, 0); break;
        case 12: {
            const int64_t rows[3] = {(int8_t)next(in, 1), (int8_t)next(in, 1), 0};
            index = (uint32_t)next(in, 1);
            uint64_t row = index < count && tensors[index].dims && tensors[index].shape[0]
                               ? tensors[index].count / tensors[index].shape[0]
                               : 1;
            float *some = calloc(3 * row, sizeof *some);
            assert(some);
            gadei_write_rows(learner, index, rows, some, next(in, 1) % 4);
            free(some);
            break;
        }
        case 13: assert(gadei_find(learner, "no such tensor") < 0 || count); break;
        default: others_write(in, learner);
        }
    free(values);
}

static void say(int peer, const void *bytes, size_t count)
{
    assert(write(peer, bytes, count) == (ssize_t)count);
}

static void reply(int peer, const void *text, size_t count)
{
    const unsigned char head[4] = {(unsigned char)(count >> 24), (unsigned char)(count >> 16),
                                   (unsigned char)(count >> 8), (unsigned char)count};
    say(peer, head, 4);
    say(peer, text, count);
}

static gadei_learner *new_learner(int socket)
{
    gadei_learner *learner = calloc(1, sizeof *learner);
    assert(learner);
    learner->socket = socket;
    memcpy(learner->path, "/s", 3);
    return learner;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const char good[] =
        "{\"v\":1,\"ok\":true,\"job\":\"demo\",\"job_id\":\"00000000000000000000000000000000\","
        "\"row\":3,\"generation\":11,\"control\":\"/c\",\"weights\":\"/w\",\"ring\":\"/r\"}";
    struct input in = {data, size};
    int pair[2];
    if (!parts[0].good)
        make_parts();
    for (int i = 0; i < PARTS; i++) {
        memcpy(parts[i].bytes, parts[i].good, parts[i].good_size);
        parts[i].size = parts[i].good_size;
    }
    assert(!socketpair(AF_UNIX, SOCK_STREAM, 0, pair));
    uint64_t mode = next(&in, 1) % 3;
    if (mode == 0) {
        for (uint64_t steps = next(&in, 1) % 8; steps; steps--)
            change(&in);
        reply(pair[1], good, sizeof good - 1);
    } else if (in.left > 60000) {
        in.left = 60000; /* what a socket takes at once */
    }
    if (mode == 1)
        reply(pair[1], in.at, in.left);
    if (mode == 2)
        say(pair[1], in.at, in.left);
    shutdown(pair[1], SHUT_WR);

    gadei_learner *learner = new_learner(pair[0]);
    char name[40] = "";
    memcpy(name, in.at, in.left < sizeof name ? in.left : sizeof name - 1);
    int result = ask_for_ring(learner, name);
    assert(result <= 0 && (!result || *learner->error));
    assert(memchr(learner->error, 0, sizeof learner->error) && !strchr(learner->error, '\n'));
    if (result) {
        if (learner->generation && learner->row < PS_MAX_LEARNERS)
            leave(learner);
        drop(learner);
    } else {
        ps_learner_begin(&learner->common, learner->ring_map.at, learner->control_map.at,
                         learner->weights_map.at); /* as gadei_attach continues */
        use(&in, learner);
        gadei_detach(learner);
    }
    for (int i = 0; i < PARTS; i++)
        assert(!parts[i].mapped);
    close(pair[1]);
    return 0;
}
