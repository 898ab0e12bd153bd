/*
 * The memory that the processes of a job share: one set of POSIX segments, native byte order.
 *
 *   control   leases, shard states, roster, ledger, counters    server rw    learner r
 *   weights   tensor table, then the weights, float32           server rw    learner r
 *   state     optimizer slots, undo logs, applied numbers       server rw
 *   ring.K    one learner's gradients and its own words         server rw    learner rw
 *
 * The watchdog makes them all, so it maps them rw; after that it writes control only.
 *
 * This file is the one definition of the layout and holds no behaviour. Each struct is a list:
 *
 *   F(struct, offset, type, field, dimensions, writer, "meaning")    P(offset, bytes of padding)
 *
 * ps_structs.h makes C structs of the lists; module_layout.c makes the table from which
 * gadei_ps/memory/layout.py makes NumPy dtypes; docs/tables.py makes the drawings, where || begins
 * a cache line of 64 bytes, and the tables of docs/memory-layout.md. The writers of a word:
 *
 *   W  watchdog                      s  thread of that shard    server  manager of that server
 *   S  manager of the active server  0  thread of shard 0       writer  makes a checkpoint
 *   L  the ring's learner                                       kernel  robust mutex
 *
 * Where there are several, the word passes from one to another: docs/memory-layout.md says when.
 * Words that different processes write lie on different cache lines.
 */
#ifndef PS_LAYOUT_H
#define PS_LAYOUT_H

#include "ps_codes.h"

/* Begins every segment.
 *
 * 0        8                12     16           32      40           48          52      56
 * || magic | layout_version | kind | job_id[16] | bytes | generation | owner_pid | index |
 * 56            64              120               128
 * | owner_start || job_name[56] | owner_namespace ||
 */
#define PS_HEADER_FIELDS(F, P, T)                                                                  \
  F(T, 0, u64, magic, , W, "GADEIPS as a number; stored last, with release: before it, half made") \
  F(T, 8, u32, layout_version, , W, "attaching refuses another one")                               \
  F(T, 12, u32, kind, , W, "enum ps_kind")                                                         \
  F(T, 16, u8, job_id, [16], W, "random for each start of a job")                                  \
  F(T, 32, u64, bytes, , W, "of the whole segment")                                                \
  F(T, 40, u64, generation, , W, "of the learner, for a ring; else 0")                             \
  F(T, 48, i32, owner_pid, , W, "the watchdog that made it, or has adopted it")                    \
  F(T, 52, u32, index, , W, "K of ring.K; else 0")                                                 \
  F(T, 56, u64, owner_start, , W, "its start: clock ticks after boot, /proc/PID/stat")             \
  F(T, 64, char, job_name, [56], W, "")                                                            \
  F(T, 120, u64, owner_namespace, , W, "inode of its pid namespace: all pids are pids of that one")

/* One for each shard.
 *
 * 0            8          16       24       32    36          40    44     48 64          128
 * || heartbeat | sequence | frames | parked | tid | recovered | cpu | mode |  || lease[8] ||
 */
#define PS_SHARD_FIELDS(F, P, T)                                                                 \
  F(T, 0, u64, heartbeat, , s, "passes of its loop; moves at least every 0.1 s")                 \
  F(T, 8, u64, sequence, , s, "sequence lock over its part of the weights: odd while it writes") \
  F(T, 16, u64, frames, , s, "optimizer steps finished")                                         \
  F(T, 24, u64, parked, , s, "the `pause` it is in; 0: none")                                    \
  F(T, 32, u32, tid, , s, "thread that serves")                                                  \
  F(T, 36, u32, recovered, , s, "gradients of a dead server that the next one finished")         \
  F(T, 40, u32, cpu, , s, "core, plus 1, where the thread last began to wait; 0: not known")     \
  F(T, 44, u32, mode, , s, "control's `mode`, as adopted") P(48, 16)                             \
  F(T, 64, u64, lease, [8], kernel, "robust mutex (ps_lease.h): its holder writes the part")

/* One for each of the two server processes.
 *
 * 0      4       8       16     24          28 64
 * || pid | state | start | beat | confirmed |  ||
 */
#define PS_SERVER_FIELDS(F, P, T)                                                           \
  F(T, 0, i32, pid, , W, "of the process; 0: none")                                         \
  F(T, 4, u32, state, , W/server, "enum ps_server_state")                                   \
  F(T, 8, u64, start, , W, "when the process started, as `owner_start`")                    \
  F(T, 16, u64, beat, , server, "passes of its manager's loop; moves at least every 0.1 s") \
  F(T, 24, u32, confirmed, , W/server, "1: active, and has had the leases of all shards") P(28, 36)

/* A row of the roster. W clears the words of 0 for a new learner, before `generation`.
 *
 * 0             8        16    20     24          32         64
 * || generation | wanted | pid | gone | pid_start | name[32] ||
 * 64        72        80      88          92       96     104        112      120         128
 * || served | retired | grant | grant_seq | member | base | obsolete | broken | exclusive ||
 * 128        136       144       152       160    168       176        184       192
 * || applied | dropped | refused | samples | loss | started | finished | version ||
 * 192              200             208     216      220       224       232      240    248
 * || staleness_sum | staleness_max | clock | reason | drained | unasked | handed | norm |
 * 248          256              512                640          768         776 832
 * | loss_count || histogram[32] || outstanding[16] || items[16] || loss_sum |   ||
 */
#define PS_ENTRY_FIELDS(F, P, T)                                                                  \
  F(T, 0, u64, generation, , W, "of the learner that has the row, or had it last; stored last")   \
  F(T, 8, u64, wanted, , W/S, "`generation` while it is there, else 0; S: without a watchdog")   \
  F(T, 16, i32, pid, , W, "") F(T, 20, u32, gone, , W, "enum ps_gone: why it left")              \
  F(T, 24, u64, pid_start, , W, "when the process started, as `owner_start`")                     \
  F(T, 32, char, name, [32], W, "")                                                               \
  F(T, 64, u64, served, , S, "last generation that a server has taken in; 0: none")               \
  F(T, 72, u64, retired, , S, "last generation that is gone and wholly applied")                  \
  F(T, 80, u64, grant, , S, "iterations it may begin, in its own clock, or PS_UNBOUNDED")         \
  F(T, 88, u32, grant_seq, , S, "futex of the learner, bumped when `grant` changes")              \
  F(T, 92, u32, member, , S, "1: the synchronization model waits for it")                         \
  F(T, 96, u64, base, , S, "its clock in the model less its gradients reported, modulo 2^64")     \
  F(T, 104, u64, obsolete, , S, "iterations, in its clock, below which gradients are dropped")    \
  F(T, 112, u64, broken, , S, "last generation with a damaged ring: no server reads it")      \
  F(T, 120, u64, exclusive, , S, "`exclusive` of its ring while all others pause for it; else 0")\
  F(T, 128, u64, applied, , 0, "gradients of this generation")                                    \
  F(T, 136, u64, dropped, , 0, "of this generation")                                              \
  F(T, 144, u64, refused, , 0, "of this generation")                                              \
  F(T, 152, u64, samples, , 0, "of this generation")                                              \
  F(T, 160, f64, loss, , 0, "of the last gradient applied, as its frame has it")                  \
  F(T, 168, f64, started, , 0, "of the last gradient applied: CLOCK_MONOTONIC, seconds")          \
  F(T, 176, f64, finished, , 0, "of the last gradient applied")                                   \
  F(T, 184, u64, version, , 0, "of the weights that the last gradient applied was computed from") \
  F(T, 192, u64, staleness_sum, , 0, "") F(T, 200, u64, staleness_max, , 0, "") \
  F(T, 208, u64, clock, , 0, "of the last gradient applied")                                      \
  F(T, 216, u32, reason, , 0, "enum ps_reason of the last refusal")                               \
  F(T, 220, u32, drained, , 0, "1: gone, its frames are consumed, its batches handed back")       \
  F(T, 224, u64, unasked, , 0, "gradients that named a batch which was not handed to it")         \
  F(T, 232, u64, handed, , 0, "batches handed to it")                                             \
  F(T, 240, f64, norm, , 0, "Euclidean norm of the last gradient applied, in its frame")          \
  F(T, 248, u64, loss_count, , 0, "gradients of this generation whose loss is finite")            \
  F(T, 256, u64, histogram, [PS_HISTOGRAM], 0, "staleness 0 to 15 each, then powers of two")      \
  F(T, 512, u64, outstanding, [PS_AHEAD], 0, "batches not yet answered; PS_NO_BATCH: free")       \
  F(T, 640, u64, items, [PS_AHEAD], 0, "batches handed: n at n % PS_AHEAD; the ring has a copy")  \
  F(T, 768, f64, loss_sum, , 0, "of these losses") P(776, 56)

/* The control segment. W writes what stands below 448 once, before the magic, unless it says more.
 *
 * 0         128
 * || header ||
 * 128       132     136     140    144      148                152               156         160
 * || shards | slots | ahead | mode | report | refuse_nonfinite | staleness_aware | optimizer |
 * 160       168     176            184 192
 * | spin_ns | build | server_build |   ||
 * 192       196 200           208               212                  216                 224
 * || groups |   | script_word | fork_server_pid | fork_server_deaths | fork_server_start |
 * 224               232 448
 * | checkpoint_time |   ||
 * 448      452    456           460            464              472     480         488     496
 * || phase | stop | model_ready | watchdog_pid | watchdog_start | pause | temporary | saves |
 * 496           504              512
 * | sync_wanted | numbers_wanted ||
 * 512                 520         524           528           536            544 576
 * || lease_generation | lease_pid | lease_state | lease_start | lease_shards |   ||
 * 576        584               592 640           644            648        656 704
 * || version | supersteps_done |   || shard_bell | manager_bell | sleepers |   ||
 * 704          712         720    728            736               744      752 768
 * || superstep | sync_done | wave | numbers_done | numbers_version | pauses |   ||
 * 768     772 776       784      792    800    808           816        824           832
 * || work |   | batches | epochs | seed | next | epochs_done | requeued | owned_range ||
 * 832             840            848            856            864              872        880
 * || past_applied | past_dropped | past_refused | past_samples | requeued_total | owned_at |
 * 880               888             896         960                 1024
 * | past_loss_count | past_loss_sum || lease[8] || standby_lease[8] ||
 * 1024             1032            1040             1048              1056          1064
 * || server_deaths | server_starts | learner_deaths | watchdog_starts | checkpoints |
 * 1064                 1072                  1080      1088         1120          1152
 * | checkpoint_version | checkpoint_failures | started || config[8] | finished[4] ||
 * 1152         1280         9472           222464                   223488
 * || server[2] || shard[64] || roster[256] || superstep_action[256] ||
 * 223488                   224512                 226560           259328               260352
 * || superstep_reason[256] || superstep_upto[256] || requeue[4096] || sync_text[2][512] ||
 * 260352             262400           264448                266496               270592
 * || ring_inode[256] || hyper[16][16] || hyper_next[16][16] || script[2][16][16] ||
 * 270592   270600        270608       270616         270624 270656                 271680
 * || owned | owned_given | owned_from | owned_passes |      || owned_ranges[64][2] ||
 * 271680              271936
 * || has_buffers[256] ||
 */
#define PS_CONTROL_FIELDS(F, P, T)                                                               \
  F(T, 0, header, header, , W, "")                                                               \
  F(T, 128, u32, shards, , W, "shard threads; written before `model_ready`")                     \
  F(T, 132, u32, slots, , W, "of each ring")                                                     \
  F(T, 136, u32, ahead, , W, "batches handed out ahead, at most PS_AHEAD")                       \
  F(T, 140, u32, mode, , S, "enum ps_mode | number of the change of model << 2")                 \
  F(T, 144, u32, report, , S, "1: every push is reported to the model")                          \
  F(T, 148, u32, refuse_nonfinite, , W, "") F(T, 152, u32, staleness_aware, , W, "") \
  F(T, 156, u32, optimizer, , W, "Kind of kernels/optimizers.py")                                \
  F(T, 160, u64, spin_ns, , W, "time that a shard spins; a learner spins at most 8 µs")          \
  F(T, 168, u64, build, , W, "of the C sources (ps_build.h); attaching refuses another one")     \
  F(T, 176, u64, server_build, , W, "what servers run; one of another build ends") P(184, 8)     \
  F(T, 192, u32, groups, , W, "of parameters; written before `model_ready`") P(196, 4)           \
  F(T, 200, u64, script_word, , W, "which half of `script` counts, and what it has")                 \
  F(T, 208, i32, fork_server_pid, , W, "0: none; changes")                                      \
  F(T, 212, u32, fork_server_deaths, , W, "grows")                                              \
  F(T, 216, u64, fork_server_start, , W, "when that process started, as `owner_start`")         \
  F(T, 224, u64, checkpoint_time, , W, "when the last checkpoint was written: CLOCK_REALTIME, seconds; 0: none") \
  P(232, 216)                                                                                    \
  F(T, 448, u32, phase, , W, "enum ps_phase") F(T, 452, u32, stop, , W, "enum ps_stop")          \
  F(T, 456, u32, model_ready, , W, "1: weights and state") F(T, 460, i32, watchdog_pid, , W, "") \
  F(T, 464, u64, watchdog_start, , W, "when the process started, as `owner_start`")              \
  F(T, 472, u64, pause, , writer/W, "CLOCK_MONOTONIC ns until which shards pause; 0: none") \
  F(T, 480, u64, temporary, , W, "1: of a command: no later watchdog adopts it; 2: of `run`, whose next one does") \
  F(T, 488, u64, saves, , W, "1: a stop ends with a checkpoint")                                 \
  F(T, 496, u64, sync_wanted, , W, "number of the model wanted: sync_text[number % 2]")          \
  F(T, 504, u64, numbers_wanted, , W, "number of the change that `hyper_next` is for")           \
  F(T, 512, u64, lease_generation, , S, "how many servers have been active so far")              \
  F(T, 520, i32, lease_pid, , S, "the active server, or the last one")                           \
  F(T, 524, u32, lease_state, , S/W, "1: a server serves; W clears it with new leases")          \
  F(T, 528, u64, lease_start, , S, "when that process started, as `owner_start`")                \
  F(T, 536, u64, lease_shards, , S/W, "1: one server has all shards' leases; W clears it")       \
  P(544, 32) F(T, 576, u64, version, , 0, "gradients applied")                                   \
  F(T, 584, u64, supersteps_done, , S, "") P(592, 48)                                            \
  F(T, 640, u32, shard_bell, , W/S/s/writer, "futex, bumped by atomic addition")                 \
  F(T, 644, u32, manager_bell, , W/S/s/writer, "futex, bumped by atomic addition")                \
  F(T, 648, u64, sleepers, , s, "a bit for each shard asleep, atomic") P(656, 48)                \
  F(T, 704, u64, superstep, , S, "number of the open superstep; stored last")                    \
  F(T, 712, u64, sync_done, , S, "number of the synchronization model in force")                 \
  F(T, 720, u64, wave, , S, "mini-batches pushed as one gradient; above 1 under WSP")            \
  F(T, 728, u64, numbers_done, , S, "number of the last change of `hyper`")                      \
  F(T, 736, u64, numbers_version, , S, "`version` at that change")                               \
  F(T, 744, u64, pauses, , S, "how often the shards were held for a global pause") P(752, 16)           \
  F(T, 768, u32, work, , W/0, "enum ps_work; W sets PS_WORKING once") P(772, 4)                  \
  F(T, 776, u64, batches, , W, "of an epoch; written before `work` is set")                      \
  F(T, 784, u64, epochs, , W, "as `batches`") F(T, 792, u64, seed, , W, "as `batches`")          \
  F(T, 800, u64, next, , W/0, "batch to hand out next; its index may equal `batches`")           \
  F(T, 808, u64, epochs_done, , W/0, "whole epochs answered")                                    \
  F(T, 816, u64, requeued, , 0, "entries in `requeue`")                                          \
  F(T, 824, u64, owned_range, , 0, "number of the owned range that is being handed out")         \
  F(T, 832, u64, past_applied, , 0, "gradients of learners that have left")                      \
  F(T, 840, u64, past_dropped, , 0, "") F(T, 848, u64, past_refused, , 0, "") \
  F(T, 856, u64, past_samples, , 0, "") F(T, 864, u64, requeued_total, , 0, "batches, ever")       \
  F(T, 872, u64, owned_at, , 0, "batches of that range that are handed out")                     \
  F(T, 880, u64, past_loss_count, , 0, "") F(T, 888, f64, past_loss_sum, , 0, "")                \
  F(T, 896, u64, lease, [8], kernel, "robust mutex (ps_lease.h): its holder is S")               \
  F(T, 960, u64, standby_lease, [8], kernel, "robust mutex: its holder may wait for the other leases") \
  F(T, 1024, u64, server_deaths, , W, "since the memory was made, as all of this line")          \
  F(T, 1032, u64, server_starts, , W, "") F(T, 1040, u64, learner_deaths, , W, "") \
  F(T, 1048, u64, watchdog_starts, , W, "") F(T, 1056, u64, checkpoints, , W, "written")         \
  F(T, 1064, u64, checkpoint_version, , W, "`version` of the last one written")                  \
  F(T, 1072, u64, checkpoint_failures, , W, "")                                                  \
  F(T, 1080, u64, started, , W, "when the memory was made: CLOCK_REALTIME, seconds")             \
  F(T, 1088, u32, config, [8], W, "CRC-32 of settings that adoption compares")                   \
  F(T, 1120, u64, finished, [PS_FINISHED_WORDS], W, "a bit for each learner of the job file")    \
  F(T, 1152, server, server, [2], W/server, "`lease_pid` names the active one")                  \
  F(T, 1280, shard, shard, [PS_MAX_SHARDS], s, "")                                               \
  F(T, 9472, entry, roster, [PS_MAX_LEARNERS], W/S/0, "")                                        \
  F(T, 222464, u32, superstep_action, [PS_MAX_LEARNERS], S, "enum ps_action, oldest frame")      \
  F(T, 223488, u32, superstep_reason, [PS_MAX_LEARNERS], S, "enum ps_reason if refused")         \
  F(T, 224512, u64, superstep_upto, [PS_MAX_LEARNERS], S, "frames consumed once it is done")     \
  F(T, 226560, u64, requeue, [PS_REQUEUE], 0, "batches to hand out again")                       \
  F(T, 259328, u8, sync_text, [2][PS_SYNC_TEXT], W, "the model in force; the next or last one")  \
  F(T, 260352, u64, ring_inode, [PS_MAX_LEARNERS], W, "its file: the name may lead elsewhere")   \
  F(T, 262400, f64, hyper, [PS_MAX_GROUPS][PS_HYPER], W/S, "packed (kernels/optimizers.py)")     \
  F(T, 264448, f64, hyper_next, [PS_MAX_GROUPS][PS_HYPER], W, "what `hyper` is to be")           \
  F(T, 266496, f64, script, [2][PS_MAX_GROUPS][PS_SCRIPT], W, "settings of scripts (watchdog/script.py)") \
  F(T, 270592, u64, owned, , W, "1: only batches of `owned_ranges` are handed out")              \
  F(T, 270600, u64, owned_given, , W, "ranges given so far; stored last")                        \
  F(T, 270608, u64, owned_from, , W, "ranges with lower numbers are handed out no more")         \
  F(T, 270616, u64, owned_passes, , W, "epochs of which no batch is to come") P(270624, 32)      \
  F(T, 270656, u64, owned_ranges, [PS_OWNED][2], W, "n at n % PS_OWNED: first batch, and its end") \
  F(T, 271680, u8, has_buffers, [PS_MAX_LEARNERS], W, "1: it may write the job's buffers; the lowest does")

/* A row of the table in the weights segment.
 *
 * 0            376    380    384         448      456     464     472        480 512
 * || name[376] | role | dims || shape[8] || start | count | group | dtype[8] |   ||
 */
#define PS_TENSOR_FIELDS(F, P, T)                                          \
  F(T, 0, char, name, [376], W, "UTF-8, ends with a zero byte")            \
  F(T, 376, u32, role, , W, "enum ps_tensor_role") F(T, 380, u32, dims, , W, "") \
  F(T, 384, u64, shape, [PS_MAX_DIMS], W, "the first `dims`")              \
  F(T, 448, u64, start, , W, "first element; a multiple of 16 (64 bytes)") \
  F(T, 456, u64, count, , W, "elements; of another dtype the float32 that take as many bytes") \
  F(T, 464, u64, group, , W, "of parameters, from 0; others: 0")   \
  F(T, 472, char, dtype, [8], W, "of its values, as safetensors names it: F32 of a parameter") P(480, 32)

/* Begins the weights segment; W writes it before the magic.
 *
 * 0         128
 * || header ||
 * 128        136        144       152        160          168      176       184       192
 * || tensors | table_at | data_at | elements | parameters | values | aliases | trained ||
 * 192       200     208 256
 * || frozen | words |   ||
 */
#define PS_WEIGHTS_FIELDS(F, P, T)                                                                \
  F(T, 0, header, header, , W, "")                                                                \
  F(T, 128, u64, tensors, , W, "rows of the table, each a struct ps_tensor")                      \
  F(T, 136, u64, table_at, , W, "bytes from the segment's begin")                                 \
  F(T, 144, u64, data_at, , W, "bytes from the segment's begin; a multiple of 4096, for devices") \
  F(T, 152, u64, elements, , W, "float32 values, padding between tensors counted")                \
  F(T, 160, u64, parameters, , W, "elements before the first buffer, which begins at a chunk")    \
  F(T, 168, u64, values, , W, "elements in tensors") \
  F(T, 176, u64, aliases, , W, "rows after those: other names of tensors, by `start`") \
  F(T, 184, u64, trained, , W, "rows of parameters, which come first") \
  F(T, 192, u64, frozen, , W, "rows after the aliases: tensors that nothing writes") \
  F(T, 200, u64, words, , W, "elements, and those of frozen tensors, which follow") P(208, 48)

/* Chunks that follow each other, in number and in the weights: where an open one belongs.
 *
 * 0        8       16    24
 * || piece | start | end |
 */
#define PS_SPAN_FIELDS(F, P, T)                                                       \
  F(T, 0, u64, piece, , s, "number of its first chunk, stored last; PS_IDLE: no span") \
  F(T, 8, u64, start, , s, "its first element") F(T, 16, u64, end, , s, "the one after its last")

/* What a shard is doing, so that its successor can finish it. Open: the half of the undo log that
 * belongs to the chunk holds it as it was.
 *
 * 0         8      16           24         32     40          48        56        64
 * || cursor | ring | generation | sequence | step | staleness | version | applies ||
 * 64       72           80          88     96     104         112         120        128
 * || steps | supersteps | accounted | torn | tear | next_step | gradients | momentum ||
 * 128        176 192         320
 * || span[2] |   || rate[16] ||
 */
#define PS_RECORD_FIELDS(F, P, T)                                                               \
  F(T, 0, u64, cursor, , s, "PS_IDLE, PS_ALL_APPLIED or chunk << 1 | open; stored last, release") \
  F(T, 8, u64, ring, , s, "row of the open gradient; PS_MAX_LEARNERS: a superstep")             \
  F(T, 16, u64, generation, , s, "of that frame's ring")                                        \
  F(T, 24, u64, sequence, , s, "of that frame, or number of the superstep")                     \
  F(T, 32, u64, step, , s, "optimizer steps finished before it")                                \
  F(T, 40, u64, staleness, , s, "of the open gradient: the updates that it missed")             \
  F(T, 48, u64, version, , s, "gradients that the shard has applied before it")                 \
  F(T, 56, u64, applies, , s, "gradients in it: 1, or those in a superstep's mean")             \
  F(T, 64, u64, steps, , s, "optimizer steps finished")                                         \
  F(T, 72, u64, supersteps, , s, "number of the last one finished")                             \
  F(T, 80, u64, accounted, , 0, "rows of the open gradient that statistics and ledger know of")    \
  F(T, 88, u64, torn, , s, "parts of gradients that it could not read to their end")            \
  F(T, 96, u64, tear, , s, "the same, before the open gradient")                                 \
  F(T, 104, u64, next_step, , s, "optimizer steps finished after it")                             \
  F(T, 112, u64, gradients, , s, "that the shard has applied")                                    \
  F(T, 120, f64, momentum, , s, "of all groups, for the open gradient; NaN: each group's own")    \
  F(T, 128, span, span, [2], s, "the last two stretches of chunks, in turn") P(176, 16)          \
  F(T, 192, f64, rate, [PS_MAX_GROUPS], s, "each group's rate that the gradient is applied with")

/* Old values of what a transaction of the accounts changes. A block: the old words, then one word
 * that says where they belong; `used` is stored after each block.
 *
 * 0       8 64            2048
 * || used | || words[248] ||
 */
#define PS_JOURNAL_FIELDS(F, P, T)                                                        \
  F(T, 0, u64, used, , 0, "words in use, release; 0: no open transaction") P(8, 56)       \
  F(T, 64, u64, words, [PS_JOURNAL], 0, "blocks: old words, then where they belong")

/* One iteration of a learner.
 *
 * 0           8         16         24       28         32
 * || sequence | started | finished | action | censored |
 */
#define PS_RUN_FIELDS(F, P, T)                                                 \
  F(T, 0, u64, sequence, , 0, "of the iteration's frame, plus 1; stored last") \
  F(T, 8, f64, started, , 0, "CLOCK_MONOTONIC, seconds") F(T, 16, f64, finished, , 0, "") \
  F(T, 24, u32, action, , 0, "enum ps_action: what became of its gradient")    \
  F(T, 28, u32, censored, , 0, "1: it was abandoned, and would have taken longer")

/* Begins the state segment. An undo log: PS_UNDO_HALVES * PS_MAX_STREAMS * PS_CHUNK float32.
 *
 * 0         128        136        144          152       160          176         192
 * || header || streams | slots_at | slot_bytes | undo_at | loading[2] | loaded[2] ||
 * 192           20672               151744     153792            1202368
 * || record[64] || applied[64][256] || journal || runs[256][128] ||
 */
#define PS_STATE_FIELDS(F, P, T)                                                           \
  F(T, 0, header, header, , W, "")                                                         \
  F(T, 128, u64, streams, , W, "optimizer slots of its kind: 0, 1 or 2")                      \
  F(T, 136, u64, slots_at, , W, "the slots, bytes from the segment's begin")               \
  F(T, 144, u64, slot_bytes, , W, "of one stream")                                         \
  F(T, 152, u64, undo_at, , W, "the undo logs, bytes from the segment's begin")            \
  F(T, 160, u64, loading, [2], W, "generation of who loads state and weights; 0: nobody")  \
  F(T, 176, u64, loaded, [2], W, "digests of what was loaded; 0: nothing")                 \
  F(T, 192, record, record, [PS_MAX_SHARDS], s, "what a shard is doing")                   \
  F(T, 20672, u64, applied, [PS_MAX_SHARDS][PS_MAX_LEARNERS], s/S, "frames consumed")       \
  F(T, 151744, journal, journal, , 0, "old values of the open transaction")                \
  F(T, 153792, run, runs, [PS_MAX_LEARNERS][PS_RUNS], 0, "frame n at n % PS_RUNS")

/* A frame: this header, and its payload PS_PAYLOAD_AT bytes after the slot's begin.
 *
 * 0           8            16      24        32     36      40              48      52       56
 * || sequence | generation | clock | version | kind | dtype | payload_bytes | flags | blocks |
 * 56      64         68         72     80        88         96        104      112     120 128
 * | batch || samples | momentum | loss | started | finished | squares | stream | steps |   ||
 * 128               192
 * || rate_scale[16] ||
 */
#define PS_FRAME_FIELDS(F, P, T)                                                              \
  F(T, 0, u64, sequence, , L, "0 for the ring's first frame, then one more each time")        \
  F(T, 8, u64, generation, , L, "of the ring")                                                \
  F(T, 16, u64, clock, , L, "the learner's finished iterations before this one")              \
  F(T, 24, u64, version, , L, "of the weights that it was computed from")                     \
  F(T, 32, u32, kind, , L, "enum ps_frame_kind") F(T, 36, u32, dtype, , L, "enum ps_wire_type")  \
  F(T, 40, u64, payload_bytes, , L, "") F(T, 48, u32, flags, , L, "enum ps_flags")               \
  F(T, 52, u32, blocks, , L, "blocks of a rows frame; of an empty one: 1 if it was computed") \
  F(T, 56, u64, batch, , L, "epoch << 32 | index, or PS_NO_BATCH") F(T, 64, u32, samples, , L, "") \
  F(T, 68, f32, momentum, , L, "or first beta, of all groups; NaN: each group's own")         \
  F(T, 72, f64, loss, , L, "NaN: none")                                                       \
  F(T, 80, f64, started, , L, "CLOCK_MONOTONIC, seconds") F(T, 88, f64, finished, , L, "") \
  F(T, 96, f64, squares, , L, "sum of squares of parameters; infinite if a value is not finite") \
  F(T, 104, u64, stream, , L, "of an assignment: 0 weights, 1 or 2 a slot of the optimizer")  \
  F(T, 112, u64, steps, , L, "of an assignment: steps after it, or PS_SAME_STEPS") P(120, 8)  \
  F(T, 128, f32, rate_scale, [PS_MAX_GROUPS], L, "times each group's learning rate; normally 1")

/* One tensor of a rows frame; the blocks stand at the payload's begin.
 *
 * 0         4      8      16           24          32
 * || tensor | form | rows | indices_at | values_at |
 */
#define PS_BLOCK_FIELDS(F, P, T)                                                                 \
  F(T, 0, u32, tensor, , L, "index in the table of tensors; one without a block is left alone")  \
  F(T, 4, u32, form, , L, "PS_DENSE all of the tensor, PS_ROWS the rows listed")                 \
  F(T, 8, u64, rows, , L, "listed; each index once, ascending")                                  \
  F(T, 16, u64, indices_at, , L, "int64 each; bytes from the payload's begin, a multiple of 64") \
  F(T, 24, u64, values_at, , L, "values; bytes from the payload's begin, a multiple of 64")

/* One cache line for each shard.
 *
 * 0        8 64
 * || value | ||
 */
#define PS_TAIL_FIELDS(F, P, T) \
  F(T, 0, u64, value, , s, "frames consumed") P(8, 56)

/* Begins the segment of a ring; slot n is at slots_at + n * slot_bytes.
 *
 * 0         128      132      136          144        152        160 192     200 256
 * || header || slots | shards | slot_bytes | slots_at | capacity |   || head |   ||
 * 256           260          264    268     272         280      288         296        304
 * || waits_slot | waits_work | hold | wants | heartbeat | pulled | work_tail | detached |
 * 304          308 312         320         324 384          388 448               576         4672
 * | publishing |   | exclusive || released |   || work_head |   || work_items[16] || tail[64] ||
 */
#define PS_RING_FIELDS(F, P, T)                                                                   \
  F(T, 0, header, header, , W, "") F(T, 128, u32, slots, , W, "") \
  F(T, 132, u32, shards, , W, "consumers")                                                        \
  F(T, 136, u64, slot_bytes, , W, "PS_PAYLOAD_AT and the payload")                                \
  F(T, 144, u64, slots_at, , W, "bytes from the segment's begin")                                 \
  F(T, 152, u64, capacity, , W, "payload bytes of a slot") P(160, 32)                             \
  F(T, 192, u64, head, , L, "frames published; the low half is a futex of the server") P(200, 56) \
  F(T, 256, u32, waits_slot, , L, "1 while the learner sleeps on `released`")                     \
  F(T, 260, u32, waits_work, , L, "1 while it sleeps on `work_head`")                             \
  F(T, 264, u32, hold, , L, "not 0: a consistent copy is being made; a new number each time")     \
  F(T, 268, u32, wants, , L, "enum ps_wants, set when it first asks")                             \
  F(T, 272, u64, heartbeat, , L, "slots claimed and batches taken")                               \
  F(T, 280, u64, pulled, , L, "version that the last frame was computed from")                    \
  F(T, 288, u64, work_tail, , L, "batches taken")                                                 \
  F(T, 296, u64, detached, , L, "1: it has detached, perhaps unknown to a watchdog")              \
  F(T, 304, u32, publishing, , L, "1 while `head` is moved, if rings are not closed") P(308, 4)  \
  F(T, 312, u64, exclusive, , L, "requests so far << 32 | low half of `generation` while it asks, or 0") \
  F(T, 320, u32, released, , s, "futex of the learner, bumped when a slot may be free") P(324, 60) \
  F(T, 384, u32, work_head, , 0, "batches handed; futex of the learner") P(388, 60)               \
  F(T, 448, u64, work_items, [PS_AHEAD], 0, "the batches, used as a ring: epoch << 32 | index")   \
  F(T, 576, tail, tail, [PS_MAX_SHARDS], s, "")

/* X(struct, its list, bytes); what a struct holds comes before it. */
#define PS_STRUCTS(X)                      \
  X(ps_header, PS_HEADER_FIELDS, 128)      \
  X(ps_shard, PS_SHARD_FIELDS, 128)        \
  X(ps_server, PS_SERVER_FIELDS, 64)       \
  X(ps_entry, PS_ENTRY_FIELDS, 832)        \
  X(ps_control, PS_CONTROL_FIELDS, 271936) \
  X(ps_tensor, PS_TENSOR_FIELDS, 512)      \
  X(ps_weights, PS_WEIGHTS_FIELDS, 256)    \
  X(ps_span, PS_SPAN_FIELDS, 24)           \
  X(ps_record, PS_RECORD_FIELDS, 320)      \
  X(ps_journal, PS_JOURNAL_FIELDS, 2048)   \
  X(ps_run, PS_RUN_FIELDS, 32)             \
  X(ps_state, PS_STATE_FIELDS, 1202368)    \
  X(ps_frame, PS_FRAME_FIELDS, 192)        \
  X(ps_block, PS_BLOCK_FIELDS, 32)         \
  X(ps_tail, PS_TAIL_FIELDS, 64)           \
  X(ps_ring, PS_RING_FIELDS, 4672)

#include "ps_structs.h"

#endif
