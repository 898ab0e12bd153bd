/* The images of a count: their hashes, which are known, and the queue of those to recover. */
#ifndef STEPS_IMAGES_H
#define STEPS_IMAGES_H

#include <setjmp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define PAGE 4096
#define LINE 64
#define MOST_PAGES 256 /* that are ever stored into */
#define DEPTHS 16

/* How a run ended. */
enum { RESTED, CRASHED, ENDLESS, RAISED, NOT_READY, DIFFERENT, TOO_MUCH, NO_IMAGE };

/* Compiled code of recover.py and shard.py, as Numba calls it. */
typedef int32_t (*entry)(int64_t *result, void **error, void *info, void *parent, int64_t items,
                         int64_t item_bytes, void *data, int64_t shape, int64_t stride);

/* Private memory of the shard, which a new process makes again. */
struct private {
    uint8_t *at;
    const uint8_t *fresh;
    uint64_t bytes;
};

/* Input from Python; all arrays are its. Offsets are bytes from the begin of the first segment. */
struct setting {
    uint8_t *guarded, *open; /* see map_again */
    uint64_t bytes;
    uint8_t *base, *shadow, *final; /* each as long as the segments */
    const uint64_t *keep;           /* a mask for each word: bits that distinguish images */
    const uint64_t *equal;          /* a mask for each word: bits that must be right at rest */
    const uint64_t *lines;          /* offsets of lines of `runs`, of which a death may cost one */
    uint64_t line_count;
    uint64_t cursor, spans; /* offsets in the shard's record */
    uint64_t idle;          /* from this value on a cursor names no chunk */
    uint64_t chunk;         /* values of a whole one */
    uint64_t undo, half;    /* offset of the shard's undo log; bytes of a half */
    struct private private[2];
    entry can_recover, recover, serve;
    void *part;
    uint64_t part_bytes;
    uint64_t obeyed;   /* offset of the shard's `mode` */
    uint64_t sleepers; /* offset, and the shard's bit */
    uint64_t sleeper;
    uint64_t bell; /* offset */
    uint64_t *quit;
    uint64_t released; /* offset of a futex in that ring, on which its learner sleeps */
    uint64_t ring, ring_bytes; /* offset of the first learner's ring */
    uint64_t *broken;          /* word of the board: `generation` there says that it is damaged */
    uint64_t generation;
    uint64_t damaged; /* offset of the same in its learner's entry */
};

struct told {
    uint64_t instructions, stores, images, wrong, runs, lost_lines;
    uint64_t deaths[DEPTHS]; /* images by the number of deaths on the way to them */
    /* Of the last run. */
    uint64_t depth, ordinal, offset, in_hand;
};

struct image {
    uint64_t hash[2];
    uint32_t depth, lines, ordinal;
    uint8_t *data; /* for each LINE that differs from the base: its number, its bytes */
};

struct set {
    uint64_t (*of)[2], room, count;
};

static struct setting it;
static struct told told;
static struct image *queue;
static uint64_t queued, taken, room;
static struct set seen, served;
static uint32_t touched[MOST_PAGES];
static uint64_t touched_count;
static uint8_t *is_touched;
static uint64_t hash[2]; /* of what the segments hold; of the base it is 1, for 0 means none */
static uint64_t depth;   /* deaths before this run */
static sigjmp_buf out;

static uint64_t mixed(uint64_t x)
{
    x += 0x9e3779b97f4a7c15ull;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

/* A word's share of the hash, which is the exclusive or of the shares of all words that are not as
 * in the base, and of what these are there. */
static void toggle(uint64_t word, uint64_t value)
{
    uint64_t first = mixed(value ^ mixed(word));
    hash[0] ^= first;
    hash[1] ^= mixed(first + mixed(~word) + (value << 1));
}

/* Adds a hash to a set; whether it was not in it. */
static int add(struct set *set, const uint64_t *one)
{
    if (2 * set->count >= set->room) {
        struct set more = {.room = set->room ? 2 * set->room : 1 << 12};
        more.of = calloc(more.room, sizeof *more.of);
        if (!more.of)
            siglongjmp(out, TOO_MUCH);
        for (uint64_t i = 0; i < set->room; i++)
            if (set->of[i][0] | set->of[i][1])
                add(&more, set->of[i]);
        free(set->of);
        *set = more;
    }
    uint64_t at = one[0] & (set->room - 1);
    for (; set->of[at][0] | set->of[at][1]; at = (at + 1) & (set->room - 1))
        if (set->of[at][0] == one[0] && set->of[at][1] == one[1])
            return 0;
    memcpy(set->of[at], one, sizeof *set->of);
    set->count++;
    return 1;
}

static int has(const struct set *set, const uint64_t *one)
{
    if (!set->room)
        return 0;
    for (uint64_t at = one[0] & (set->room - 1); set->of[at][0] | set->of[at][1];
         at = (at + 1) & (set->room - 1))
        if (set->of[at][0] == one[0] && set->of[at][1] == one[1])
            return 1;
    return 0;
}

static void drop(struct set *set)
{
    free(set->of);
    *set = (struct set){0};
}

static uint64_t word_of(const uint8_t *segments, uint64_t at)
{
    return *(const uint64_t *)(segments + at);
}

/* Takes words out of the hash: as if they were as in the base. */
static void leave_out(uint64_t at, int words)
{
    for (uint64_t end = at + 8ull * words; at < end; at += 8) {
        uint64_t mask = it.keep[at / 8], now = word_of(it.open, at) & mask;
        uint64_t base = word_of(it.base, at) & mask;
        if (now != base) {
            toggle(at / 8, base);
            toggle(at / 8, now);
        }
    }
}

/* Takes the place of the open chunk into the hash, as chunks.reopen() reads it: which of the two
 * spans shows it does not matter. */
static void take_open_chunk(uint64_t piece)
{
    uint64_t first = word_of(it.open, it.spans), second = word_of(it.open, it.spans + 24);
    uint64_t at = it.spans + (second <= piece && (first > piece || second > first) ? 24 : 0);
    uint64_t start = word_of(it.open, at + 8) + (piece - word_of(it.open, at)) * it.chunk;
    uint64_t left = word_of(it.open, at + 16) - start;
    toggle(it.bytes / 8, start);
    toggle(it.bytes / 8 + 1, left < it.chunk ? left : it.chunk);
}

/* The hash of an image without what no recovery reads: spans that do not show where the open chunk
 * is, halves of the undo log that do not hold it, and the times of iterations. */
static void identity(uint64_t *to)
{
    uint64_t whole[2] = {hash[0], hash[1]};
    uint64_t cursor = word_of(it.open, it.cursor);
    int is_open = cursor != 0 && cursor < it.idle;
    leave_out(it.spans, 6);
    if (is_open)
        take_open_chunk(cursor >> 1);
    for (uint64_t half = 0; half < 2; half++)
        if (!is_open || (cursor >> 1 & 1) != half)
            leave_out(it.undo + half * it.half, (int)it.half / 8);
    for (uint64_t i = 0; i < it.line_count; i++)
        leave_out(it.lines[i], 4);
    memcpy(to, hash, sizeof hash);
    memcpy(hash, whole, sizeof hash);
}

/* Whether an image was not seen before. Of the first run, those count too that differ in nothing
 * but that. */
static int is_new(void)
{
    uint64_t one[2];
    identity(one);
    int is_other = add(&seen, one);
    return depth ? is_other : add(&seen, hash) | is_other;
}

static void touch(uint64_t page)
{
    if (is_touched[page])
        return;
    if (touched_count == MOST_PAGES)
        siglongjmp(out, TOO_MUCH);
    is_touched[page] = 1;
    touched[touched_count++] = (uint32_t)page;
}

/* The image as it is now joins the queue. */
static void keep_image(uint64_t ordinal)
{
    static uint8_t data[MOST_PAGES * PAGE / LINE * (LINE + 4)];
    uint32_t lines = 0;
    for (uint64_t i = 0; i < touched_count; i++) {
        uint64_t page = (uint64_t)touched[i] * PAGE;
        for (uint64_t at = page; at < page + PAGE; at += LINE) {
            if (!memcmp(it.open + at, it.base + at, LINE))
                continue;
            uint32_t number = (uint32_t)(at / LINE);
            uint64_t line[LINE / 8];
            for (uint64_t k = 0; k < LINE / 8; k++) {
                uint64_t mask = it.keep[at / 8 + k];
                line[k] = (word_of(it.open, at + 8 * k) & mask) |
                          (word_of(it.base, at + 8 * k) & ~mask);
            }
            memcpy(data + lines * (LINE + 4ull), &number, 4);
            memcpy(data + lines * (LINE + 4ull) + 4, line, LINE);
            lines++;
        }
    }
    if (queued == room) {
        room = room ? 2 * room : 4096;
        struct image *more = realloc(queue, room * sizeof *queue);
        if (!more)
            siglongjmp(out, TOO_MUCH);
        queue = more;
    }
    struct image *one = &queue[queued++];
    *one = (struct image){{hash[0], hash[1]}, (uint32_t)depth + 1, lines, (uint32_t)ordinal,
                          malloc(lines * (LINE + 4ull) + 1)};
    if (!one->data)
        siglongjmp(out, TOO_MUCH);
    memcpy(one->data, data, lines * (LINE + 4ull));
    told.images++;
    told.deaths[one->depth < DEPTHS ? one->depth : DEPTHS - 1]++;
}

/* The base, or an image, becomes the content of the segments. */
static void put_back(const struct image *one)
{
    for (uint64_t i = 0; i < touched_count; i++) {
        uint64_t at = (uint64_t)touched[i] * PAGE;
        memcpy(it.open + at, it.base + at, PAGE);
        memcpy(it.shadow + at, it.base + at, PAGE);
    }
    hash[0] = hash[1] = 1;
    if (!one)
        return;
    for (uint32_t i = 0; i < one->lines; i++) {
        uint32_t number;
        const uint8_t *data = one->data + i * (LINE + 4ull);
        memcpy(&number, data, 4);
        memcpy(it.open + (uint64_t)number * LINE, data + 4, LINE);
        memcpy(it.shadow + (uint64_t)number * LINE, data + 4, LINE);
    }
    memcpy(hash, one->hash, sizeof hash);
}

/* Takes what was stored into words first to end - 1 into the hash; whether the image is another one
 * than before. */
static int look(uint64_t first, uint64_t end)
{
    uint64_t *now = (uint64_t *)it.open, *before = (uint64_t *)it.shadow;
    int changed = 0;
    for (uint64_t word = first; word < end; word++) {
        if ((now[word] ^ before[word]) & it.keep[word]) {
            toggle(word, before[word] & it.keep[word]);
            toggle(word, now[word] & it.keep[word]);
            changed = 1;
        }
        before[word] = now[word];
    }
    return changed;
}

/* Whether this server has woken the learner: it must, as it cannot know what the one before did. */
static int is_woken(void)
{
    told.offset = it.released;
    return *(uint32_t *)(it.open + it.released) != *(uint32_t *)(it.base + it.released);
}

/* What a run has left beside what is right; if it is not at rest yet, only the times. */
static int compare(int at_rest)
{
    if (at_rest && !is_woken())
        return DIFFERENT;
    for (uint64_t i = 0; at_rest && i < touched_count; i++) {
        uint64_t first = (uint64_t)touched[i] * PAGE / 8;
        const uint64_t *now = (const uint64_t *)it.open, *right = (const uint64_t *)it.final;
        for (uint64_t word = first; word < first + PAGE / 8; word++)
            if ((now[word] ^ right[word]) & it.equal[word]) {
                told.offset = word * 8;
                return DIFFERENT;
            }
    }
    for (uint64_t i = 0; i < it.line_count; i++) {
        uint64_t at = it.lines[i];
        if (!memcmp(it.open + at, it.final + at, 32))
            continue;
        if (word_of(it.open, at) && memcmp(it.open + at, it.base + at, 32)) {
            told.offset = at;
            return DIFFERENT;
        }
        told.lost_lines++;
    }
    return RESTED;
}

#endif
