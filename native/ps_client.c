/*
 * A learner in C at work: pull, push, batches; see gadei.h. Every wait comes back at least each
 * SLICE_NS to look whether the server lives. learners/client.py does the same in Python.
 */
#include "ps_client.h"

#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "ps_sync.h"

#define SLICE_NS 100000000ull /* how long a wait may sleep before it looks for the server */
#define LONGEST_MS 1000000000000 /* thirty years: no sum of it overflows */
#define GONE_NS 10000000000ull /* how long a job may be without server and watchdog */

static_assert((int)GADEI_TIMEOUT == PS_TIMEOUT && (int)GADEI_STOPPED == PS_STOPPED &&
              (int)GADEI_EVICTED == PS_EVICTED && (int)GADEI_FINISHED == PS_FINISHED, "results");
static_assert((int)GADEI_FLOAT32 == PS_FLOAT32 && (int)GADEI_BFLOAT16 == PS_BFLOAT16 &&
              (int)GADEI_FLOAT16 == PS_FLOAT16 && GADEI_MAX_DIMS == PS_MAX_DIMS, "formats");

/* -- the model --------------------------------------------------------------------------------- */

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
    return ps_fail(learner, GADEI_ERROR, "the job's model has no tensor '%.120s'", name);
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

/* -- waiting ----------------------------------------------------------------------------------- */

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

static int alive(const int32_t *pid_word, const uint64_t *start_word)
{
    int32_t pid = __atomic_load_n(pid_word, __ATOMIC_RELAXED);
    uint64_t start = ps_load_acquire(start_word);
    return pid > 0 && start && start_ticks(pid) == start;
}

/* Whether a server serves, or somebody is there to start one. */
static int job_lives(const gadei_learner *learner)
{
    const struct ps_control *control = learner->control;
    return alive(&control->lease_pid, &control->lease_start) ||
           alive(&control->watchdog_pid, &control->watchdog_start);
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

/* The part of each shard, whole chunks but for the very end, as in gadei_ps/memory/layout.py. */
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
        return ps_fail(learner, GADEI_FAILED, "job '%s' has failed: its parameter server died",
                       learner->job);
    return ps_fail(learner, code, "job '%s' has been stopped", learner->job);
}

/* Repeats an attempt in slices, looking between them whether the server lives. */
static int wait_for(gadei_learner *learner, int (*attempt)(gadei_learner *, uint64_t),
                    int64_t timeout_ms, const char *what)
{
    uint64_t now = ps_now_ns();
    uint64_t limit_ms = timeout_ms < LONGEST_MS ? (uint64_t)timeout_ms : LONGEST_MS;
    uint64_t until = timeout_ms < 0 ? UINT64_MAX : now + limit_ms * 1000000ull;
    for (;;) {
        uint64_t left = until > now ? until - now : 0;
        int result = attempt(learner, left < SLICE_NS ? left : SLICE_NS);
        if (!result || result == PS_FINISHED) {
            learner->gone_since = 0;
            return result;
        }
        if (result == PS_STOPPED)
            return ended(learner, GADEI_STOPPED);
        if (result == PS_EVICTED)
            return ps_fail(learner, GADEI_EVICTED, "job '%s' has given this learner's place away",
                           learner->job);
        now = ps_now_ns();
        if (job_lives(learner))
            learner->gone_since = 0;
        else if (!learner->gone_since)
            learner->gone_since = now;
        else if (now - learner->gone_since > GONE_NS)
            return ps_fail(learner, GADEI_FAILED,
                           "the server and the watchdog of job '%s' are gone", learner->job);
        if (now >= until)
            return ps_fail(learner, GADEI_TIMEOUT, "%s within %lld ms", what,
                           (long long)timeout_ms);
    }
}

/* -- pull and push ----------------------------------------------------------------------------- */

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
        return ps_fail(learner, GADEI_ERROR, "unknown number format %u", dtype);
    if (learner->claimed_once)
        return ps_fail(learner, GADEI_ERROR, "the number format is chosen before the first claim");
    learner->wire = dtype;
    return GADEI_OK;
}

static int check_process(gadei_learner *learner)
{
    if (learner->pid == getpid())
        return GADEI_OK;
    return ps_fail(learner, GADEI_ERROR,
                   "this learner is the parent process's; attach after the fork");
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

static int claim(gadei_learner *learner, int64_t timeout_ms, int rows)
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
        learner->rows = rows;
        learner->payload = (struct ps_payload){
            .at = (char *)learner->slot + PS_PAYLOAD_AT,
            .dtype = learner->wire,
            .end = (learner->tensor_count * sizeof(struct ps_block) + 63) & ~63ull,
        };
        memset(learner->written, 0, learner->tensor_count);
    }
    return result;
}

int gadei_claim(gadei_learner *learner, int64_t timeout_ms)
{
    return claim(learner, timeout_ms, 0);
}

int gadei_claim_rows(gadei_learner *learner, int64_t timeout_ms)
{
    return claim(learner, timeout_ms, 1);
}

static uint64_t width(const gadei_learner *learner)
{
    return learner->wire == PS_FLOAT32 ? 4 : 2;
}

static char *place(const gadei_learner *learner, const struct gadei_tensor *tensor)
{
    return (char *)learner->slot + PS_PAYLOAD_AT + tensor->start * width(learner);
}

static int check_tensor(gadei_learner *learner, uint32_t index)
{
    if (!learner->slot)
        return ps_fail(learner, GADEI_ERROR, "no slot is claimed");
    if (index >= learner->tensor_count)
        return ps_fail(learner, GADEI_ERROR, "no tensor %u: the model has %u", index,
                       learner->tensor_count);
    if (learner->rows && learner->written[index])
        return ps_fail(learner, GADEI_ERROR, "tensor %u is written already", index);
    return GADEI_OK;
}

/* Writes a tensor, or rows of it, into the claimed slot. */
static int write_tensor(gadei_learner *learner, uint32_t index, const struct ps_gradient *gradient)
{
    const struct gadei_tensor *tensor = &learner->tensors[index];
    uint64_t rows = tensor->dims ? tensor->shape[0] : 1, bad = 0;
    int result = 0;
    learner->payload.squares = 0.0;
    if (learner->rows) {
        struct ps_shape shape = {rows, tensor->count / rows, NULL};
        result = ps_write_block(&learner->payload, &learner->blocks[index], gradient, &shape, 0, &bad);
    } else {
        learner->payload.squares = ps_copy(learner->wire, place(learner, tensor), gradient->values,
                                           tensor->count, NULL);
    }
    int found = !isfinite(learner->payload.squares);
    learner->squares[index] = learner->payload.squares;
    if (tensor->role == GADEI_BUFFER)
        learner->squares[index] = ps_not_counted(0.0, learner->payload.squares);
    if (result == PS_BAD_ROW)
        return ps_fail(learner, GADEI_ERROR, "tensor '%s' has no row %lld: it has %llu",
                       tensor->name, (long long)gradient->indices[bad], (unsigned long long)rows);
    if (result == PS_NO_MEMORY)
        return ps_fail(learner, GADEI_ERROR, "no memory to sort %llu rows",
                       (unsigned long long)gradient->count);
    learner->written[index] = 1;
    return found ? GADEI_NONFINITE : GADEI_OK;
}

int gadei_write(gadei_learner *learner, uint32_t index, const float *values)
{
    if (check_tensor(learner, index))
        return GADEI_ERROR;
    return write_tensor(learner, index, &(struct ps_gradient){.values = values});
}

int gadei_write_rows(gadei_learner *learner, uint32_t index, const int64_t *indices,
                     const float *values, uint64_t count)
{
    static const int64_t none; /* no rows at all are rows too */
    if (check_tensor(learner, index))
        return GADEI_ERROR;
    if (!learner->rows)
        return ps_fail(learner, GADEI_ERROR, "rows go into a slot of gadei_claim_rows");
    struct ps_gradient gradient = {values, count ? indices : &none, count, NULL};
    return write_tensor(learner, index, &gradient);
}

/* Writes the blocks of what is written, in the table's order; how many. */
static uint32_t write_blocks(gadei_learner *learner)
{
    struct ps_block *blocks = (struct ps_block *)(void *)learner->payload.at;
    uint32_t count = 0;
    for (uint32_t i = 0; i < learner->tensor_count; i++) {
        if (learner->written[i]) {
            learner->blocks[i].tensor = i;
            blocks[count++] = learner->blocks[i];
        }
    }
    return count;
}

/* Makes the claimed slot visible: fills in what every frame says of its learner. */
static void publish(gadei_learner *learner, struct ps_frame frame)
{
    frame.batch = PS_NO_BATCH;
    if (learner->taken_count) {
        frame.batch = learner->taken[learner->taken_first];
        learner->taken_first = (learner->taken_first + 1) % PS_AHEAD;
        learner->taken_count--;
    }
    frame.sequence = frame.clock = learner->published;
    frame.generation = learner->generation;
    frame.version = learner->version;
    frame.dtype = learner->wire;
    frame.flags = PS_CHECKED | (isfinite(frame.squares) ? 0 : PS_NONFINITE);
    frame.started = learner->started;
    frame.finished = ps_clock();
    *learner->slot = frame;
    learner->ring->pulled = learner->version;
    learner->slot = NULL;
    learner->published++;
    ps_publish(learner->ring, learner->control);
}

int gadei_publish(gadei_learner *learner, double loss, uint32_t samples, float rate_scale)
{
    if (!learner->slot)
        return ps_fail(learner, GADEI_ERROR, "no slot is claimed");
    if (check_process(learner))
        return GADEI_ERROR;
    if (!(rate_scale >= 0.0f && isfinite(rate_scale)))
        return ps_fail(learner, GADEI_ERROR, "rate_scale is negative or not finite");
    uint32_t blocks = learner->rows ? write_blocks(learner) : 0;
    for (uint32_t i = 0; i < learner->tensor_count && !learner->rows; i++)
        if (!learner->written[i])
            memset(place(learner, &learner->tensors[i]), 0,
                   learner->tensors[i].count * width(learner));
    double squares = 0.0;
    for (uint32_t i = 0; i < learner->tensor_count; i++)
        squares += learner->written[i] ? learner->squares[i] : 0.0;
    publish(learner, (struct ps_frame){
        .kind = learner->rows ? PS_ROWS : PS_DENSE,
        .blocks = blocks,
        .payload_bytes = learner->rows ? learner->payload.end : learner->elements * width(learner),
        .squares = squares,
        .samples = samples,
        .rate_scale = rate_scale,
        .loss = loss,
    });
    return GADEI_OK;
}

int gadei_wanted(const gadei_learner *learner)
{
    const struct ps_entry *entry = &learner->control->roster[learner->row];
    return learner->published >= ps_load_acquire(&entry->obsolete);
}

uint32_t gadei_wave(const gadei_learner *learner)
{
    uint64_t wave = ps_load_acquire(&learner->control->wave);
    return wave ? (uint32_t)wave : 1;
}

/* computed: 1 where its run time is that of a whole iteration. */
static int publish_nothing(gadei_learner *learner, uint32_t computed, int64_t timeout_ms)
{
    int result = gadei_claim_rows(learner, timeout_ms);
    if (!result)
        publish(learner, (struct ps_frame){
            .kind = PS_EMPTY, .blocks = computed, .rate_scale = 1.0f, .loss = NAN});
    return result;
}

int gadei_give_up(gadei_learner *learner, int64_t timeout_ms)
{
    return publish_nothing(learner, 0, timeout_ms);
}

int gadei_push(gadei_learner *learner, const float *gradient, double loss, uint32_t samples,
               int64_t timeout_ms)
{
    if (!gadei_wanted(learner))
        return publish_nothing(learner, 1, timeout_ms);
    int result = gadei_claim(learner, timeout_ms);
    if (result)
        return result;
    int found = GADEI_OK;
    for (uint32_t i = 0; i < learner->tensor_count; i++)
        found |= gadei_write(learner, i, gradient + learner->tensors[i].start);
    result = gadei_publish(learner, loss, samples, 1.0f);
    return result ? result : found;
}

int gadei_wait_applied(gadei_learner *learner, int64_t timeout_ms)
{
    if (!learner->published)
        return GADEI_OK;
    return wait_for(learner, try_applied, timeout_ms, "the gradient was not applied");
}

/* -- batches ----------------------------------------------------------------------------------- */

int gadei_set_work(gadei_learner *learner, uint32_t batches, uint32_t epochs, uint64_t seed)
{
    char json[192];
    int result = check_process(learner);
    if (result)
        return result;
    snprintf(json, sizeof json,
             "{\"v\":1,\"op\":\"work\",\"batches\":%u,\"epochs\":%u,\"seed\":%llu}", batches,
             epochs, (unsigned long long)seed);
    return ps_request(learner, json, NULL, 0);
}

int gadei_take_batch(gadei_learner *learner, uint32_t *epoch, uint32_t *index, int64_t timeout_ms)
{
    int result = check_process(learner);
    if (result)
        return result;
    if (learner->taken_count == PS_AHEAD)
        return ps_fail(learner, GADEI_ERROR, "%d batches wait for their gradients", PS_AHEAD);
    result = wait_for(learner, try_work, timeout_ms, "no batch was handed out");
    if (result == GADEI_FINISHED || result == GADEI_STOPPED) {
        if (gadei_stopping(learner) || result == GADEI_STOPPED)
            return ended(learner, GADEI_FINISHED);
        return ps_fail(learner, GADEI_FINISHED, "all batches of job '%s' are done", learner->job);
    }
    if (result)
        return result;
    learner->taken[(learner->taken_first + learner->taken_count++) % PS_AHEAD] = learner->item;
    *epoch = (uint32_t)(learner->item >> 32);
    *index = (uint32_t)learner->item;
    return GADEI_OK;
}
