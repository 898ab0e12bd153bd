/*
 * Fuzzes an exchange between machines (native/mesh_exchange.c) against members that send anything.
 * Whatever comes, it must stay inside the caller's arrays, change no part that it held, and end; and
 * if it ends well, the result is that of what was sent.
 *
 * The input begins with a plan: members, parts, pieces, slots, and whether parts are summed or handed
 * over. Then come steps: a right frame of one of the others, one with a field or a bit changed, half
 * of one, one too many, or raw bytes. At last the others close their connections.
 */
#include <assert.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "input.h"
#include "mesh_state.h"

enum { OTHERS = 4, PARTS = 6, GENERATION = 7, ROUND = 3, VALUES = 1 << 10 };

static struct mesh_plan plan;
static int end[OTHERS];                     /* of the connection to each member: its own */
static uint64_t samples[OTHERS];            /* that each has told */
static uint32_t reduced[OTHERS], part[OTHERS], piece[OTHERS]; /* what each has sent rightly */
static int closing[OTHERS];
static int all_right; /* nothing but right frames has come */
static float *input, *out;

static float value(uint32_t member, uint64_t at) { return (float)(at % 97) - 31.5f * (float)member; }

static uint32_t next_part(uint32_t member, uint32_t from)
{
    return part_from(&plan, plan.want[member], from);
}

/* The plan, as gadei_ps/agents/plan.py makes it. */
static void make_plan(struct input *in)
{
    plan = (struct mesh_plan){.generation = GENERATION, .round = ROUND, .samples = next(in, 1)};
    plan.members = 2 + (uint32_t)next(in, 1) % (OTHERS - 1);
    plan.me = (uint32_t)next(in, 1) % plan.members;
    plan.reduce = (uint32_t)next(in, 1) % 2;
    plan.parts = plan.reduce ? plan.members : 1 + (uint32_t)next(in, 1) % PARTS;
    plan.piece = 16 + (uint32_t)next(in, 1) % 96; /* few enough that no connection gets full */
    plan.slots = 1 + (uint32_t)next(in, 1) % 3;
    plan.piece_ns = 1000000000000u;
    for (uint32_t i = 0; i < plan.parts; i++)
        plan.part_at[i + 1] = plan.part_at[i] + next(in, 1) % (VALUES / PARTS);
    for (uint32_t i = 0; i < plan.parts; i++) {
        uint32_t holder = plan.reduce ? i : (uint32_t)next(in, 1) % plan.members;
        uint64_t holds = plan.reduce ? (uint64_t)1 << i : next(in, 1) | (uint64_t)1 << holder;
        if (!plan.reduce && holds >> plan.me & 1)
            plan.held |= (uint64_t)1 << i;
        for (uint32_t other = 0; other < plan.members; other++)
            if (holder == plan.me && !(holds >> other & 1))
                plan.give[other] |= (uint64_t)1 << i;
        if (!(holds >> plan.me & 1))
            plan.want[holder] |= (uint64_t)1 << i;
    }
}

/* The next frame that a member is to send; returns its bytes. */
static size_t right_frame(uint32_t member, unsigned char *bytes)
{
    struct mesh_header header;
    uint32_t mine = plan.reduce ? pieces_of(&plan, plan.me) : 0;
    uint16_t kind = reduced[member] < mine ? MESH_REDUCE
                    : part[member] < plan.parts ? MESH_GATHER : MESH_DONE;
    mesh_write_header(&header, kind, GENERATION, ROUND, member);
    header.samples = samples[member];
    if (kind != MESH_DONE) {
        header.part = kind == MESH_REDUCE ? plan.me : part[member];
        header.piece = kind == MESH_REDUCE ? reduced[member] : piece[member];
        header.length = piece_bytes(&plan, header.part, header.piece);
    }
    uint64_t at = kind == MESH_DONE ? 0 : piece_at(&plan, header.part, header.piece);
    for (uint32_t i = 0; i < header.length / 4; i++) {
        float one = value(member, at + i);
        memcpy(bytes + sizeof header + 4 * i, &one, 4);
    }
    mesh_seal_header(&header, header.length ? mesh_checksum(bytes + sizeof header, header.length) : 0);
    memcpy(bytes, &header, sizeof header);
    if (kind == MESH_REDUCE) {
        reduced[member]++;
    } else if (kind == MESH_GATHER) {
        if (++piece[member] == pieces_of(&plan, part[member])) {
            part[member] = next_part(member, part[member] + 1);
            piece[member] = 0;
        }
    } else {
        closing[member] = 1;
    }
    return sizeof header + header.length;
}

static void say(uint32_t member, const void *bytes, size_t count)
{
    ssize_t sent = send(end[member], bytes, count, MSG_DONTWAIT | MSG_NOSIGNAL);
    assert(sent == (ssize_t)count || !all_right);
}

/* A field of the header is another one, and its checksum fits. */
static void change_field(struct input *in, unsigned char *bytes)
{
    struct mesh_header header;
    memcpy(&header, bytes, sizeof header);
    uint64_t other = next(in, 8);
    switch (next(in, 1) % 9) {
    case 0: header.kind = (uint16_t)other; break;
    case 1: header.generation = other; break;
    case 2: header.round = other; break;
    case 3: header.samples = other; break;
    case 4: header.part = (uint32_t)other; break;
    case 5: header.piece = (uint32_t)other; break;
    case 6: header.length = (uint32_t)other; break;
    case 7: header.sender = (uint32_t)other; break;
    default: header.payload_sum = (uint32_t)other;
    }
    mesh_seal_header(&header, header.payload_sum);
    memcpy(bytes, &header, sizeof header);
}

/* A piece of a sum that has all its pieces. */
static size_t one_too_many(uint32_t member, unsigned char *bytes)
{
    struct mesh_header header;
    mesh_write_header(&header, MESH_REDUCE, GENERATION, ROUND, member);
    header.samples = samples[member];
    header.part = plan.me;
    header.piece = reduced[member];
    header.length = 4 * plan.piece;
    memset(bytes + sizeof header, 0, header.length);
    mesh_seal_header(&header, mesh_checksum(bytes + sizeof header, header.length));
    memcpy(bytes, &header, sizeof header);
    return sizeof header + header.length;
}

static int step(struct input *in)
{
    static unsigned char bytes[sizeof(struct mesh_header) + 4 * VALUES];
    uint32_t member = (uint32_t)next(in, 1) % plan.members;
    uint64_t kind = next(in, 1) % 8;
    if (member == plan.me || closing[member])
        return 1;
    if (kind == 7) {
        all_right = 0;
        size_t count = next(in, 1);
        count = count < in->left ? count : in->left;
        say(member, in->at, count);
        in->at += count;
        in->left -= count;
        return 0;
    }
    if (kind < 4) { /* several right ones */
        for (uint64_t more = 0; more <= kind && !closing[member]; more++)
            say(member, bytes, right_frame(member, bytes));
        return 1;
    }
    all_right = 0;
    if (kind == 6) {
        say(member, bytes, one_too_many(member, bytes));
        return 0;
    }
    size_t count = right_frame(member, bytes);
    if (kind == 4)
        change_field(in, bytes);
    else if (next(in, 1) % 2)
        bytes[next(in, 2) % count] ^= (unsigned char)next(in, 1);
    else
        count = next(in, 2) % (count + 1);
    say(member, bytes, count);
    return 0;
}

/* The result, when nothing but right frames has come. */
static void check_result(void)
{
    for (uint32_t i = 0; i < plan.parts; i++) {
        uint32_t holder = i;
        for (uint32_t other = 0; !plan.reduce && other < plan.members; other++)
            if (plan.want[other] >> i & 1)
                holder = other;
        int wanted = plan.want[holder] >> i & 1;
        for (uint64_t at = plan.part_at[i]; at < plan.part_at[i + 1]; at++)
            assert(!wanted || out[at] == value(holder, at));
    }
    if (!plan.reduce)
        return;
    uint64_t from = plan.part_at[plan.me], count = plan.part_at[plan.me + 1] - from;
    double total = 0;
    for (uint32_t i = 0; i < plan.members; i++)
        total += (double)samples[i];
    for (uint64_t at = from; at < from + count; at++) {
        float sum = 0;
        for (uint32_t i = 0; i < plan.members; i++) {
            float weight = (float)(total > 0 ? (double)samples[i] / total : 1.0 / plan.members);
            float one = weight * (i == plan.me ? input[at] : value(i, at));
            sum = i ? sum + one : one;
        }
        assert(out[at] == sum);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct input in = {data, size};
    make_plan(&in);
    uint64_t values = plan.part_at[plan.parts];
    input = malloc(4 * values + 1);
    out = malloc(4 * values + 1);
    plan.scratch = malloc(4 * (size_t)plan.members * plan.slots * plan.piece);
    for (uint64_t at = 0; at < values; at++)
        input[at] = value(plan.me, at), out[at] = 0.25f;
    plan.input = input;
    plan.out = out;
    plan.wake = eventfd(0, EFD_CLOEXEC);
    for (uint32_t i = 0; i < plan.members; i++) {
        samples[i] = i == plan.me ? plan.samples : next(&in, 1);
        reduced[i] = piece[i] = 0;
        closing[i] = 0;
        part[i] = next_part(i, 0);
        int pair[2] = {-1, -1};
        if (i != plan.me && socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair))
            abort();
        plan.fd[i] = pair[0];
        end[i] = pair[1];
    }
    uint64_t held = plan.held;
    all_right = 1;
    while (in.left)
        all_right &= step(&in);
    for (uint32_t i = 0; i < plan.members; i++)
        if (i != plan.me)
            shutdown(end[i], SHUT_WR);
    struct mesh_exchange *exchange = mesh_begin(&plan);
    enum mesh_result result = mesh_run(exchange);
    mesh_end(exchange);
    assert(result >= MESH_CLOSED || result == MESH_FINISHED);
    assert(result == MESH_FINISHED || (plan.culprit >= 0 && plan.culprit < (int)plan.members));
    assert(result != MESH_SILENT && result != MESH_ABSENT && result != MESH_FAILED);
    assert((plan.held & held) == held);
    for (uint32_t i = 0; i < plan.parts; i++)
        for (uint64_t at = plan.part_at[i]; held >> i & 1 && at < plan.part_at[i + 1]; at++)
            assert(out[at] == 0.25f);
    if (result == MESH_FINISHED && all_right)
        check_result();
    int all = 1;
    for (uint32_t i = 0; i < plan.members; i++)
        all &= i == plan.me || closing[i];
    assert(!all_right || !all || result == MESH_FINISHED); /* each has sent what it was to send */
    for (uint32_t i = 0; i < plan.members; i++)
        if (i != plan.me) {
            close(plan.fd[i]);
            close(end[i]);
        }
    close(plan.wake);
    free(plan.scratch);
    free(out);
    free(input);
    return 0;
}
