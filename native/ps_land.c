/* See ps_land.h. */
#include "ps_land.h"

#include <sched.h>
#include <string.h>

static double sum_of(const uint64_t *words, uint64_t count)
{
    double sum = 0.0, part;
    for (uint64_t i = 0; i < count; i++) {
        memcpy(&part, words + i, sizeof part);
        sum += part;
    }
    return sum;
}

/* The device counts the rows that a mini-batch names while it writes them. Returns 0, or 1 + the number
 * of a tensor of which a row that was named does not exist. */
static uint64_t complete_blocks(char *payload, uint32_t blocks, const uint64_t *rows)
{
    for (uint32_t i = 0; i < blocks; i++) {
        struct ps_block block;
        memcpy(&block, payload + i * sizeof block, sizeof block);
        if (rows[block.tensor] == PS_BAD_ROWS)
            return 1 + block.tensor;
        if (block.form == PS_ROWS) {
            block.rows = rows[block.tensor];
            memcpy(payload + i * sizeof block, &block, sizeof block);
        }
    }
    return 0;
}

static void land(const struct ps_landing *landing)
{
    uint64_t *sums = landing->sums, *rows = sums + PS_SUMS_ROWS;
    struct ps_ring *ring = landing->ring;
    struct ps_frame frame = landing->frame;
    if (sums[PS_SUMS_BAD] == PS_NOT_LANDED)
        return;
    frame.squares = sum_of(rows + landing->tensors, landing->parts);
    frame.finished = ps_clock();
    if (landing->loss_there) {
        float loss;
        memcpy(&loss, sums + PS_SUMS_LOSS, sizeof loss);
        frame.loss = loss;
    }
    if (frame.kind == PS_ROWS)
        sums[PS_SUMS_BAD] =
            complete_blocks((char *)ps_slot(ring, frame.sequence) + PS_PAYLOAD_AT, frame.blocks, rows);
    if (sums[PS_SUMS_BAD]) { /* the learner reads this word, too; the frame carries no gradient */
        frame.kind = PS_EMPTY;
        frame.blocks = 1;
        frame.payload_bytes = 0;
    }
    ps_publish_frame(ring, landing->control, frame);
}

void ps_land(void *argument)
{
    const struct ps_landing *landing = argument;
    int entered;
    while ((entered = ps_enter(landing->calls, PS_PUSHING)) == PS_BUSY)
        sched_yield(); /* the thread that pushes is in a short call, or it detaches */
    if (entered == PS_LEFT)
        return;
    land(landing);
    if (!entered)
        ps_leave(landing->calls, PS_PUSHING);
}
