/*
 * How a learner in C comes and goes: find the job's socket, ask the watchdog for a ring, map the
 * three segments; later give them back. gadei_ps/job/control.py is the other end of the socket,
 * gadei_ps/memory/segment.py and learners/client.py do the same in Python.
 *
 * What comes from outside, a reply or a segment's header, is checked before it is used as a size or
 * an address.
 */
#include "ps_client.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "ps_json.h"
#include "ps_sync.h"

#define CONTROL_NS 10000000000ull /* for the watchdog to answer, or for another one to come */
#define DETACH_NS 1000000000ull
#define RECONNECT_NS 20000000l
#define MAX_REPLY 65536u
#define NAME_BYTES 256 /* of a segment; the kernel's limit */

/* What the last gadei_attach of this thread could not do: there is no learner to ask. */
static _Thread_local char attach_error[ERROR_BYTES];

int ps_fail(gadei_learner *learner, int code, const char *format, ...)
{
    va_list list;
    va_start(list, format);
    vsnprintf(learner->error, sizeof learner->error, format, list);
    va_end(list);
    return code;
}

/* Bytes of the text that fit into `room` without cutting a UTF-8 character. */
static size_t fitting(const char *text, size_t length, size_t room)
{
    if (length <= room)
        return length;
    while (room && ((unsigned char)text[room] & 0xc0u) == 0x80u)
        room--;
    return room;
}

/* -- control ----------------------------------------------------------------------------------- */

/* Moves `count` bytes, or fails; the connection is then of no more use. */
static int exchange(gadei_learner *learner, short event, char *bytes, size_t count, uint64_t until)
{
    while (count) {
        uint64_t now = ps_now_ns();
        struct pollfd ready = {learner->socket, event, 0};
        int polled = now < until ? poll(&ready, 1, (int)((until - now) / 1000000) + 1) : 0;
        if (!polled)
            return ps_fail(learner, GADEI_ERROR, "%s: the watchdog does not answer", learner->path);
        ssize_t moved = -1;
        if (polled > 0)
            moved = event == POLLIN ? recv(learner->socket, bytes, count, MSG_DONTWAIT)
                                    : send(learner->socket, bytes, count,
                                           MSG_DONTWAIT | MSG_NOSIGNAL);
        learner->lost = moved == 0 || (moved < 0 && errno != EINTR && errno != EAGAIN);
        if (moved == 0)
            return ps_fail(learner, GADEI_ERROR, "%s: the watchdog has closed the connection",
                           learner->path);
        if (moved > 0) {
            bytes += moved;
            count -= (size_t)moved;
        } else if (errno != EINTR && errno != EAGAIN) {
            return ps_fail(learner, GADEI_ERROR, "%s: %s", learner->path, strerror(errno));
        }
    }
    return GADEI_OK;
}

static int read_reply(gadei_learner *learner, char *text, size_t length, struct json_field *fields,
                      size_t count)
{
    int ok = 0;
    char error[ERROR_BYTES - 1] = "refused without a reason", kind[32] = "";
    struct json_field about[] = {
        {"ok", TRUTH, &ok, 0, 0},
        {"error", TEXT, error, sizeof error, 0},
        {"kind", TEXT, kind, sizeof kind, 0},
    };
    /* Read twice: what a refusal says is not mistaken for a member of an answer. */
    if (!json_read(text, length, about, 3) || !about[0].found)
        return ps_fail(learner, GADEI_ERROR, "%s: the reply is malformed", learner->path);
    if (!ok) {
        int code = !strcmp(kind, "JobStopped")  ? GADEI_STOPPED
                   : !strcmp(kind, "JobFailed") ? GADEI_FAILED
                   : !strcmp(kind, "Evicted")   ? GADEI_EVICTED
                                                : GADEI_ERROR;
        return ps_fail(learner, code, "%s", error);
    }
    int whole = json_read(text, length, fields, count);
    for (size_t i = 0; i < count; i++)
        if (!whole || fields[i].found != 1)
            return ps_fail(learner, GADEI_ERROR, "%s: the reply has no proper %s", learner->path,
                           fields[i].key);
    return GADEI_OK;
}

static int open_control(gadei_learner *learner);
static int request_once(gadei_learner *learner, const char *json, struct json_field *fields,
                        size_t count);

/* Waits for another watchdog at the job's socket; 0 if none comes in time. */
static int reconnect(gadei_learner *learner, uint64_t until)
{
    const struct timespec nap = {0, RECONNECT_NS};
    while (ps_now_ns() < until) {
        if (!open_control(learner))
            return 1;
        if (learner->socket >= 0)
            close(learner->socket);
        learner->socket = -1;
        nanosleep(&nap, NULL);
    }
    return 0;
}

static int lasting_request(gadei_learner *learner, const char *json, struct json_field *fields,
                           size_t count, uint64_t patience_ns)
{
    uint64_t until = ps_now_ns() + patience_ns;
    for (;;) {
        learner->lost = 0;
        int result = request_once(learner, json, fields, count);
        if (!learner->lost)
            return result;
        char why[sizeof learner->error];
        memcpy(why, learner->error, sizeof why);
        if (!reconnect(learner, until)) {
            memcpy(learner->error, why, sizeof why);
            return result;
        }
    }
}

int ps_request(gadei_learner *learner, const char *json, struct json_field *fields, size_t count)
{
    return lasting_request(learner, json, fields, count, CONTROL_NS);
}

static int request_once(gadei_learner *learner, const char *json, struct json_field *fields,
                        size_t count)
{
    if (learner->socket < 0)
        return ps_fail(learner, GADEI_ERROR, "%s: the connection is lost", learner->path);
    uint64_t until = ps_now_ns() + CONTROL_NS;
    size_t length = strlen(json);
    unsigned char size[4];
    char message[1024];
    assert(length + 4 <= sizeof message);
    for (int i = 0; i < 4; i++)
        message[i] = (char)(length >> (24 - 8 * i) & 0xff);
    memcpy(message + 4, json, length);
    int result = exchange(learner, POLLOUT, message, length + 4, until);
    if (!result)
        result = exchange(learner, POLLIN, (char *)size, 4, until);
    if (!result) {
        length = (size_t)size[0] << 24 | (size_t)size[1] << 16 | (size_t)size[2] << 8 | size[3];
        char *text = length <= MAX_REPLY ? malloc(length + 1) : NULL;
        if (!text) {
            result = ps_fail(learner, GADEI_ERROR, "%s: the reply is too long", learner->path);
        } else {
            result = exchange(learner, POLLIN, text, length, until);
            if (!result) {
                result = read_reply(learner, text, length, fields, count);
                free(text);
                return result;
            }
            free(text);
        }
    }
    close(learner->socket); /* what comes next on it could be the answer to this one */
    learner->socket = -1;
    return result;
}

/* -- attach ------------------------------------------------------------------------------------ */

static int check_job_name(gadei_learner *learner, const char *job)
{
    static const char letters[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
                                  "0123456789-_";
    size_t length = strlen(job);
    if (length < 1 || length > 48 || job[0] == '-' || job[0] == '_' ||
        strspn(job, letters) != length)
        return ps_fail(learner, GADEI_ERROR,
                       "job name '%.64s': use 1 to 48 letters, digits, '-' and '_', beginning with "
                       "a letter or digit", job);
    return GADEI_OK;
}

/* The job's socket in the user's directory for sockets: gadei_ps/job/paths.py has the same rules. */
static int find_socket(gadei_learner *learner, const char *job)
{
    const char *given = getenv("GADEI_PS_RUNTIME_DIR"), *session = getenv("XDG_RUNTIME_DIR");
    char directory[sizeof learner->path], path[2 * sizeof learner->path];
    struct stat status;
    int length;
    if (given && *given)
        length = snprintf(directory, sizeof directory, "%s", given);
    else if (session && *session)
        length = snprintf(directory, sizeof directory, "%s/gadei-ps", session);
    else
        length = snprintf(directory, sizeof directory, "/tmp/gadei-ps-%u", (unsigned)getuid());
    if (length < 0 || (size_t)length >= sizeof directory)
        return ps_fail(learner, GADEI_ERROR,
                       "GADEI_PS_RUNTIME_DIR is too long for a socket's path");
    if (!lstat(directory, &status) && (!S_ISDIR(status.st_mode) || status.st_uid != getuid() ||
                                       (status.st_mode & (S_IWGRP | S_IWOTH))))
        return ps_fail(learner, GADEI_ERROR,
                       "%s is not a directory that only you may write; remove it or set "
                       "GADEI_PS_RUNTIME_DIR", directory);
    snprintf(path, sizeof path, "%s/%s.sock", directory, job);
    if (strlen(path) >= sizeof learner->path)
        return ps_fail(learner, GADEI_ERROR, "%s: too long for a socket's path", path);
    memcpy(learner->path, path, strlen(path) + 1);
    return GADEI_OK;
}

static int find_job(gadei_learner *learner, const char *job)
{
    if (!job || !*job)
        job = getenv("GADEI_PS_JOB");
    if (!job || !*job)
        return ps_fail(learner, GADEI_ERROR,
                       "which job? give its name, or start the program with gadei-ps run or attach "
                       "(they set GADEI_PS_JOB)");
    snprintf(learner->job, sizeof learner->job, "%s", job); /* until the watchdog says its name */
    if (!strchr(job, '/')) {
        int result = check_job_name(learner, job);
        return result ? result : find_socket(learner, job);
    }
    if (strlen(job) >= sizeof learner->path)
        return ps_fail(learner, GADEI_ERROR, "%.128s: too long for a socket's path", job);
    memcpy(learner->path, job, strlen(job) + 1);
    return GADEI_OK;
}

static int open_control(gadei_learner *learner)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    struct timeval limit = {(time_t)(CONTROL_NS / 1000000000ull), 0};
    static_assert(sizeof address.sun_path == sizeof learner->path, "path");
    memcpy(address.sun_path, learner->path, sizeof address.sun_path);
    learner->socket = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (learner->socket < 0)
        return ps_fail(learner, GADEI_ERROR, "no socket: %s", strerror(errno));
    /* For connect(), which waits while the watchdog's backlog is full. */
    setsockopt(learner->socket, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
    while (connect(learner->socket, (struct sockaddr *)&address, sizeof address)) {
        if (errno == EINTR)
            continue;
        if (errno == ENOENT || errno == ECONNREFUSED)
            return ps_fail(learner, GADEI_ERROR,
                           "no job '%s' is running (looked at %s); gadei-ps ls shows the jobs "
                           "there are", learner->job, learner->path);
        return ps_fail(learner, GADEI_ERROR, "%s: %s", learner->path, strerror(errno));
    }
    return GADEI_OK;
}

static int read_id(const char *text, uint8_t id[16])
{
    struct json_reader in = {text, text + strlen(text)};
    uint32_t value;
    for (int i = 0; i < 16; i += 2) {
        if (!take_hex4(&in, &value))
            return 0;
        id[i] = (uint8_t)(value >> 8);
        id[i + 1] = (uint8_t)value;
    }
    return in.at == in.end;
}

/* Maps a segment and validates its header, which `least` bytes must hold. */
static int map_segment(gadei_learner *learner, struct mapping *map, const char *name,
                       enum ps_kind kind, int writable, size_t least, const uint8_t job_id[16])
{
    struct stat status;
    if (name[0] != '/' || strchr(name + 1, '/'))
        return ps_fail(learner, GADEI_ERROR, "%s: not a segment's name", name);
    int fd = shm_open(name, writable ? O_RDWR : O_RDONLY, 0);
    if (fd < 0 && errno == ENOENT)
        return ps_fail(learner, GADEI_FAILED,
                       "segment %s is gone; is /dev/shm shared with the daemon, and did logind "
                       "remove it (RemoveIPC)? gadei-ps doctor tells", name + 1);
    if (fd < 0 || fstat(fd, &status)) {
        int why = errno;
        if (fd >= 0)
            close(fd);
        return ps_fail(learner, GADEI_ERROR, "%s: %s", name, strerror(why));
    }
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
    if (ps_load_acquire(&header->magic) != PS_MAGIC)
        return ps_fail(learner, GADEI_ERROR, "%s: not a gadei-ps segment, or only half made", name);
    if (header->layout_version != PS_LAYOUT_VERSION)
        return ps_fail(learner, GADEI_ERROR,
                       "%s: layout version %u, this program speaks %u: use the same gadei-ps for "
                       "the daemon and the learners", name, header->layout_version,
                       PS_LAYOUT_VERSION);
    if (header->kind != (uint32_t)kind)
        return ps_fail(learner, GADEI_ERROR, "%s: is of kind %u, not %u", name, header->kind,
                       (unsigned)kind);
    if (header->bytes != map->bytes)
        return ps_fail(learner, GADEI_ERROR, "%s: truncated (%zu bytes of %llu)", name, map->bytes,
                       (unsigned long long)header->bytes);
    if (memcmp(header->job_id, job_id, 16))
        return ps_fail(learner, GADEI_ERROR, "%s: belongs to another incarnation of the job", name);
    return GADEI_OK;
}

/* Whether `count` things of `size` bytes lie inside the mapping from `at` on. */
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
        head->table_at % 8 || head->data_at % 64 || head->tensors > INT32_MAX)
        return ps_fail(learner, GADEI_ERROR, "the weights segment is damaged");
    const struct ps_tensor *row = (const struct ps_tensor *)((char *)map->at + head->table_at);
    learner->weights = (const float *)((char *)map->at + head->data_at);
    learner->elements = head->elements;
    learner->tensor_count = (uint32_t)head->tensors;
    learner->tensors = calloc(learner->tensor_count + 1, sizeof *learner->tensors);
    learner->written = calloc(learner->tensor_count + 1, 1);
    learner->blocks = calloc(learner->tensor_count + 1, sizeof *learner->blocks);
    learner->squares = calloc(learner->tensor_count + 1, sizeof *learner->squares);
    if (!learner->tensors || !learner->written || !learner->blocks || !learner->squares)
        return ps_fail(learner, GADEI_ERROR, "out of memory");
    for (uint32_t i = 0; i < learner->tensor_count; i++, row++) {
        if (row->count > learner->elements || row->start > learner->elements - row->count ||
            row->dims > PS_MAX_DIMS || !memchr(row->name, 0, sizeof row->name))
            return ps_fail(learner, GADEI_ERROR, "the weights segment's table is damaged at row %u",
                           i);
        struct gadei_tensor *tensor = &learner->tensors[i];
        *tensor = (struct gadei_tensor){.name = row->name, .role = row->role, .dims = row->dims,
                                        .start = row->start, .count = row->count};
        memcpy(tensor->shape, row->shape, sizeof tensor->shape);
    }
    return GADEI_OK;
}

/* Room for any frame's payload, as gadei_ps/memory/weights.py has it: all tensors, dense or row by row. */
static uint64_t payload_bytes(const gadei_learner *learner)
{
    uint64_t size = ((learner->tensor_count * sizeof(struct ps_block) + 63) & ~63ull) +
                    learner->elements * sizeof(float);
    for (uint32_t i = 0; i < learner->tensor_count; i++) {
        const struct gadei_tensor *tensor = &learner->tensors[i];
        uint64_t rows = tensor->dims ? tensor->shape[0] : 1;
        size += 64 + (tensor->count > rows ? (8 * rows + 63) & ~63ull : 0);
    }
    return size;
}

static int check_ring(gadei_learner *learner)
{
    const struct ps_ring *ring = learner->ring_map.at;
    if (ring->header.index != learner->row || ring->header.generation != learner->generation ||
        learner->row >= PS_MAX_LEARNERS || ring->slots < 1 || ring->shards < 1 ||
        ring->shards > PS_MAX_SHARDS || ring->capacity / sizeof(float) < learner->elements ||
        ring->capacity < payload_bytes(learner) ||
        ring->slot_bytes < PS_PAYLOAD_AT || ring->slot_bytes - PS_PAYLOAD_AT < ring->capacity ||
        ring->slots_at < sizeof *ring || ring->slots_at % 64 || ring->slot_bytes % 64 ||
        !inside(&learner->ring_map, ring->slots_at, ring->slots, ring->slot_bytes))
        return ps_fail(learner, GADEI_ERROR, "the ring segment is damaged, or another learner's");
    return GADEI_OK;
}

static int ask_for_ring(gadei_learner *learner, const char *name)
{
    char quoted[6 * 31 + 3], json[256], id_text[33], control[NAME_BYTES], weights[NAME_BYTES],
        ring[NAME_BYTES];
    uint8_t id[16];
    uint64_t row;
    struct json_field fields[] = {
        {"job", TEXT, learner->job, sizeof learner->job, 0},
        {"job_id", TEXT, id_text, sizeof id_text, 0},
        {"row", NUMBER, &row, 0, 0},
        {"generation", NUMBER, &learner->generation, 0, 0},
        {"control", TEXT, control, sizeof control, 0},
        {"weights", TEXT, weights, sizeof weights, 0},
        {"ring", TEXT, ring, sizeof ring, 0},
    };
    json_quote(name, fitting(name, strlen(name), 31), quoted);
    snprintf(json, sizeof json, "{\"v\":1,\"op\":\"attach\",\"name\":%s}", quoted);
    int result = ps_request(learner, json, fields, sizeof fields / sizeof fields[0]);
    if (result)
        return result;
    if (!read_id(id_text, id) || row >= PS_MAX_LEARNERS)
        return ps_fail(learner, GADEI_ERROR, "%s: the reply has no proper job_id or row",
                       learner->path);
    learner->row = (uint32_t)row;
    result = map_segment(learner, &learner->control_map, control, PS_CONTROL, 0,
                         sizeof(struct ps_control), id);
    if (!result)
        result = map_segment(learner, &learner->weights_map, weights, PS_WEIGHTS, 0,
                             sizeof(struct ps_weights), id);
    if (!result)
        result = map_segment(learner, &learner->ring_map, ring, PS_RING, 1, sizeof(struct ps_ring),
                             id);
    if (!result)
        result = read_model(learner);
    return result ? result : check_ring(learner);
}

static void drop(gadei_learner *learner)
{
    struct mapping *maps[] = {&learner->control_map, &learner->weights_map, &learner->ring_map};
    for (int i = 0; i < 3; i++)
        if (maps[i]->at)
            munmap(maps[i]->at, maps[i]->bytes);
    if (learner->socket >= 0)
        close(learner->socket); /* the watchdog keeps the row until this process ends */
    free(learner->tensors);
    free(learner->written);
    free(learner->blocks);
    free(learner->squares);
    free(learner);
}

static void leave(gadei_learner *learner)
{
    char json[128];
    snprintf(json, sizeof json, "{\"v\":1,\"op\":\"detach\",\"row\":%u,\"generation\":%llu}",
             learner->row, (unsigned long long)learner->generation);
    uint64_t patience_ns = DETACH_NS;
    if (learner->ring) { /* without a watchdog nobody hears us; the next one reads it here */
        ps_store_release(&learner->ring->detached, 1);
        if (__atomic_load_n(&learner->control->phase, __ATOMIC_RELAXED) >= PS_PHASE_STOPPED)
            patience_ns = 0;
    }
    /* Fails if the job is gone or has let go of us already. */
    lasting_request(learner, json, NULL, 0, patience_ns);
}

int gadei_attach(const char *job_or_socket, const char *name, gadei_learner **out)
{
    gadei_learner *learner = out ? calloc(1, sizeof *learner) : NULL;
    attach_error[0] = '\0';
    if (!learner) {
        snprintf(attach_error, sizeof attach_error, "%s",
                 out ? "out of memory" : "no place for a learner");
        return GADEI_ERROR;
    }
    *out = NULL;
    learner->socket = -1;
    learner->pid = getpid();
    learner->wire = PS_FLOAT32;
    int result = find_job(learner, job_or_socket);
    if (!result)
        result = open_control(learner);
    if (!result)
        result = ask_for_ring(learner, name ? name : "");
    if (result) {
        memcpy(attach_error, learner->error, sizeof attach_error);
        if (learner->generation && learner->row < PS_MAX_LEARNERS)
            leave(learner); /* we have been given a ring, but cannot use it */
        drop(learner);
        return result;
    }
    learner->control = learner->control_map.at;
    learner->ring = learner->ring_map.at;
    learner->version = gadei_version(learner);
    learner->started = ps_clock();
    *out = learner;
    return GADEI_OK;
}

void gadei_detach(gadei_learner *learner)
{
    if (!learner)
        return;
    if (learner->pid == getpid())
        leave(learner);
    drop(learner);
}

const char *gadei_error(const gadei_learner *learner)
{
    return learner ? learner->error : attach_error;
}
