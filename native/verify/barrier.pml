/* BSP: K supersteps of L learners on two shards, with a learner's death and a server's in the middle.
 *
 * Code: gadei_ps/sync/bsp.py and base.py; gadei_ps/server/driver.py; gadei_ps/server/superstep.py
 * apply_superstep; gadei_ps/server/record.py begin, finish; gadei_ps/server/recover.py; native/ps_ring.c ps_wait_grant.
 *
 * Processes: L learners, the first of which may be killed; the watchdog; the managers and shard
 * threads of two servers, the first of which may be killed, its threads ending one by one, later, in
 * any order.
 *
 * Abstractions: chunks, undo log and tails are in apply.pml, rings and rows in roster.pml: here every
 * ring is mapped, a superstep's chunks are one step, and a slot is free when it is applied. The
 * manager's private state is changed in one step where no other process reads it. All learners have
 * asked for a turn, and so are members, before the first push. A learner that has pushed K gradients
 * detaches. Gradients are never refused. A death is a rendezvous with the kernel, as in apply.pml;
 * -DSERVER_LIVES and -DLEARNER_LIVES limit who dies; -DWHOLE: the server's threads end together, of
 * two shards.
 *
 * Wrong on purpose: -DFINISH_AGAIN (recover redoes a superstep that is finished except the cursor,
 * with what then stands in superstep_action), -DNO_STEPS (nor does it store `steps` of that one),
 * -DNO_WAIT (the new manager does not wait for the open superstep), -DWAIT_FOR_DEAD (the dead are not
 * taken out of the membership), -DCURSOR_FIRST (cursor idle before the superstep counts as done),
 * -DJOIN_LATE (members join one by one, also after the first push has been reported), -DMEMBERS_ONLY
 * (so do those that have left and of which a gradient waits for its barrier). */
#ifndef L
#define L 2
#endif
#ifndef K
#define K 2
#endif
#ifndef S
#define S 2
#endif
#define NOBODY 9

/* rings and roster */
byte head[L], grant[L];
bool gone[L], killed, wanted[L], member[L];
/* control, state */
byte superstep;
bool action[L];
byte upto[L];
byte applied[6];             /* by shard * L + learner */
byte finished[S];            /* record.supersteps */
byte cursor[S];              /* 0: idle, 1: begun, 2: all chunks done */
byte record[S], record_step[S];
byte did[6];                 /* frames in the weights */
byte steps[S];
byte lease[S] = NOBODY;
byte manager_lease = NOBODY;
bool dead[3], done;
#define LEARNER 6
chan die = [0] of { byte } /* server * 3 + thread, or LEARNER + learner */

#define KILLED (dead[0] || dead[1] || dead[2])
#define ALL_FINISHED (finished[0] == superstep && finished[S - 1] == superstep)

#ifdef WHOLE /* the rendezvous hands the atomic step on */
#define NEXT_DIES die ! i * 3 + k + 1
#else
#define NEXT_DIES skip
#endif

inline end_thread(thread, lock) {
    d_step {
        dead[thread] = true;
        if
        :: lock == 0 -> lock = NOBODY
        :: else
        fi
    }
}

inline count_step() {
    d_step { steps[k] = record_step[k] + 1; assert(steps[k] == record[k]) }
}

inline finish() {
    l = 0;
    do
    :: l < L ->
        if
        :: action[l] -> applied[k * L + l] = upto[l]
        :: !action[l]
        fi;
        l++
    :: l == L -> break
    od;
    l = 0;
#ifdef CURSOR_FIRST
    cursor[k] = 0;
    finished[k] = record[k];
    count_step()
#else
    finished[k] = record[k];
    count_step();
    cursor[k] = 0
#endif
}

inline apply_superstep() {
    d_step {
        for (l : 0 .. L - 1) {
            if
            :: action[l] ->
                assert(upto[l] == did[k * L + l] + 1); /* the oldest frame, once */
                assert(upto[l] == record[k]); /* n-th gradients in the n-th superstep, of all */
                assert(upto[l] <= head[l]);
                did[k * L + l] = upto[l]
            :: else
            fi
        }
        l = 0;
        cursor[k] = 2
    }
}

proctype Shard(byte i; byte k) {
    byte l;
end_spare: {
        atomic { (i == 0 || KILLED) && lease[k] == NOBODY -> lease[k] = i };
        if
        :: cursor[k] == 1 -> apply_superstep(); finish()
#ifdef FINISH_AGAIN
        :: cursor[k] == 2 -> finish()
#else
        :: cursor[k] == 2 && finished[k] != record[k] -> finish()
        :: cursor[k] == 2 && finished[k] == record[k] ->
#ifndef NO_STEPS
            count_step();
#endif
            cursor[k] = 0
#endif
        :: cursor[k] == 0
        fi;
end_idle: do
        :: superstep > finished[k] ->
            d_step { record[k] = superstep; record_step[k] = steps[k]; cursor[k] = 1 };
            apply_superstep();
            finish()
        od
    } unless { atomic { die ? eval(i * 3 + k) -> end_thread(k, lease[k]); l = 0; NEXT_DIES } }
}

/* The model's `_barrier`. */
inline barrier() {
    all = true;
    for (l : 0 .. L - 1) { all = all && !computing[l] }
    if
    :: all && closed ->
        closed = false;
        for (l : 0 .. L - 1) {
            computing[l] = joined[l];
            if
            :: held[l] -> commit[l] = true; held[l] = false; pending = true
            :: else
            fi
        }
    :: else
    fi;
    all = false;
    l = 0
}

/* What it says while nothing is committed: the iteration in flight, or none. */
#define GRANT(m) (reported[m] + (computing[m] -> 1 : 0))

#define MAY_GRANT(m) (!pending && ALL_FINISHED && joined[m] && grant[m] != GRANT(m))

proctype Manager(byte i) {
    bool joined[L], computing[L], held[L], commit[L];
    byte reported[L];
    bool closed, pending, all;
    byte l, m;
end_spare: {
        atomic { (i == 0 || KILLED) && manager_lease == NOBODY -> manager_lease = i };
#ifndef NO_WAIT
        ALL_FINISHED;
#endif
        d_step { /* join all members, and who has left something */
            for (m : 0 .. L - 1) {
                reported[m] = applied[m];
#ifdef MEMBERS_ONLY
                joined[m] = member[m];
#else
#ifndef JOIN_LATE
                joined[m] = member[m] || head[m] > applied[m];
#endif
#endif
                computing[m] = joined[m]
            }
            m = 0
        };
end_serve: do
        :: atomic { /* a push; its grant is spent */
                if
                :: head[0] > reported[0] && computing[0] -> m = 0
                :: head[1] > reported[1] && computing[1] -> m = 1
#if L > 2
                :: head[2] > reported[2] && computing[2] -> m = 2
#endif
                fi;
                d_step {
                    computing[m] = false;
                    closed = true;
                    held[m] = true;
                    reported[m] = reported[m] + 1
                };
                barrier();
                m = 0
            }
#if defined(JOIN_LATE) || defined(MEMBERS_ONLY)
        :: atomic {
                if
                :: !joined[0] && (member[0] || head[0] > reported[0]) -> m = 0
                :: !joined[1] && (member[1] || head[1] > reported[1]) -> m = 1
                fi;
                joined[m] = true;
                computing[m] = !closed; /* else it takes part from the next superstep on */
                m = 0
            }
#endif
#ifndef WAIT_FOR_DEAD
        :: atomic { /* somebody has left and all of its is reported */
                if
                :: joined[0] && !wanted[0] && head[0] == reported[0] -> m = 0
                :: joined[1] && !wanted[1] && head[1] == reported[1] -> m = 1
#if L > 2
                :: joined[2] && !wanted[2] && head[2] == reported[2] -> m = 2
#endif
                fi;
                joined[m] = false;
                member[m] = false;
                computing[m] = false;
                barrier();
                m = 0
            }
#endif
        :: pending && ALL_FINISHED -> /* carry out */
            do
            :: m < L -> action[m] = false; m++
            :: m == L -> break
            od;
            m = 0;
            do
            :: m < L ->
                if
                :: commit[m] -> action[m] = true; upto[m] = applied[m] + 1
                :: !commit[m]
                fi;
                m++
            :: m == L -> break
            od;
            atomic {
                superstep++;
                m = 0;
                for (l : 0 .. L - 1) { commit[l] = false }
                l = 0;
                pending = false
            }
        :: atomic { /* a grant: all it stands on is in the weights */
                if
                :: MAY_GRANT(0) -> grant[0] = GRANT(0)
                :: MAY_GRANT(1) -> grant[1] = GRANT(1)
#if L > 2
                :: MAY_GRANT(2) -> grant[2] = GRANT(2)
#endif
                fi
            }
        od
    } unless {
        atomic {
            die ? eval(i * 3 + 2) ->
            end_thread(2, manager_lease);
            d_step {
                for (l : 0 .. L - 1) {
                    joined[l] = false; computing[l] = false; held[l] = false; commit[l] = false;
                    reported[l] = 0
                }
                closed = false; pending = false; all = false; l = 0; m = 0
            }
        }
    }
}

proctype Learner(byte l) {
    {
        do
        :: head[l] < K ->
            head[l] < grant[l];
            head[l] = head[l] + 1
        :: head[l] == K -> break
        od
    } unless { atomic { die ? eval(LEARNER + l) -> killed = true } };
    gone[l] = true
}

proctype Watchdog() {
end: do
    :: atomic { wanted[0] && gone[0] -> wanted[0] = false }
    :: atomic { wanted[1] && gone[1] -> wanted[1] = false }
#if L > 2
    :: atomic { wanted[2] && gone[2] -> wanted[2] = false }
#endif
    od
}

/* Ends the first learner, and the first server's threads one by one, whenever it likes. */
proctype Kernel() {
end: do
#ifndef LEARNER_LIVES
    :: die ! LEARNER
#endif
#ifndef SERVER_LIVES
    :: die ! 0
#ifndef WHOLE
    :: die ! 1
    :: die ! 2
#endif
#endif
    :: false
    od
}

proctype Monitor() {
    byte l;
    timeout ->
    d_step {
        for (l : 0 .. L - 1) {
            assert(gone[l] && !wanted[l]);
            assert((killed && l == 0) || head[l] == K);
            assert(did[l] == head[l] && did[(S - 1) * L + l] == head[l]);
            assert(applied[l] == head[l] && applied[(S - 1) * L + l] == head[l])
        }
        assert(steps[0] == superstep && steps[S - 1] == superstep);
        assert(!cursor[0] && !cursor[S - 1]);
        done = true
    }
}

ltl progress { <> done }

init {
    atomic {
        byte l;
        for (l : 0 .. 1) {
            run Shard(l, 0);
#if S > 1
            run Shard(l, 1);
#endif
            run Manager(l)
        }
        for (l : 0 .. L - 1) { wanted[l] = true; member[l] = true; run Learner(l) }
        l = 0;
        run Watchdog(); run Kernel(); run Monitor()
    }
}
