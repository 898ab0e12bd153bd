/*
 * The learner's side of gadei.h, in the order in which a learner meets it:
 *
 *   replies    the few members of a JSON object that an attach needs, bounded and checked
 *   control    one request, one reply over the watchdog's socket (gadei_ps/control.py)
 *   attach     find the socket, ask for a ring, map and validate the three segments
 *   push       wait_turn, claim, write, publish; waits come back at least every SLICE_NS to look
 *              whether the server lives
 *
 * What comes from outside, a reply or a segment's header, is checked before it is used as a size or
 * an address. learners/client.py does the same in Python.
 */
#include "gadei.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
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

#include "ps_ring.h"
#include "ps_sync.h"

#define SLICE_NS 100000000ull  /* how long a wait may sleep before it looks whether the server lives */
#define GONE_NS 1000000000ull  /* how long a job may be without a server before its learners give up */
#define CONTROL_NS 10000000000ull /* for the watchdog to answer */
#define MAX_REPLY 65536u
#define MAX_DEPTH 32
#define ERROR_BYTES 512
#define NAME_BYTES 256 /* of a segment; the kernel's limit */

static_assert((int)GADEI_TIMEOUT == (int)PS_TIMEOUT && (int)GADEI_STOPPED == (int)PS_STOPPED &&
              (int)GADEI_EVICTED == (int)PS_EVICTED && (int)GADEI_FINISHED == (int)PS_FINISHED, "codes");
static_assert((int)GADEI_FLOAT32 == (int)PS_FLOAT32 && (int)GADEI_BFLOAT16 == (int)PS_BFLOAT16 &&
              (int)GADEI_FLOAT16 == (int)PS_FLOAT16 && GADEI_MAX_DIMS == PS_MAX_DIMS, "formats");

struct mapping {
    void *at; /* NULL: not mapped */
    size_t bytes;
};

struct gadei_learner {
    int socket; /* -1 once it is of no more use */
    pid_t pid;
    char job[64];
    char path[108]; /* of the socket */
    struct mapping control_map, weights_map, ring_map;
    const struct ps_control *control;
    struct ps_ring *ring;
    const float *weights;
    uint64_t elements;
    struct gadei_tensor *tensors;
    unsigned char *written; /* for each tensor: it is in the claimed slot */
    uint32_t tensor_count;
    uint32_t row;
    uint64_t generation;
    uint32_t wire;
    int claimed_once;
    struct ps_frame *slot; /* claimed and not published; else NULL */
    int nonfinite;         /* in the claimed slot */
    double started;        /* of the iteration, CLOCK_MONOTONIC seconds */
    uint64_t version;      /* last pulled */
    uint64_t published;
    uint64_t taken[PS_AHEAD]; /* batches not answered, a ring */
    uint32_t taken_first, taken_count;
    uint64_t item; /* what the last wait brought */
    float *copy_to; /* a consistent pull under way */
    uint32_t copied, holds;
    char error[ERROR_BYTES];
};

/* What the last gadei_attach of this thread could not do: there is no learner to ask. */
static _Thread_local char attach_error[ERROR_BYTES];

__attribute__((format(printf, 3, 4)))
static int fail(gadei_learner *learner, int code, const char *format, ...)
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

/* -- replies ------------------------------------------------------------------------------------ */

struct reader {
    const char *at, *end;
};

enum field_kind { TEXT, NUMBER, TRUTH };

/* A member wanted of an object. TEXT: `to` is char[room]; NUMBER: uint64_t; TRUTH: int. */
struct field {
    const char *key;
    enum field_kind kind;
    void *to;
    size_t room;
    int found;
};

static void skip_blanks(struct reader *in)
{
    while (in->at < in->end && strchr(" \t\r\n", *in->at) && *in->at)
        in->at++;
}

static int take(struct reader *in, char wanted)
{
    skip_blanks(in);
    if (in->at == in->end || *in->at != wanted)
        return 0;
    in->at++;
    return 1;
}

static int take_word(struct reader *in, const char *word)
{
    size_t length = strlen(word);
    if ((size_t)(in->end - in->at) < length || memcmp(in->at, word, length))
        return 0;
    in->at += length;
    return 1;
}

static int take_hex4(struct reader *in, uint32_t *value)
{
    *value = 0;
    for (int i = 0; i < 4; i++) {
        if (in->at == in->end)
            return 0;
        char c = *in->at++;
        uint32_t digit = c >= '0' && c <= '9'   ? (uint32_t)(c - '0')
                         : c >= 'a' && c <= 'f' ? (uint32_t)(c - 'a') + 10
                         : c >= 'A' && c <= 'F' ? (uint32_t)(c - 'A') + 10
                                                : 16;
        if (digit == 16)
            return 0;
        *value = *value << 4 | digit;
    }
    return 1;
}

/* After "\u": a code point as UTF-8; half a surrogate pair becomes U+FFFD. Returns its length. */
static size_t take_code_point(struct reader *in, char out[4])
{
    uint32_t code, low;
    if (!take_hex4(in, &code))
        return 0;
    if (code >= 0xd800 && code < 0xe000) {
        struct reader ahead = *in;
        if (code < 0xdc00 && take_word(&ahead, "\\u") && take_hex4(&ahead, &low) &&
            low >= 0xdc00 && low < 0xe000) {
            *in = ahead;
            code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
        } else {
            code = 0xfffd;
        }
    }
    if (code < 0x20)
        code = ' '; /* what we keep is one line and ends at its first NUL */
    if (code < 0x80) {
        out[0] = (char)code;
        return 1;
    }
    size_t length = code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
    for (size_t i = length - 1; i > 0; i--, code >>= 6)
        out[i] = (char)(0x80 | (code & 0x3f));
    out[0] = (char)((0xf00u >> length & 0xffu) | code);
    return length;
}

/* A string, cut where it does not fit into `to` of `room` bytes (0: skipped). Returns 0 if it is
 * malformed, 1 if it is whole, 2 if it was cut. */
static int take_string(struct reader *in, char *to, size_t room)
{
    size_t used = 0;
    int cut = 0;
    if (!take(in, '"'))
        return 0;
    for (;;) {
        char part[4];
        size_t length = 1;
        if (in->at == in->end)
            return 0;
        part[0] = *in->at++;
        if (part[0] == '"')
            break;
        if ((unsigned char)part[0] < 0x20)
            return 0;
        if (part[0] == '\\') {
            if (in->at == in->end)
                return 0;
            part[0] = *in->at++;
            if (part[0] == 'u') {
                length = take_code_point(in, part);
                if (!length)
                    return 0;
            } else if (part[0] && strchr("bfnrt", part[0])) {
                part[0] = ' ';
            } else if (part[0] != '"' && part[0] != '\\' && part[0] != '/') {
                return 0;
            }
        }
        if (!cut && used + length < room) {
            memcpy(to + used, part, length);
            used += length;
        } else {
            cut = room != 0;
        }
    }
    if (room)
        to[used] = '\0';
    return cut ? 2 : 1;
}

static int take_number(struct reader *in, uint64_t *value)
{
    skip_blanks(in);
    const char *begin = in->at;
    *value = 0;
    for (; in->at < in->end && *in->at >= '0' && *in->at <= '9'; in->at++) {
        uint64_t digit = (uint64_t)(*in->at - '0');
        if (*value > (UINT64_MAX - digit) / 10)
            return 0;
        *value = *value * 10 + digit;
    }
    return in->at > begin; /* what follows, a point or an exponent, is not a comma: refused there */
}

static int skip_value(struct reader *in, int depth)
{
    skip_blanks(in);
    if (in->at == in->end || depth > MAX_DEPTH)
        return 0;
    char first = *in->at;
    if (first == '"')
        return take_string(in, NULL, 0);
    if (first == '{' || first == '[') {
        char close = first == '{' ? '}' : ']';
        in->at++;
        if (take(in, close))
            return 1;
        do {
            if (first == '{' && (!take_string(in, NULL, 0) || !take(in, ':')))
                return 0;
            if (!skip_value(in, depth + 1))
                return 0;
        } while (take(in, ','));
        return take(in, close);
    }
    if (take_word(in, "true") || take_word(in, "false") || take_word(in, "null"))
        return 1;
    const char *begin = in->at;
    while (in->at < in->end && *in->at && strchr("+-.0123456789eE", *in->at))
        in->at++;
    return in->at > begin;
}

static int take_field(struct reader *in, struct field *field)
{
    skip_blanks(in);
    switch (field->kind) {
    case TEXT:
        field->found = take_string(in, field->to, field->room);
        break;
    case NUMBER:
        field->found = take_number(in, field->to);
        break;
    case TRUTH:
        *(int *)field->to = take_word(in, "true");
        field->found = *(int *)field->to || take_word(in, "false");
        break;
    }
    return field->found;
}

/* One object with nothing after it; members that are not wanted are skipped. 0 if it is malformed. */
static int read_object(const char *text, size_t length, struct field *fields, size_t count)
{
    struct reader in = {text, text + length};
    if (!take(&in, '{'))
        return 0;
    if (!take(&in, '}')) {
        do {
            char key[32];
            struct field *wanted = NULL;
            int known = take_string(&in, key, sizeof key);
            if (!known || !take(&in, ':'))
                return 0;
            for (size_t i = 0; i < count && known == 1; i++)
                if (!strcmp(key, fields[i].key))
                    wanted = &fields[i];
            if (wanted ? !take_field(&in, wanted) : !skip_value(&in, 0))
                return 0;
        } while (take(&in, ','));
        if (!take(&in, '}'))
            return 0;
    }
    skip_blanks(&in);
    return in.at == in.end;
}

/* A JSON string of the text's first `length` bytes; `out` holds 6 for each and 3 more. */
static void quote(const char *text, size_t length, char *out)
{
    *out++ = '"';
    for (size_t i = 0; i < length; i++) {
        unsigned char c = (unsigned char)text[i];
        if (c < 0x20 || c == '"' || c == '\\')
            out += sprintf(out, "\\u%04x", c);
        else
            *out++ = (char)c;
    }
    *out++ = '"';
    *out = '\0';
}

/* -- control ------------------------------------------------------------------------------------ */

/* Moves `count` bytes, or fails; the connection is then of no more use. */
static int exchange(gadei_learner *learner, short event, char *bytes, size_t count, uint64_t until)
{
    while (count) {
        uint64_t now = ps_now_ns();
        struct pollfd ready = {learner->socket, event, 0};
        int polled = now < until ? poll(&ready, 1, (int)((until - now) / 1000000) + 1) : 0;
        if (!polled)
            return fail(learner, GADEI_ERROR, "%s: the watchdog does not answer", learner->path);
        ssize_t moved = -1;
        if (polled > 0)
            moved = event == POLLIN ? recv(learner->socket, bytes, count, MSG_DONTWAIT)
                                    : send(learner->socket, bytes, count, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (moved == 0)
            return fail(learner, GADEI_ERROR, "%s: the watchdog has closed the connection",
                        learner->path);
        if (moved > 0) {
            bytes += moved;
            count -= (size_t)moved;
        } else if (errno != EINTR && errno != EAGAIN) {
            return fail(learner, GADEI_ERROR, "%s: %s", learner->path, strerror(errno));
        }
    }
    return GADEI_OK;
}

static int read_reply(gadei_learner *learner, char *text, size_t length, struct field *fields,
                      size_t count)
{
    int ok = 0;
    char error[ERROR_BYTES - 1] = "refused without a reason", kind[32] = "";
    struct field about[] = {
        {"ok", TRUTH, &ok, 0, 0},
        {"error", TEXT, error, sizeof error, 0},
        {"kind", TEXT, kind, sizeof kind, 0},
    };
    /* Read twice: what a refusal says is not mistaken for a member of an answer. */
    if (!read_object(text, length, about, 3) || !about[0].found)
        return fail(learner, GADEI_ERROR, "%s: the reply is malformed", learner->path);
    if (!ok) {
        int code = !strcmp(kind, "JobStopped")  ? GADEI_STOPPED
                   : !strcmp(kind, "JobFailed") ? GADEI_FAILED
                   : !strcmp(kind, "Evicted")   ? GADEI_EVICTED
                                                : GADEI_ERROR;
        return fail(learner, code, "%s", error);
    }
    int whole = read_object(text, length, fields, count);
    for (size_t i = 0; i < count; i++)
        if (!whole || fields[i].found != 1)
            return fail(learner, GADEI_ERROR, "%s: the reply has no proper %s", learner->path,
                        fields[i].key);
    return GADEI_OK;
}

/* One request and its reply, from which `fields` are all wanted. */
static int request(gadei_learner *learner, const char *json, struct field *fields, size_t count)
{
    if (learner->socket < 0)
        return fail(learner, GADEI_ERROR, "%s: the connection is lost", learner->path);
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
            result = fail(learner, GADEI_ERROR, "%s: the reply is too long", learner->path);
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

/* -- attach ------------------------------------------------------------------------------------- */

static int check_job_name(gadei_learner *learner, const char *job)
{
    static const char letters[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_";
    size_t length = strlen(job);
    if (length < 1 || length > 48 || job[0] == '-' || job[0] == '_' ||
        strspn(job, letters) != length)
        return fail(learner, GADEI_ERROR,
                    "job name '%.64s': use 1 to 48 letters, digits, '-' and '_', beginning with a "
                    "letter or digit", job);
    return GADEI_OK;
}

/* The job's socket in the user's directory for sockets: gadei_ps/runtime.py has the same rules. */
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
        return fail(learner, GADEI_ERROR, "GADEI_PS_RUNTIME_DIR is too long for a socket's path");
    if (!lstat(directory, &status) && (!S_ISDIR(status.st_mode) || status.st_uid != getuid() ||
                                       (status.st_mode & (S_IWGRP | S_IWOTH))))
        return fail(learner, GADEI_ERROR,
                    "%s is not a directory that only you may write; remove it or set "
                    "GADEI_PS_RUNTIME_DIR", directory);
    snprintf(path, sizeof path, "%s/%s.sock", directory, job);
    if (strlen(path) >= sizeof learner->path)
        return fail(learner, GADEI_ERROR, "%s: too long for a socket's path", path);
    memcpy(learner->path, path, strlen(path) + 1);
    return GADEI_OK;
}

static int find_job(gadei_learner *learner, const char *job)
{
    if (!job || !*job)
        job = getenv("GADEI_PS_JOB");
    if (!job || !*job)
        return fail(learner, GADEI_ERROR,
                    "which job? give its name, or start the program with gadei-ps run or attach "
                    "(they set GADEI_PS_JOB)");
    snprintf(learner->job, sizeof learner->job, "%s", job); /* until the watchdog says its name */
    if (!strchr(job, '/')) {
        int result = check_job_name(learner, job);
        return result ? result : find_socket(learner, job);
    }
    if (strlen(job) >= sizeof learner->path)
        return fail(learner, GADEI_ERROR, "%.128s: too long for a socket's path", job);
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
        return fail(learner, GADEI_ERROR, "no socket: %s", strerror(errno));
    /* For connect(), which waits while the watchdog's backlog is full. */
    setsockopt(learner->socket, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
    while (connect(learner->socket, (struct sockaddr *)&address, sizeof address)) {
        if (errno == EINTR)
            continue;
        if (errno == ENOENT || errno == ECONNREFUSED)
            return fail(learner, GADEI_ERROR,
                        "no job '%s' is running (looked at %s); gadei-ps ls shows the jobs there are",
                        learner->job, learner->path);
        return fail(learner, GADEI_ERROR, "%s: %s", learner->path, strerror(errno));
    }
    return GADEI_OK;
}

static int read_id(const char *text, uint8_t id[16])
{
    struct reader in = {text, text + strlen(text)};
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
        return fail(learner, GADEI_ERROR, "%s: not a segment's name", name);
    int fd = shm_open(name, writable ? O_RDWR : O_RDONLY, 0);
    if (fd < 0 && errno == ENOENT)
        return fail(learner, GADEI_FAILED,
                    "segment %s is gone; is /dev/shm shared with the daemon, and did logind remove "
                    "it (RemoveIPC)? gadei-ps doctor tells", name + 1);
    if (fd < 0 || fstat(fd, &status)) {
        int why = errno;
        if (fd >= 0)
            close(fd);
        return fail(learner, GADEI_ERROR, "%s: %s", name, strerror(why));
    }
    if ((uint64_t)status.st_size < least) {
        close(fd);
        return fail(learner, GADEI_ERROR, "%s: truncated (%lld bytes)", name,
                    (long long)status.st_size);
    }
    map->bytes = (size_t)status.st_size;
    void *at = mmap(NULL, map->bytes, PROT_READ | (writable ? PROT_WRITE : 0), MAP_SHARED, fd, 0);
    close(fd);
    if (at == MAP_FAILED)
        return fail(learner, GADEI_ERROR, "cannot map %s: %s", name, strerror(errno));
    map->at = at;
    const struct ps_header *header = at;
    if (ps_load_acquire(&header->magic) != PS_MAGIC)
        return fail(learner, GADEI_ERROR, "%s: not a gadei-ps segment, or only half made", name);
    if (header->layout_version != PS_LAYOUT_VERSION)
        return fail(learner, GADEI_ERROR,
                    "%s: layout version %u, this program speaks %u: use the same gadei-ps for the "
                    "daemon and the learners", name, header->layout_version, PS_LAYOUT_VERSION);
    if (header->kind != (uint32_t)kind)
        return fail(learner, GADEI_ERROR, "%s: is of kind %u, not %u", name, header->kind,
                    (unsigned)kind);
    if (header->bytes != map->bytes)
        return fail(learner, GADEI_ERROR, "%s: truncated (%zu bytes of %llu)", name, map->bytes,
                    (unsigned long long)header->bytes);
    if (memcmp(header->job_id, job_id, 16))
        return fail(learner, GADEI_ERROR, "%s: belongs to another incarnation of the job", name);
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
        return fail(learner, GADEI_ERROR, "the weights segment is damaged");
    const struct ps_tensor *row = (const struct ps_tensor *)((char *)map->at + head->table_at);
    learner->weights = (const float *)((char *)map->at + head->data_at);
    learner->elements = head->elements;
    learner->tensor_count = (uint32_t)head->tensors;
    learner->tensors = calloc(learner->tensor_count + 1, sizeof *learner->tensors);
    learner->written = calloc(learner->tensor_count + 1, 1);
    if (!learner->tensors || !learner->written)
        return fail(learner, GADEI_ERROR, "out of memory");
    for (uint32_t i = 0; i < learner->tensor_count; i++, row++) {
        if (row->count > learner->elements || row->start > learner->elements - row->count ||
            row->dims > PS_MAX_DIMS || !memchr(row->name, 0, sizeof row->name))
            return fail(learner, GADEI_ERROR, "the weights segment's table is damaged at row %u", i);
        struct gadei_tensor *tensor = &learner->tensors[i];
        *tensor = (struct gadei_tensor){.name = row->name, .role = row->role, .dims = row->dims,
                                        .start = row->start, .count = row->count};
        memcpy(tensor->shape, row->shape, sizeof tensor->shape);
    }
    return GADEI_OK;
}

static int check_ring(gadei_learner *learner)
{
    const struct ps_ring *ring = learner->ring_map.at;
    if (ring->header.index != learner->row || ring->header.generation != learner->generation ||
        learner->row >= PS_MAX_LEARNERS || ring->slots < 1 || ring->shards < 1 ||
        ring->shards > PS_MAX_SHARDS || ring->capacity / sizeof(float) < learner->elements ||
        ring->slot_bytes < PS_PAYLOAD_AT || ring->slot_bytes - PS_PAYLOAD_AT < ring->capacity ||
        ring->slots_at < sizeof *ring || ring->slots_at % 64 || ring->slot_bytes % 64 ||
        !inside(&learner->ring_map, ring->slots_at, ring->slots, ring->slot_bytes))
        return fail(learner, GADEI_ERROR, "the ring segment is damaged, or another learner's");
    return GADEI_OK;
}

static int ask_for_ring(gadei_learner *learner, const char *name)
{
    char quoted[6 * 31 + 3], json[256], id_text[33], control[NAME_BYTES], weights[NAME_BYTES],
        ring[NAME_BYTES];
    uint8_t id[16];
    uint64_t row;
    struct field fields[] = {
        {"job", TEXT, learner->job, sizeof learner->job, 0},
        {"job_id", TEXT, id_text, sizeof id_text, 0},
        {"row", NUMBER, &row, 0, 0},
        {"generation", NUMBER, &learner->generation, 0, 0},
        {"control", TEXT, control, sizeof control, 0},
        {"weights", TEXT, weights, sizeof weights, 0},
        {"ring", TEXT, ring, sizeof ring, 0},
    };
    quote(name, fitting(name, strlen(name), 31), quoted);
    snprintf(json, sizeof json, "{\"v\":1,\"op\":\"attach\",\"name\":%s}", quoted);
    int result = request(learner, json, fields, sizeof fields / sizeof fields[0]);
    if (result)
        return result;
    if (!read_id(id_text, id) || row >= PS_MAX_LEARNERS)
        return fail(learner, GADEI_ERROR, "%s: the reply has no proper job_id or row", learner->path);
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
    free(learner);
}

static void leave(gadei_learner *learner)
{
    char json[128];
    snprintf(json, sizeof json, "{\"v\":1,\"op\":\"detach\",\"row\":%u,\"generation\":%llu}",
             learner->row, (unsigned long long)learner->generation);
    request(learner, json, NULL, 0); /* if it fails, the job is gone or has let go of us already */
}

int gadei_attach(const char *job_or_socket, const char *name, gadei_learner **out)
{
    gadei_learner *learner = out ? calloc(1, sizeof *learner) : NULL;
    attach_error[0] = '\0';
    if (!learner) {
        snprintf(attach_error, sizeof attach_error, out ? "out of memory" : "no place for a learner");
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

/* -- the model ---------------------------------------------------------------------------------- */

const struct gadei_tensor *gadei_tensors(const gadei_learner *learner, uint32_t *count)
{
    if (count)
        *count = learner->tensor_count;
    return learner->tensors;
}

int gadei_find(gadei_learner *learner, const char *name)
{
    for (uint32_t i = 0; i < learner->tensor_count; i++)
        if (!strcmp(learner->tensors[i].name, name))
            return (int)i;
    return fail(learner, GADEI_ERROR, "the job's model has no tensor '%.120s'", name);
}

uint64_t gadei_elements(const gadei_learner *learner) { return learner->elements; }
const float *gadei_weights(const gadei_learner *learner) { return learner->weights; }
uint64_t gadei_published(const gadei_learner *learner) { return learner->published; }

uint64_t gadei_version(const gadei_learner *learner)
{
    const struct ps_control *control = learner->control_map.at;
    return ps_load_acquire(&control->version);
}

int gadei_stopping(const gadei_learner *learner)
{
    return ps_load_acquire32(&learner->control->stop) != PS_GO;
}

/* -- waiting ------------------------------------------------------------------------------------ */

/* When a process started, in clock ticks after boot; 0 if there is none, or only a zombie. */
static uint64_t start_ticks(int32_t pid)
{
    char path[32], text[1024];
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t count = fd < 0 ? -1 : read(fd, text, sizeof text - 1);
    if (fd >= 0)
        close(fd);
    if (count <= 0)
        return 0;
    text[count] = '\0';
    /* The second field is the program's name in parentheses and may hold blanks and parentheses. */
    char *at = strrchr(text, ')');
    if (!at || at[1] != ' ' || at[2] == 'Z' || at[2] == 'X')
        return 0;
    at += 2;
    for (int field = 3; field < 22; field++, at++)
        if (!(at = strchr(at, ' ')))
            return 0;
    return strtoull(at, NULL, 10);
}

static int server_lives(const gadei_learner *learner)
{
    int32_t pid = __atomic_load_n(&learner->control->lease_pid, __ATOMIC_RELAXED);
    uint64_t start = ps_load_acquire(&learner->control->lease_start);
    return pid > 0 && start && start_ticks(pid) == start;
}

static int try_turn(gadei_learner *learner, uint64_t ns)
{
    return ps_wait_grant(learner->ring, learner->control, learner->published, ns);
}

static int try_claim(gadei_learner *learner, uint64_t ns)
{
    int result;
    learner->slot = ps_claim(learner->ring, learner->control, ns, &result);
    return result;
}

static int try_applied(gadei_learner *learner, uint64_t ns)
{
    return ps_wait_applied(learner->ring, learner->control, learner->published - 1, ns);
}

static int try_work(gadei_learner *learner, uint64_t ns)
{
    return ps_take_work(learner->ring, learner->control, ns, &learner->item);
}

/* The part of each shard, whole chunks but for the very end, as in gadei_ps/layout.py. */
static int try_copy(gadei_learner *learner, uint64_t ns)
{
    const uint64_t end = ps_now_ns() + ns, chunks = (learner->elements + PS_CHUNK - 1) / PS_CHUNK;
    const uint32_t shards = learner->ring->shards;
    const struct timespec pause = {0, 20000};
    while (learner->copied < shards) {
        uint64_t low = chunks * learner->copied / shards * PS_CHUNK;
        uint64_t high = chunks * (learner->copied + 1) / shards * PS_CHUNK;
        if (high > learner->elements)
            high = learner->elements;
        if (ps_snapshot(learner->control, learner->copied, learner->copy_to + low,
                        learner->weights + low, (high - low) * sizeof(float)))
            learner->copied++;
        else if (ps_now_ns() >= end)
            return PS_TIMEOUT;
        else
            nanosleep(&pause, NULL);
    }
    return 0;
}

/* The job is over: GADEI_FAILED if that was not asked for, else `code`. */
static int ended(gadei_learner *learner, int code)
{
    if (ps_load_acquire32(&learner->control->phase) == PS_PHASE_FAILED)
        return fail(learner, GADEI_FAILED, "job '%s' has failed: its parameter server died",
                    learner->job);
    return fail(learner, code, "job '%s' has been stopped", learner->job);
}

/* Repeats an attempt in slices, looking between them whether the server lives. */
static int wait_for(gadei_learner *learner, int (*attempt)(gadei_learner *, uint64_t),
                    int64_t timeout_ms, const char *what)
{
    uint64_t now = ps_now_ns(), gone_since = 0;
    uint64_t limit_ms = timeout_ms < INT64_MAX / 4000000 ? (uint64_t)timeout_ms : INT64_MAX / 4000000;
    uint64_t until = timeout_ms < 0 ? UINT64_MAX : now + limit_ms * 1000000ull;
    for (;;) {
        uint64_t left = until > now ? until - now : 0;
        int result = attempt(learner, left < SLICE_NS ? left : SLICE_NS);
        if (!result || result == PS_FINISHED)
            return result;
        if (result == PS_STOPPED)
            return ended(learner, GADEI_STOPPED);
        if (result == PS_EVICTED)
            return fail(learner, GADEI_EVICTED, "job '%s' has given this learner's place away",
                        learner->job);
        now = ps_now_ns();
        if (server_lives(learner))
            gone_since = 0;
        else if (!gone_since)
            gone_since = now;
        else if (now - gone_since > GONE_NS)
            return fail(learner, GADEI_FAILED, "the parameter server of job '%s' is gone",
                        learner->job);
        if (now >= until)
            return fail(learner, GADEI_TIMEOUT, "%s within %lld ms", what, (long long)timeout_ms);
    }
}

/* -- pull and push ------------------------------------------------------------------------------ */

void gadei_pull(gadei_learner *learner, float *weights)
{
    learner->version = gadei_version(learner);
    memcpy(weights, learner->weights, learner->elements * sizeof(float));
}

int gadei_pull_consistent(gadei_learner *learner, float *weights, int64_t timeout_ms)
{
    uint64_t version = gadei_version(learner);
    learner->copy_to = weights;
    learner->copied = 0;
    learner->holds = learner->holds == UINT32_MAX ? 1 : learner->holds + 1;
    ps_store_release32(&learner->ring->hold, learner->holds);
    int result = wait_for(learner, try_copy, timeout_ms, "no consistent copy");
    ps_store_release32(&learner->ring->hold, 0);
    if (!result)
        learner->version = version;
    return result;
}

int gadei_set_wire(gadei_learner *learner, uint32_t dtype)
{
    if (dtype != GADEI_FLOAT32 && dtype != GADEI_BFLOAT16 && dtype != GADEI_FLOAT16)
        return fail(learner, GADEI_ERROR, "unknown number format %u", dtype);
    if (learner->claimed_once)
        return fail(learner, GADEI_ERROR, "the number format is chosen before the first claim");
    learner->wire = dtype;
    return GADEI_OK;
}

static int check_process(gadei_learner *learner)
{
    if (learner->pid == getpid())
        return GADEI_OK;
    return fail(learner, GADEI_ERROR, "this learner is the parent process's; attach after the fork");
}

int gadei_wait_turn(gadei_learner *learner, int64_t timeout_ms)
{
    int result = check_process(learner);
    if (!result)
        result = wait_for(learner, try_turn, timeout_ms, "no grant to go on");
    if (!result) {
        learner->version = gadei_version(learner);
        learner->started = ps_clock();
    }
    return result;
}

int gadei_claim(gadei_learner *learner, int64_t timeout_ms)
{
    learner->slot = NULL;
    int result = check_process(learner);
    uint64_t begin = ps_now_ns();
    if (!result)
        result = wait_for(learner, try_turn, timeout_ms, "no grant to go on");
    if (!result) {
        int64_t spent_ms = (int64_t)((ps_now_ns() - begin) / 1000000);
        if (timeout_ms >= 0)
            timeout_ms = timeout_ms > spent_ms ? timeout_ms - spent_ms : 0;
        result = wait_for(learner, try_claim, timeout_ms,
                          "no slot came free: does the server apply gradients?");
    }
    if (!result) {
        learner->claimed_once = 1;
        learner->nonfinite = 0;
        memset(learner->written, 0, learner->tensor_count);
    }
    return result;
}

static uint64_t width(const gadei_learner *learner)
{
    return learner->wire == PS_FLOAT32 ? 4 : 2;
}

static char *place(const gadei_learner *learner, const struct gadei_tensor *tensor)
{
    return (char *)learner->slot + PS_PAYLOAD_AT + tensor->start * width(learner);
}

int gadei_write(gadei_learner *learner, uint32_t index, const float *values)
{
    if (!learner->slot)
        return fail(learner, GADEI_ERROR, "no slot is claimed");
    if (index >= learner->tensor_count)
        return fail(learner, GADEI_ERROR, "no tensor %u: the model has %u", index,
                    learner->tensor_count);
    const struct gadei_tensor *tensor = &learner->tensors[index];
    int found = ps_copy(learner->wire, place(learner, tensor), values, tensor->count);
    learner->written[index] = 1;
    learner->nonfinite |= found;
    return found ? GADEI_NONFINITE : GADEI_OK;
}

int gadei_publish(gadei_learner *learner, double loss, uint32_t samples, float rate_scale)
{
    if (!learner->slot)
        return fail(learner, GADEI_ERROR, "no slot is claimed");
    if (check_process(learner))
        return GADEI_ERROR;
    if (!(rate_scale >= 0.0f && isfinite(rate_scale)))
        return fail(learner, GADEI_ERROR, "rate_scale is negative or not finite");
    for (uint32_t i = 0; i < learner->tensor_count; i++)
        if (!learner->written[i])
            memset(place(learner, &learner->tensors[i]), 0,
                   learner->tensors[i].count * width(learner));
    uint64_t batch = PS_NO_BATCH;
    if (learner->taken_count) {
        batch = learner->taken[learner->taken_first];
        learner->taken_first = (learner->taken_first + 1) % PS_AHEAD;
        learner->taken_count--;
    }
    *learner->slot = (struct ps_frame){
        .sequence = learner->published,
        .generation = learner->generation,
        .clock = learner->published,
        .version = learner->version,
        .kind = PS_DENSE,
        .dtype = learner->wire,
        .payload_bytes = learner->elements * width(learner),
        .flags = PS_CHECKED | (learner->nonfinite ? PS_NONFINITE : 0),
        .batch = batch,
        .samples = samples,
        .rate_scale = rate_scale,
        .loss = loss,
        .started = learner->started,
        .finished = ps_clock(),
    };
    learner->ring->pulled = learner->version;
    learner->slot = NULL;
    learner->published++;
    ps_publish(learner->ring, learner->control);
    return GADEI_OK;
}

int gadei_push(gadei_learner *learner, const float *gradient, double loss, uint32_t samples,
               int64_t timeout_ms)
{
    int result = gadei_claim(learner, timeout_ms);
    if (result)
        return result;
    for (uint32_t i = 0; i < learner->tensor_count; i++)
        gadei_write(learner, i, gradient + learner->tensors[i].start);
    result = gadei_publish(learner, loss, samples, 1.0f);
    return result ? result : learner->nonfinite ? GADEI_NONFINITE : GADEI_OK;
}

int gadei_wait_applied(gadei_learner *learner, int64_t timeout_ms)
{
    if (!learner->published)
        return GADEI_OK;
    return wait_for(learner, try_applied, timeout_ms, "the gradient was not applied");
}

/* -- batches ------------------------------------------------------------------------------------ */

int gadei_set_work(gadei_learner *learner, uint32_t batches, uint32_t epochs, uint64_t seed)
{
    char json[192];
    int result = check_process(learner);
    if (result)
        return result;
    snprintf(json, sizeof json,
             "{\"v\":1,\"op\":\"work\",\"batches\":%u,\"epochs\":%u,\"seed\":%llu}", batches, epochs,
             (unsigned long long)seed);
    return request(learner, json, NULL, 0);
}

int gadei_take_batch(gadei_learner *learner, uint32_t *epoch, uint32_t *index, int64_t timeout_ms)
{
    int result = check_process(learner);
    if (result)
        return result;
    if (learner->taken_count == PS_AHEAD)
        return fail(learner, GADEI_ERROR, "%d batches wait for their gradients", PS_AHEAD);
    result = wait_for(learner, try_work, timeout_ms, "no batch was handed out");
    if (result == GADEI_FINISHED || result == GADEI_STOPPED) {
        if (gadei_stopping(learner) || result == GADEI_STOPPED)
            return ended(learner, GADEI_FINISHED);
        return fail(learner, GADEI_FINISHED, "all batches of job '%s' are done", learner->job);
    }
    if (result)
        return result;
    learner->taken[(learner->taken_first + learner->taken_count++) % PS_AHEAD] = learner->item;
    *epoch = (uint32_t)(learner->item >> 32);
    *index = (uint32_t)learner->item;
    return GADEI_OK;
}
