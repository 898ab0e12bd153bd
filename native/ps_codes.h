/*
 * The numbers of the shared memory that have a meaning: sizes, marks and codes. Each is
 * defined here only. gadei_ps/memory/layout.py reads them from gadei_ps._native; docs/tables.py
 * writes them into docs/memory-layout.md.
 */
#ifndef PS_CODES_H
#define PS_CODES_H

#include <stdint.h>

/* The types of words, as lists and tables name them. */
typedef char ps_char;
typedef uint8_t ps_u8;
typedef uint32_t ps_u32;
typedef uint64_t ps_u64;
typedef int32_t ps_i32;
typedef float ps_f32;
typedef double ps_f64;

#define PS_MAGIC 0x53504945444147ull /* "GADEIPS" */
#define PS_LAYOUT_VERSION 18u

#define PS_MAX_LEARNERS 256 /* rows of the roster */
#define PS_MAX_SHARDS 64
#define PS_AHEAD 16         /* batches that a learner may hold at once */
#define PS_REQUEUE 4096     /* batches to hand out again: what all learners together can hold */
#define PS_OWNED 64         /* ranges of batches that wait to be handed out, where a job owns some */
#define PS_FINISHED_WORDS 4 /* a bit for each learner */
#define PS_HISTOGRAM 32     /* bins of staleness */
#define PS_CHUNK 64         /* values between two entries of the undo log */
#define PS_MAX_STREAMS 3    /* weights and at most two optimizer slots */
#define PS_UNDO_HALVES 2    /* chunks with even and with odd numbers are logged in turn */
#define PS_MAX_GROUPS 16    /* of parameters; the last one in use has what no other group names */
#define PS_HYPER 16         /* float64 of a group: PACKED of kernels/optimizers.py */
#define PS_SCRIPT 16          /* float64 of a group, as scripts set it (watchdog/script.py) */
#define PS_JOURNAL 248      /* words of the journal; a transaction takes at most some 110 */
#define PS_MAX_DIMS 8
#define PS_RUNS 128         /* iterations of each learner whose times are kept */
#define PS_SYNC_TEXT 512    /* bytes of a synchronization model's text */
#define PS_PAYLOAD_AT 4096  /* of a slot: page-aligned, for devices that register payloads */

#define PS_NO_BATCH UINT64_MAX
#define PS_SAME_STEPS UINT64_MAX     /* an assignment that leaves the count of steps as it is */
#define PS_UNBOUNDED (1ull << 62)           /* a grant without a bound */
#define PS_IDLE UINT64_MAX           /* of a record: no gradient is in flight */
#define PS_ALL_APPLIED (UINT64_MAX - 1)  /* all is in the weights, nothing is counted yet */

/* The numbers above, for Python. */
#define PS_NUMBERS(X)                                                                        \
  X(PS_MAGIC) X(PS_LAYOUT_VERSION) X(PS_MAX_LEARNERS) X(PS_MAX_SHARDS) X(PS_AHEAD)           \
  X(PS_REQUEUE) X(PS_OWNED) X(PS_FINISHED_WORDS) X(PS_HISTOGRAM) X(PS_CHUNK) X(PS_MAX_STREAMS)           \
  X(PS_UNDO_HALVES) X(PS_MAX_GROUPS) X(PS_HYPER) X(PS_SCRIPT) X(PS_JOURNAL) X(PS_MAX_DIMS)     \
  X(PS_RUNS) X(PS_SYNC_TEXT) X(PS_PAYLOAD_AT) X(PS_NO_BATCH) X(PS_SAME_STEPS)                \
  X(PS_UNBOUNDED) X(PS_IDLE) X(PS_ALL_APPLIED)

/* X(name, value, meaning) */
#define PS_KINDS(X)                                                      \
  X(PS_CONTROL, 1, "leases, roster, work ledger, counters")              \
  X(PS_WEIGHTS, 2, "tensor table and values")                            \
  X(PS_STATE, 3, "optimizer slots, undo logs, journal, applied numbers") \
  X(PS_RING, 4, "one learner's gradients and its own words")

#define PS_FRAME_KINDS(X)                                                  \
  X(PS_DENSE, 1, "a value for each element, in the layout of the weights") \
  X(PS_ROWS, 2, "of some tensors only some rows")                          \
  X(PS_EMPTY, 3, "no gradient: the learner has abandoned it")              \
  X(PS_ASSIGN, 4, "values that replace those of the job; blocks as in PS_ROWS")

#define PS_WIRE_TYPES(X)       \
  X(PS_FLOAT32, 1, "4 bytes")  \
  X(PS_BFLOAT16, 2, "2 bytes") \
  X(PS_FLOAT16, 3, "2 bytes")

#define PS_FLAGS(X)                                                                    \
  X(PS_CHECKED, 1, "checked for values that are not finite")                           \
  X(PS_NONFINITE, 2, "one was found")                                                  \
  X(PS_RESET, 4, "an assignment of weights also clears the optimizer's slots of them") \
  X(PS_ADD, 8, "an assignment is added to the weights")

#define PS_TENSOR_ROLES(X)                     \
  X(PS_PARAMETER, 1, "moved by the optimizer") \
  X(PS_BUFFER, 2, "written by assignments only") \
  X(PS_FROZEN, 3, "as the learner had it that made the model")

#define PS_PHASES(X)                                                                        \
  X(PS_PHASE_STARTING, 0, "no server serves yet")                                           \
  X(PS_PHASE_SERVING, 1, "")                                                                \
  X(PS_PHASE_DRAINING, 2, "learners are asked to end; what they publish is applied")        \
  X(PS_PHASE_KEPT, 3, "stopped, but the last checkpoint failed: the next one resumes")      \
  X(PS_PHASE_STOPPED, 4, "")                                                                \
  X(PS_PHASE_FAILED, 5, "no server can be kept alive")

#define PS_SERVER_STATES(X)    \
  X(PS_SERVER_NONE, 0, "")     \
  X(PS_SERVER_STARTING, 1, "") \
  X(PS_SERVER_READY, 2, "it serves, or can take over at once")

#define PS_STOPS(X)                             \
  X(PS_GO, 0, "none")                           \
  X(PS_STOP_DRAIN, 1, "finish the iteration")   \
  X(PS_STOP_NOW, 2, "at once")                  \
  X(PS_STOP_CLOSED, 3, "nothing is published any more")

#define PS_WORKS(X)                             \
  X(PS_NO_WORK, 0, "no batches are handed out") \
  X(PS_WORKING, 1, "")                          \
  X(PS_WORK_DONE, 2, "every batch of every epoch is answered")

#define PS_MODES(X)                                       \
  X(PS_ON_ARRIVAL, 0, "shards apply a frame as it comes") \
  X(PS_COLLECT, 1, "shards leave it for a superstep")     \
  X(PS_HOLD, 2, "shards let it lie: a change, or a global pause")

#define PS_ACTIONS(X)                                   \
  X(PS_SKIP, 0, "not part of the superstep")            \
  X(PS_APPLY, 1, "part of its mean")                    \
  X(PS_DROP, 2, "dropped by the synchronization model") \
  X(PS_REFUSE, 3, "refused")

#define PS_WANTS(X)                                                         \
  X(PS_WANTS_TURN, 1, "a turn: without it the learner holds up no barrier") \
  X(PS_WANTS_WORK, 2, "batches: without it the learner gets none")          \
  X(PS_WANTS_PAUSE, 4, "a pause: it computes no gradient now")              \
  X(PS_WANTS_EXCLUSIVE, 8, "that all others pause: `exclusive` has the number of the request")

#define PS_GONES(X)                            \
  X(PS_GONE_DETACHED, 1, "")                   \
  X(PS_GONE_DIED, 2, "")                       \
  X(PS_GONE_HUNG, 3, "it hung and was killed") \
  X(PS_GONE_DAMAGED, 4, "its ring was damaged") \
  X(PS_GONE_STOPPED, 5, "the job has stopped")

/* Learners and `status` report the meaning. */
#define PS_REASONS(X)                                                                \
  X(PS_OK, 0, "")                                                                    \
  X(PS_BAD_KIND, 1, "unknown kind of frame")                                         \
  X(PS_BAD_DTYPE, 2, "unknown number format")                                        \
  X(PS_BAD_SIZE, 3, "payload of another size than the model")                        \
  X(PS_BAD_GENERATION, 4, "frame of another generation of the ring")                 \
  X(PS_BAD_SEQUENCE, 5, "sequence number out of order")                              \
  X(PS_UNCHECKED, 6, "not checked for values that are not finite")                   \
  X(PS_NOT_FINITE, 7, "holds a NaN or an infinity")                                  \
  X(PS_BAD_SCALE, 8, "scale of the learning rate, or momentum, that cannot be")          \
  X(PS_BAD_ROWS, 9, "a row out of range, or tensors or rows not in ascending order") \
  X(PS_ABANDONED, 10, "abandoned by it")                                             \
  X(PS_TORN, 11, "could not be read to its end: the ring was damaged")               \
  X(PS_BAD_ASSIGN, 12, "assigns a slot or a step that the optimizer cannot have")

/* X(enum, its list) */
#define PS_ENUMS(X)                    \
  X(ps_kind, PS_KINDS)                 \
  X(ps_frame_kind, PS_FRAME_KINDS)     \
  X(ps_wire_type, PS_WIRE_TYPES)       \
  X(ps_flags, PS_FLAGS)                \
  X(ps_tensor_role, PS_TENSOR_ROLES)   \
  X(ps_phase, PS_PHASES)               \
  X(ps_server_state, PS_SERVER_STATES) \
  X(ps_stop, PS_STOPS)                 \
  X(ps_work, PS_WORKS)                 \
  X(ps_mode, PS_MODES)                 \
  X(ps_action, PS_ACTIONS)             \
  X(ps_wants, PS_WANTS)                \
  X(ps_gone, PS_GONES)                 \
  X(ps_reason, PS_REASONS)

#define PS_CODE(name, value, meaning) name = value,
#define PS_ENUM(tag, LIST) enum tag { LIST(PS_CODE) };
PS_ENUMS(PS_ENUM)
#undef PS_CODE
#undef PS_ENUM

#endif
