/* One learner's gradients through a ring of N slots into S shards of C chunks each.
 *
 * Code: native/ps_ring.c ps_claim, ps_publish, ps_release; gadei_ps/server/record.py begin,
 * unlock, finish; gadei_ps/server/dense.py apply_dense; gadei_ps/server/rows.py _move_stretch;
 * gadei_ps/server/chunks.py _change_chunk; gadei_ps/server/undo.py save, restore;
 * gadei_ps/server/recover.py; gadei_ps/server/arrival.py on_arrival; gadei_ps/server/shard.py stand_by;
 * native/ps_lease.c.
 *
 * Processes: the learner; the shard threads of KILLS + 1 servers, of which the first serves and the
 * others wait for the leases, a server once one before it has lost a thread; the kernel, which may end
 * the learner and every thread of every server but the last, each at any step: waiting, recovering or
 * serving. As a thread ends, its lease comes free. With S = 1 all other shards together are one tail
 * that moves at any time, which is all that the learner and this shard see of them.
 *
 * Abstractions, and why they lose nothing:
 * - A value is the number of gradients in it; addition is the only thing that must not happen twice
 *   or never. TORN stands for whatever half a store leaves: of weights, undo log or payload.
 * - Weights, optimizer slots of a chunk are one value: they are saved, changed and restored together.
 *   To store what is there already leaves it whole, so a restored chunk may be saved again.
 * - Memory is sequentially consistent. Each store that another thread waits for is a release store
 *   met by an acquire load, so there is no cycle that a weaker order would add; the two places that
 *   need a fence are in sleep.pml.
 * - Waiting is a guard: what it costs to sleep and wake is in sleep.pml.
 * - Two chunks (C), or three, where a half of the undo log is used a second time.
 *
 * A death is a rendezvous with the kernel in `unless`: one step, possible before every statement. It
 * always comes at last, when nothing else is to be done, so a run without deaths is a prefix; what a
 * death might repair is seen with fewer KILLS and with -DLEARNER_LIVES.
 *
 * -DN=1..3 slots. Left out or wrong on purpose, to see the check fail: -DNO_UNDO, -DONE_HALF (the
 * undo log has room for one chunk), -DNO_LEASE, -DTAIL_FIRST (slot given back before the last chunk
 * is done), -DIDLE_FIRST (cursor idle before the sequence counts as applied). */
#ifndef N
#define N 2
#endif
#ifndef F
#define F (N + 1) /* frames, so that every slot is used again at least once */
#endif
#ifndef KILLS
#define KILLS 2
#endif
#define INCS (KILLS + 1)
#ifndef S
#define S 1
#endif
#ifndef C
#define C 2
#endif
#define IDLE 15
#define TORN 200
#define NOBODY 9

byte slot[N];    /* sequence + 1 of the frame in it */
byte head;
byte tail[S];
byte others;      /* the slowest tail of all other shards */
byte w[S * C];       /* weights, by shard * C + chunk */
byte undo[S * 2];    /* two halves, by chunk % 2 */
byte cursor[S] = IDLE;
byte record[S];  /* sequence of the frame in hand */
byte record_step[S];
byte steps[S];
byte applied[S];
byte lease[S] = NOBODY;
bool dead[INCS * S]; /* threads, by server * S + shard */
#define LEARNER (INCS * S)
chan die = [0] of { byte } /* a thread, or LEARNER */
#ifdef NO_LEASE
byte up;         /* servers below it are being killed */
#endif
bool learner_killed, learner_gone, done;

#ifdef ONE_HALF
#define UNDO undo[k * 2]
#else
#define UNDO undo[k * 2 + c % 2]
#endif

inline apply_chunks() {
    do
    :: c < C ->
#ifndef NO_UNDO
        if
        :: x -> x = 0 /* restored: the log is overwritten by what is in it */
        :: !x -> UNDO = TORN; UNDO = w[k * C + c]
        fi;
#endif
        cursor[k] = c * 2 + 1;
        d_step { assert(slot[record[k] % N] == record[k] + 1); x = w[k * C + c]; w[k * C + c] = TORN }
#ifdef TAIL_FIRST
        if
        :: c == C - 1 -> tail[k] = record[k] + 1
        :: else
        fi;
#endif
        d_step {
            assert(slot[record[k] % N] == record[k] + 1);
            w[k * C + c] = (x == TORN -> TORN : x + 1);
            x = 0;
            c++ /* and stays open until the next one is */
        }
    :: atomic { c == C -> cursor[k] = C * 2; c = 0 }; break
    od
}

inline finish() {
#ifdef IDLE_FIRST
    steps[k] = record_step[k] + 1;
    cursor[k] = IDLE;
    applied[k] = record[k] + 1
#else
    applied[k] = record[k] + 1;
    steps[k] = record_step[k] + 1;
    cursor[k] = IDLE
#endif
}

#define KILLED(i) (dead[(i) * S] || dead[(i) * S + S - 1])

proctype Shard(byte me; byte k) {
    byte c, x;
end_spare: {
#ifdef NO_LEASE
        me <= up;
#else
        atomic { (me == 0 || KILLED(me - 1)) && lease[k] == NOBODY -> lease[k] = me }
#endif
        /* recover */
        if
        :: cursor[k] == IDLE
        :: atomic { cursor[k] != IDLE -> c = cursor[k] / 2; x = cursor[k] % 2 };
            if
#ifndef NO_UNDO
            :: x ->
                w[k * C + c] = TORN; /* it stays open */
                w[k * C + c] = UNDO
            :: !x
#else
            :: x = 0
#endif
            fi;
            apply_chunks();
            finish()
        fi;
        tail[k] = applied[k];
        /* serve */
end_idle: do
        :: head != tail[k] ->
            d_step { record[k] = tail[k]; record_step[k] = steps[k] } /* counts only from cursor on */
            cursor[k] = 0;
            apply_chunks();
            finish();
            tail[k] = record[k] + 1
        od
    } unless {
        atomic {
            die ? eval(me * S + k) ->
            dead[me * S + k] = true;
            if
            :: lease[k] == me -> lease[k] = NOBODY
            :: else
            fi;
            c = 0;
            x = 0
        }
    }
}

#define FREE(k) head - tail[(k) % S] < N

proctype Learner() {
    {
        do
        :: head < F ->
            FREE(0) && FREE(1) && (S > 1 || head - others < N);
            slot[head % N] = TORN;
            slot[head % N] = head + 1;
            head++
        :: else -> break
        od
    } unless { atomic { die ? eval(LEARNER) -> learner_killed = true } };
    learner_gone = true
}

proctype Others() {
end: do
    :: others < head -> others++
    od
}

/* Ends the learner, and the threads of every server but the last one by one, whenever it likes; each
 * by a rendezvous, so that the thread is gone in that step. */
proctype Kernel() {
end: do
#ifndef LEARNER_LIVES
    :: die ! LEARNER
#endif
#if KILLS > 0
#ifdef NO_LEASE
    :: up < KILLS -> up++
    :: up -> if :: die ! 0 :: dead[0] fi
#else
    :: die ! 0
#if S > 1
    :: die ! 1
#endif
#if KILLS > 1
    :: die ! S
#if S > 1
    :: die ! S + 1
#endif
#endif
#endif
#endif
    :: false
    od
}

/* Runs when nothing else can: a deadlock ends up here with work undone. */
proctype Monitor() {
    byte i;
    timeout ->
    d_step {
        assert(learner_gone);
        assert(learner_killed || head == F);
        for (i : 0 .. S * C - 1) { assert(w[i] == head) }
        for (i : 0 .. S - 1) {
            assert(applied[i] == head && steps[i] == head && tail[i] == head && cursor[i] == IDLE)
        }
        done = true
    }
}

ltl progress { <> done }

init {
    atomic {
        byte i;
        for (i : 0 .. INCS - 1) {
            run Shard(i, 0);
#if S > 1
            run Shard(i, 1)
#endif
        }
        run Learner();
#if S == 1
        run Others();
#endif
        run Kernel(); run Monitor()
    }
}
