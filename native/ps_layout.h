/*
 * The memory that the processes of a job share: one set of POSIX segments, native byte order.
 *
 *   control   lease, shard states, roster, ledger, counters     server rw    learner r
 *   weights   tensor table, then the weights, float32           server rw    learner r
 *   state     optimizer slots, undo logs, applied sequences     server rw
 *   ring.K    one learner's gradient ring and its own words     server rw    learner rw
 *
 * The watchdog makes them all, so it maps them rw; after that it writes control only.
 * This file holds offsets and no behaviour. gadei_ps/memory/layout.py says the same as NumPy dtypes and
 * a test compares the two field by field. A word has one writer, named beside it:
 * W watchdog, S server, 0 the thread of shard 0, L the learner that owns the ring.
 * Words that different processes write stand on different cache lines.
 */
#ifndef PS_LAYOUT_H
#define PS_LAYOUT_H

#include <assert.h>
#include <stddef.h>
#include <stdint.h>

#define PS_MAGIC 0x53504945444147ull /* "GADEIPS" */
#define PS_LAYOUT_VERSION 5u

#define PS_MAX_LEARNERS 256 /* rows of the roster */
#define PS_MAX_SHARDS 64
#define PS_AHEAD 16         /* batches a learner may hold at once */
#define PS_HISTOGRAM 32     /* staleness 0..15 each, then one bin for each power of two */
#define PS_CHUNK 64         /* values between two entries of the undo log */
#define PS_MAX_STREAMS 3    /* weights and at most two optimizer slots */
#define PS_UNDO_HALVES 2    /* chunks with even and with odd numbers are logged in turn */
#define PS_HYPER 32         /* packed hyper-parameters, float64 */
#define PS_JOURNAL 248      /* words of the journal; a transaction takes some 110 at most */
#define PS_MAX_DIMS 8
#define PS_RUNS 128         /* iterations of each learner whose times are kept */
#define PS_SYNC_TEXT 512    /* bytes of a synchronization model's text */
#define PS_NO_BATCH UINT64_MAX
#define PS_UNBOUNDED (1ull << 62)

enum ps_kind { PS_CONTROL = 1, PS_WEIGHTS = 2, PS_STATE = 3, PS_RING = 4 };
/* PS_EMPTY: no gradient; the learner has given the iteration up, and its batch goes to another. */
enum ps_frame_kind { PS_DENSE = 1, PS_ROWS = 2, PS_EMPTY = 3 };
enum ps_dtype { PS_FLOAT32 = 1, PS_BFLOAT16 = 2, PS_FLOAT16 = 3 };
enum ps_flags { PS_CHECKED = 1, PS_NONFINITE = 2 };
enum ps_tensor_role { PS_PARAMETER = 1, PS_BUFFER = 2 };
enum ps_phase {
    PS_PHASE_STARTING = 0, PS_PHASE_SERVING = 1, PS_PHASE_DRAINING = 2,
    PS_PHASE_KEPT = 3, /* stopped, but its last checkpoint failed: the next watchdog goes on */
    PS_PHASE_STOPPED = 4, PS_PHASE_FAILED = 5,
};
enum ps_server_state { PS_SERVER_NONE = 0, PS_SERVER_STARTING = 1, PS_SERVER_READY = 2 };
enum ps_stop { PS_GO = 0, PS_STOP_DRAIN = 1, PS_STOP_NOW = 2 };
enum ps_work { PS_NO_WORK = 0, PS_WORKING = 1, PS_WORK_DONE = 2 };
/* What shards do with a frame: apply it as it comes, leave it for a superstep, or let it lie. */
enum ps_mode { PS_ON_ARRIVAL = 0, PS_COLLECT = 1, PS_HOLD = 2 };
enum ps_action { PS_SKIP = 0, PS_APPLY = 1, PS_DROP = 2, PS_REFUSE = 3 };
/* A learner that never asks for a turn holds up no barrier, one that never asks for work gets none. */
enum ps_wants { PS_WANTS_TURN = 1, PS_WANTS_WORK = 2 };
enum ps_reason {
    PS_OK = 0, PS_BAD_KIND = 1, PS_BAD_DTYPE = 2, PS_BAD_SIZE = 3, PS_BAD_GENERATION = 4,
    PS_BAD_SEQUENCE = 5, PS_UNCHECKED = 6, PS_NOT_FINITE = 7, PS_BAD_SCALE = 8,
    PS_BAD_ROWS = 9, PS_GIVEN_UP = 10,
};

/* 0        8        16               32       40       48    52    56       64              128
 * | magic  |ver|kind| job id         | bytes  | gener. |pid  |index|start   | job name       |
 * The magic is stored last: a segment that is only half made is never attached. */
struct ps_header {
    uint64_t magic;
    uint32_t layout_version;
    uint32_t kind;
    uint8_t job_id[16];
    uint64_t bytes;        /* of the whole segment */
    uint64_t generation;
    int32_t owner_pid;     /* who made it; with owner_start it is never mistaken for another */
    uint32_t index;        /* K of ring.K */
    uint64_t owner_start;  /* clock ticks after boot, field 22 of /proc/PID/stat */
    char job_name[64];
};

struct ps_shard {          /* S: the thread of this shard; two lines */
    uint64_t heartbeat;    /* passes of its loop */
    uint64_t sequence;     /* sequence lock over its part of the weights: odd while it writes */
    uint64_t frames;       /* gradients or supersteps applied */
    uint64_t parked;       /* the pause that it obeys */
    uint32_t tid;
    uint32_t recovered;    /* gradients that it finished for a server that died */
    uint32_t cpu;            /* that its thread runs on, plus 1; 0: not known */
    uint32_t mode;           /* the last one that it has seen in control and obeys */
    uint8_t pad0[16];
    uint64_t lease[8];     /* robust mutex: who holds it may write this shard's part (ps_lease.h) */
};

struct ps_server {         /* a server process, one line; W: pid, start, S (its manager): the rest */
    int32_t pid;
    uint32_t state;        /* enum ps_server_state */
    uint64_t start;
    uint64_t beat;         /* passes of the manager's loop */
    uint64_t pad[5];
};

struct ps_entry {          /* a row of the roster */
    /* W, one line; without a watchdog the active server clears `wanted` */
    uint64_t generation;   /* of the learner that has the row, or had it last */
    uint64_t wanted;       /* the same while the learner is there, 0 once it is gone */
    int32_t pid;
    uint32_t gone;         /* why it left: 1 detached, 2 died, 3 hung */
    uint64_t pid_start;
    char name[32];
    /* S (manager), one line */
    uint64_t served;       /* generation that the server has mapped; 0: none */
    uint64_t retired;      /* last generation that is gone and of which nothing is left to apply */
    uint64_t grant;        /* in the learner's own clock */
    uint32_t grant_seq;    /* futex of the learner: bumped when grant changes */
    uint32_t member;       /* 1: the sync model waits for it */
    uint64_t base;         /* clock in the sync model less gradients reported to it, modulo 2^64 */
    uint64_t obsolete;     /* in its own clock: gradients of iterations below will be dropped */
    uint64_t pad2[2];
    /* 0, from here on; W clears them for a new learner, before `generation` */
    uint64_t applied;      /* of this generation */
    uint64_t dropped;
    uint64_t refused;
    uint64_t samples;
    double loss;           /* of the last gradient applied */
    double started;        /* of the last gradient applied, CLOCK_MONOTONIC seconds */
    double finished;
    uint64_t version;      /* that the last gradient was computed from */
    uint64_t staleness_sum;
    uint64_t staleness_max;
    uint64_t clock;
    uint32_t reason;       /* of the last refusal */
    uint32_t drained;      /* 1: gone, and all that it published is consumed and handed back */
    uint64_t unasked;      /* gradients that named a batch which was not handed to it */
    uint64_t handed;       /* batches handed to it; the last of them are in items */
    double norm;           /* Euclidean, of the last gradient applied, as its frame says */
    uint64_t pad3;
    uint64_t histogram[PS_HISTOGRAM];
    uint64_t outstanding[PS_AHEAD]; /* batches handed to it and not yet answered; PS_NO_BATCH: free */
    uint64_t items[PS_AHEAD];       /* batch number n is at n % PS_AHEAD; the ring has a copy */
};

struct ps_control {
    struct ps_header header;
    /* 128: W, written once, before the magic; shards with the model, before model_ready */
    uint32_t shards;
    uint32_t slots;              /* of each ring */
    uint32_t ahead;              /* batches handed out ahead, at most PS_AHEAD */
    uint32_t mode;               /* S (manager): enum ps_mode, and number of the change << 2 */
    uint32_t report;             /* S (manager), 1: the sync model wants to hear of every push */
    uint32_t refuse_nonfinite;
    uint32_t staleness_aware;
    uint32_t optimizer;
    uint64_t spin_ns;            /* before a wait sleeps */
    uint64_t pad0[3];
    double hyper[PS_HYPER];      /* 192 */
    /* 448: W */
    uint32_t phase;
    uint32_t stop;
    uint32_t model_ready;        /* 1: weights and state exist */
    int32_t watchdog_pid;
    uint64_t watchdog_start;
    uint64_t pause;              /* CLOCK_MONOTONIC ns until which shards stand still; 0: none */
    uint64_t temporary;          /* 1: a command's own job, which nobody goes on with */
    uint64_t saves;              /* 1: a stop ends with a checkpoint */
    uint64_t sync_wanted;        /* number of the model wanted: its text is sync_text[number % 2] */
    uint64_t pad2;
    /* 512: S, which server is the active one */
    uint64_t lease_generation;   /* how many have been so far */
    int32_t lease_pid;
    uint32_t lease_state;        /* 1: serving */
    uint64_t lease_start;
    uint64_t lease_shards;       /* 1: a server holds the leases of all shards; others may wait */
    uint64_t pad3[4];
    /* 576: 0 */
    uint64_t version;            /* count of applied gradients */
    uint64_t supersteps_done;    /* S (manager) */
    uint64_t pad4[6];
    /* 640: futexes of the server; any of its threads, and W */
    uint32_t shard_bell;
    uint32_t manager_bell;
    uint64_t sleepers;           /* a bit for each shard asleep: who publishes must wake them */
    uint64_t pad6[6];
    /* 704: S (manager), the open superstep of a collecting model */
    uint64_t superstep;          /* number; stored last */
    uint64_t sync_done;          /* number of the model that is in force */
    uint64_t wave;               /* mini-batches that a learner pushes as one gradient */
    uint64_t pad8[5];
    /* 768: 0, the work ledger; W before `work` is set */
    uint32_t work;               /* enum ps_work */
    uint32_t pad9;
    uint64_t batches;            /* of an epoch */
    uint64_t epochs;
    uint64_t seed;
    uint64_t next;               /* epoch << 32 | index to hand out next; index may be `batches` */
    uint64_t epochs_done;        /* whole epochs answered */
    uint64_t requeued;           /* entries in requeue */
    uint64_t pad10;
    /* 832: 0, counts of learners that have left */
    uint64_t past_applied;
    uint64_t past_dropped;
    uint64_t past_refused;
    uint64_t past_samples;
    uint64_t requeued_total;
    uint64_t pad11[3];
    /* 896: robust mutexes (ps_lease.h) */
    uint64_t lease[8];           /* who holds it writes the roster's S words and supersteps */
    uint64_t heir[8];            /* who holds it may wait for the others: one server stands by */
    /* 1024: W, what has happened to the job so far */
    uint64_t server_deaths;
    uint64_t server_starts;
    uint64_t learner_deaths;
    uint64_t watchdog_starts;
    uint64_t checkpoints;
    uint64_t checkpoint_version; /* of the last one written */
    uint64_t checkpoint_failures;
    uint64_t started;            /* CLOCK_REALTIME seconds */
    /* 1088: W */
    uint32_t config[8];          /* digests of what an adopting watchdog must have in common */
    uint64_t finished[PS_MAX_LEARNERS / 64]; /* a bit for each learner of the job file that is done */
    struct ps_server server[2];  /* 1152 */
    struct ps_shard shard[PS_MAX_SHARDS];
    struct ps_entry roster[PS_MAX_LEARNERS];
    uint32_t superstep_action[PS_MAX_LEARNERS]; /* enum ps_action of each ring's oldest frame */
    uint32_t superstep_reason[PS_MAX_LEARNERS]; /* enum ps_reason where it is refused */
    uint64_t superstep_upto[PS_MAX_LEARNERS];   /* frames of each ring consumed once it is done */
    uint64_t requeue[PS_MAX_LEARNERS * PS_AHEAD];
    char sync_text[2][PS_SYNC_TEXT]; /* W: the model in force, and the next or the last one */
};

struct ps_tensor {           /* one row of the table in the weights segment */
    char name[120];
    uint32_t role;
    uint32_t dims;
    uint64_t shape[PS_MAX_DIMS];
    uint64_t start;          /* first element; a multiple of 16 (64 bytes) */
    uint64_t count;          /* elements */
    uint64_t pad[6];
};

struct ps_weights {
    struct ps_header header;
    uint64_t tensors;
    uint64_t table_at;       /* bytes from the segment's begin */
    uint64_t data_at;
    uint64_t elements;       /* with the padding between tensors */
    uint64_t parameters;     /* elements before the first buffer; a multiple of PS_CHUNK */
    uint64_t values;         /* elements that belong to a tensor */
    uint64_t pad[2];
};

/* What a shard is doing, so that whoever takes over can finish it. `cursor` is stored with release
 * last: chunk << 1 | open. Open: the chunk's half of the undo log holds it as it was before. */
struct ps_record {           /* S: the thread of this shard */
    uint64_t cursor;         /* PS_IDLE between gradients */
    uint64_t ring;           /* of the gradient in hand; PS_MAX_LEARNERS: a superstep */
    uint64_t generation;
    uint64_t sequence;       /* of the frame, or number of the superstep */
    uint64_t step;           /* optimizer steps finished before it */
    double rate;             /* learning rate it is applied with */
    uint64_t version;        /* gradients applied before it */
    uint64_t applies;        /* gradients in it: 1, or those in a superstep's mean */
    uint64_t steps;          /* optimizer steps finished */
    uint64_t supersteps;     /* number of the last one finished */
    uint64_t booked;         /* rows of the gradient in hand that the books know of; shard 0 only */
    uint64_t pad[5];
};
#define PS_IDLE UINT64_MAX
#define PS_APPLIED (UINT64_MAX - 1) /* all of it is in the weights, nothing is counted yet */

/* Old values of what the transaction in hand changes. A block: the old words, then one word that
 * says where they belong. `used` is stored with release after each; 0: nothing in hand. */
struct ps_journal {          /* 0 */
    uint64_t used;
    uint64_t pad[7];
    uint64_t words[PS_JOURNAL];
};

struct ps_run {              /* an iteration, of the ring's generation; 0 */
    uint64_t sequence;       /* of its frame, plus 1; stored last */
    double started;          /* CLOCK_MONOTONIC seconds */
    double finished;
    uint32_t action;         /* enum ps_action: what became of its gradient */
    uint32_t censored;       /* 1: it was given up, and would have taken longer */
};

struct ps_state {
    struct ps_header header;
    uint64_t streams;        /* optimizer slots */
    uint64_t slots_at;       /* bytes from the segment's begin */
    uint64_t slot_bytes;     /* of one stream */
    uint64_t undo_at;        /* PS_UNDO_HALVES * PS_MAX_STREAMS * PS_CHUNK float32 for each shard */
    uint64_t pad[4];
    struct ps_record record[PS_MAX_SHARDS];
    uint64_t applied[PS_MAX_SHARDS][PS_MAX_LEARNERS]; /* frames consumed of each ring's generation */
    struct ps_journal journal;
    struct ps_run runs[PS_MAX_LEARNERS][PS_RUNS]; /* frame n is at n % PS_RUNS */
};

/* A frame: this header, then at PS_PAYLOAD_AT of the slot its payload. */
struct ps_frame {            /* L */
    uint64_t sequence;       /* 0 for the ring's first frame */
    uint64_t generation;     /* of the ring */
    uint64_t clock;          /* the learner's finished iterations before this one */
    uint64_t version;        /* of the weights it was computed from */
    uint32_t kind;
    uint32_t dtype;
    uint64_t payload_bytes;
    uint32_t flags;
    uint32_t blocks;         /* struct ps_block at the payload's begin; empty: 1 if computed */
    uint64_t batch;          /* epoch << 32 | index, or PS_NO_BATCH */
    uint32_t samples;
    float rate_scale;        /* times the job's learning rate; 1 normally */
    double loss;
    double started;          /* CLOCK_MONOTONIC seconds */
    double finished;
    double squares;          /* sum over the values, before they were converted */
    uint64_t pad[3];
};

struct ps_block {            /* rows frames: one tensor of which only some rows, or all, are given */
    uint32_t tensor;         /* index in the table; one without a block is left alone */
    uint32_t form;           /* enum ps_frame_kind: PS_DENSE all of it, PS_ROWS the rows listed */
    uint64_t rows;           /* listed; each index once, ascending */
    uint64_t indices_at;     /* int64, bytes from the payload's begin, 64-byte aligned */
    uint64_t values_at;      /* of the frame's dtype, likewise */
};

/* The page of each slot's header keeps payloads page-aligned, for devices that register them. */
#define PS_PAYLOAD_AT 4096

struct ps_ring {
    struct ps_header header;
    /* 128: written once, before the magic */
    uint32_t slots;
    uint32_t shards;         /* consumers */
    uint64_t slot_bytes;     /* header page and payload */
    uint64_t slots_at;       /* bytes from the segment's begin */
    uint64_t capacity;       /* payload bytes */
    uint64_t pad0[4];
    /* 192: L */
    uint64_t head;           /* frames published; the low half is a futex of the server */
    uint64_t pad1[7];
    /* 256: L */
    uint32_t waits_slot;     /* 1 while the learner sleeps on `released` */
    uint32_t waits_work;     /* on `work_head` */
    uint32_t hold;           /* not 0: a consistent pull is being made; a new number each time */
    uint32_t wants;          /* enum ps_wants, set when it first asks */
    uint64_t heartbeat;
    uint64_t pulled;         /* version last pulled */
    uint64_t work_tail;      /* batches taken */
    uint64_t left;           /* 1: it has detached, though no watchdog may have heard it */
    uint64_t pad3[2];
    /* 320: S, any shard's thread */
    uint32_t released;       /* futex of the learner: bumped when a slot may have come free */
    uint32_t pad4;
    uint64_t pad5[7];
    /* 384: 0, batches handed out: a second ring, the other way */
    uint32_t work_head;      /* batches handed; futex of the learner */
    uint32_t pad6;
    uint64_t pad7[7];
    uint64_t work_items[PS_AHEAD]; /* 448: epoch << 32 | index */
    /* 576: one line for each shard */
    struct { uint64_t value; uint64_t pad[7]; } tail[PS_MAX_SHARDS]; /* S: frames consumed */
};

#define PS_AT(type, field, at) \
    static_assert(offsetof(struct type, field) == (at), #type "." #field)
PS_AT(ps_header, job_name, 64);
static_assert(sizeof(struct ps_header) == 128, "header");
static_assert(sizeof(struct ps_shard) == 128, "shard");
static_assert(sizeof(struct ps_server) == 64, "server");
PS_AT(ps_entry, served, 64);
PS_AT(ps_entry, applied, 128);
PS_AT(ps_entry, histogram, 256);
PS_AT(ps_entry, items, 640);
static_assert(sizeof(struct ps_entry) == 768, "entry");
PS_AT(ps_control, hyper, 192);
PS_AT(ps_control, phase, 448);
PS_AT(ps_control, lease_generation, 512);
PS_AT(ps_control, version, 576);
PS_AT(ps_control, shard_bell, 640);
PS_AT(ps_control, superstep, 704);
PS_AT(ps_control, work, 768);
PS_AT(ps_control, past_applied, 832);
PS_AT(ps_control, lease, 896);
PS_AT(ps_control, server_deaths, 1024);
PS_AT(ps_control, config, 1088);
PS_AT(ps_control, server, 1152);
PS_AT(ps_control, shard, 1280);
static_assert(sizeof(struct ps_tensor) == 256, "tensor");
static_assert(sizeof(struct ps_weights) == 192, "weights");
static_assert(sizeof(struct ps_record) == 128, "record");
PS_AT(ps_state, record, 192);
static_assert(sizeof(struct ps_run) == 32, "run");
static_assert(sizeof(struct ps_frame) == 128, "frame");
static_assert(sizeof(struct ps_block) == 32, "block");
PS_AT(ps_ring, head, 192);
PS_AT(ps_ring, waits_slot, 256);
PS_AT(ps_ring, released, 320);
PS_AT(ps_ring, work_head, 384);
PS_AT(ps_ring, work_items, 448);
PS_AT(ps_ring, tail, 576);

#endif
