/*
 * The three segments of a learner: maps them, checks them, reads the model's table. What a header says
 * is checked before it is used as a size or an address. gadei_ps/memory/segment.py does the same.
 */
#include "gadei_learner.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "ps_build.h"
#include "ps_atomic.h"

/* Opens a segment's file: a regular file of the job's user, which no other user may open. Every user
 * can make files in /dev/shm, so the name proves nothing. Fills in `status`; the descriptor or a
 * result. gadei_ps/memory/shm.py does the same. */
static int open_segment(gadei_learner *learner, const char *name, int writable,
                        struct stat *status)
{
    if (name[0] != '/' || strchr(name + 1, '/'))
        return ps_fail(learner, GADEI_ERROR, "%s: not a segment's name", name);
    int how = (writable ? O_RDWR : O_RDONLY) | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC;
    int fd = shm_open(name, how, 0);
    if (fd < 0 && errno == ENOENT)
        return ps_fail(learner, GADEI_FAILED,
                       "segment %s is gone; is /dev/shm shared with the watchdog, and did "
                       "logind remove it (RemoveIPC)? run gadei-ps doctor", name + 1);
    if (fd < 0 || fstat(fd, status)) {
        int why = errno;
        if (fd >= 0)
            close(fd);
        return ps_fail(learner, GADEI_ERROR, "%s: %s", name, strerror(why));
    }
    if (S_ISREG(status->st_mode) && status->st_uid == learner->owner &&
        !(status->st_mode & (S_IRWXG | S_IRWXO)) && status->st_nlink <= 1)
        return fd;
    close(fd);
    return ps_fail(learner, GADEI_ERROR,
                   "%s: no regular file that only the job's user may open (owner %u, mode %o)", name,
                   (unsigned)status->st_uid, (unsigned)status->st_mode);
}

/* Maps a segment and validates its header, which `least` bytes must hold. */
static int map_segment(gadei_learner *learner, struct mapping *map, const char *name,
                       enum ps_kind kind, int writable, size_t least, const uint8_t job_id[16])
{
    struct stat status;
    int fd = open_segment(learner, name, writable, &status);
    if (fd < 0)
        return fd;
    if ((uint64_t)status.st_size < least) {
        close(fd);
        return ps_fail(learner, GADEI_ERROR, "%s: truncated (%lld bytes)", name,
                       (long long)status.st_size);
    }
    map->bytes = (size_t)status.st_size;
    void *at = mmap(NULL, map->bytes, PROT_READ | (writable ? PROT_WRITE : 0), MAP_SHARED, fd, 0);
    close(fd);
    if (at == MAP_FAILED)
        return ps_fail(learner, GADEI_ERROR, "cannot map %s: %s", name, strerror(errno));
    map->at = at;
    const struct ps_header *header = at;
    if (ps_load_acquire(&header->magic) != PS_MAGIC) /* SYNC POINT: made whole */
        return ps_fail(learner, GADEI_ERROR, "%s: not a gadei-ps segment, or only half made", name);
    if (header->layout_version != PS_LAYOUT_VERSION)
        return ps_fail(learner, GADEI_ERROR,
                       "%s: layout version %u, this program speaks %u: use the same gadei-ps for "
                       "the watchdog and the learners", name, header->layout_version,
                       PS_LAYOUT_VERSION);
    if (header->kind != (uint32_t)kind)
        return ps_fail(learner, GADEI_ERROR, "%s: is of kind %u, not %u", name, header->kind,
                       (unsigned)kind);
    if (header->bytes != map->bytes)
        return ps_fail(learner, GADEI_ERROR, "%s: truncated (%zu bytes of %llu)", name, map->bytes,
                       (unsigned long long)header->bytes);
    uint64_t build = kind == PS_CONTROL ? ((const struct ps_control *)at)->build : PS_BUILD;
    if (build != PS_BUILD)
        return ps_fail(learner, GADEI_ERROR,
                       "%s: made by build %016llx of gadei-ps, this program is build %016llx: use "
                       "the same gadei-ps for the watchdog and the learners", name,
                       (unsigned long long)build, PS_BUILD);
    if (memcmp(header->job_id, job_id, 16))
        return ps_fail(learner, GADEI_ERROR, "%s: belongs to another incarnation of the job", name);
    return GADEI_OK;
}

/* Whether `count` items of `size` bytes from `at` on lie inside the mapping. */
static int inside(const struct mapping *map, uint64_t at, uint64_t count, uint64_t size)
{
    return at <= map->bytes && count <= (map->bytes - at) / size;
}

static int read_model(gadei_learner *learner)
{
    const struct mapping *map = &learner->weights_map;
    const struct ps_weights *head = map->at;
    if (!inside(map, head->table_at, head->tensors, sizeof(struct ps_tensor)) ||
        !inside(map, head->data_at, head->elements, sizeof(float)) ||
        head->table_at % 8 || head->data_at % 64 || head->tensors > INT32_MAX ||
        head->trained > head->tensors || head->parameters > head->elements)
        return ps_fail(learner, GADEI_ERROR, "the weights segment is damaged");
    const struct ps_tensor *row = (const struct ps_tensor *)((char *)map->at + head->table_at);
    learner->weights = (const float *)((char *)map->at + head->data_at);
    learner->elements = head->elements;
    learner->tensor_count = (uint32_t)head->tensors;
    learner->tensors = calloc(learner->tensor_count + 1, sizeof *learner->tensors);
    learner->written = calloc(learner->tensor_count + 1, 1);
    learner->squares = calloc(learner->tensor_count + 1, sizeof *learner->squares);
    learner->gradients = calloc(learner->tensor_count + 1, sizeof *learner->gradients);
    if (!learner->tensors || !learner->written || !learner->squares || !learner->gradients)
        return ps_fail(learner, GADEI_ERROR, "out of memory");
    uint64_t end = 0;
    for (uint32_t i = 0; i < learner->tensor_count; end = row->start + row->count, i++, row++) {
        /* Gradients are of the parameters, which come first: frames have no room for others. */
        int trained = i < head->trained;
        uint64_t limit = trained ? head->parameters : head->elements;
        if (row->count > limit || row->start > limit - row->count || row->start < end ||
            trained != (row->role == PS_PARAMETER) || row->dims > PS_MAX_DIMS ||
            !memchr(row->name, 0, sizeof row->name) ||
            !memchr(row->dtype, 0, sizeof row->dtype) ||
            (row->dims && !strcmp(row->dtype, "F32") &&
             (row->shape[0] ? row->count % row->shape[0] : row->count)))
            return ps_fail(learner, GADEI_ERROR, "the weights segment's table is damaged at row %u",
                           i);
        struct gadei_tensor *tensor = &learner->tensors[i];
        *tensor = (struct gadei_tensor){.name = row->name, .role = row->role, .dims = row->dims,
                                        .start = row->start, .count = row->count,
                                        .dtype = row->dtype};
        memcpy(tensor->shape, row->shape, sizeof tensor->shape);
    }
    return GADEI_OK;
}

/* Room for any frame's payload, all tensors dense or row by row: payload_bytes() of
 * gadei_ps/memory/weights.py. */
static uint64_t payload_bytes(const gadei_learner *learner)
{
    uint64_t size = ps_rounded(learner->tensor_count * sizeof(struct ps_block)) +
                    learner->elements * sizeof(float);
    for (uint32_t i = 0; i < learner->tensor_count; i++) {
        const struct gadei_tensor *tensor = &learner->tensors[i];
        uint64_t rows = tensor->dims ? tensor->shape[0] : 1;
        size += 64 + (tensor->count > rows ? ps_rounded(8 * rows) : 0);
    }
    return size;
}

static int check_ring(gadei_learner *learner)
{
    const struct ps_ring *ring = learner->ring_map.at;
    const struct ps_control *control = learner->control_map.at;
    if (ring->header.index != learner->row || ring->header.generation != learner->generation ||
        learner->row >= PS_MAX_LEARNERS || ring->slots < 1 || ring->shards < 1 ||
        ring->shards > PS_MAX_SHARDS || ring->shards != control->shards ||
        ring->capacity / sizeof(float) < learner->elements ||
        ring->capacity < payload_bytes(learner) ||
        ring->slot_bytes < PS_PAYLOAD_AT || ring->slot_bytes - PS_PAYLOAD_AT < ring->capacity ||
        ring->slots_at < sizeof *ring || ring->slots_at % 64 || ring->slot_bytes % 64 ||
        !inside(&learner->ring_map, ring->slots_at, ring->slots, ring->slot_bytes))
        return ps_fail(learner, GADEI_ERROR, "the ring segment is damaged, or another learner's");
    return GADEI_OK;
}

int ps_map_segments(gadei_learner *learner, const struct ps_segment_names *names,
                    const uint8_t job_id[16])
{
    int result = map_segment(learner, &learner->control_map, names->control, PS_CONTROL, 0,
                             sizeof(struct ps_control), job_id);
    if (!result)
        result = map_segment(learner, &learner->weights_map, names->weights, PS_WEIGHTS, 0,
                             sizeof(struct ps_weights), job_id);
    if (!result)
        result = map_segment(learner, &learner->ring_map, names->ring, PS_RING, 1,
                             sizeof(struct ps_ring), job_id);
    if (!result)
        result = read_model(learner);
    return result ? result : check_ring(learner);
}

void ps_unmap_segments(gadei_learner *learner)
{
    struct mapping *maps[] = {&learner->control_map, &learner->weights_map, &learner->ring_map};
    for (int i = 0; i < 3; i++)
        if (maps[i]->at)
            munmap(maps[i]->at, maps[i]->bytes);
    free(learner->tensors);
    free(learner->written);
    free(learner->squares);
    free(learner->gradients);
}
