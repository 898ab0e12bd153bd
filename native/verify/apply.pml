/* One learner's gradients through a ring of N slots into S shards of C chunks each.
 *
 * Code: native/ps_ring.c ps_claim, ps_publish, ps_release; gadei_ps/server/record.py begin,
 * unlock, finish, note_torn; gadei_ps/server/apply.py apply_dense, _move_stretch;
 * gadei_ps/server/chunks.py save, restore, _change, _note_span, reopen; gadei_ps/server/recover.py;
 * gadei_ps/server/arrival.py on_arrival; gadei_ps/server/shard.py stand_by; native/ps_lease.c.
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
 * -DLOSE: the learner may truncate its ring at any time. Then whoever reads it finds zeros: values that
 * change nothing, and no frame. No other frame is begun, and the one in flight is torn. Chunks lie in no
 * order, as those of rows do, and the record's two spans tell where; a span has one chunk here.
 *
 * -DN=1..3 slots. Left out or wrong on purpose, to see the check fail: -DNO_UNDO, -DONE_HALF (the
 * undo log has room for one chunk), -DNO_LEASE, -DTAIL_FIRST (slot given back before the last chunk
 * is done), -DIDLE_FIRST (cursor idle before the sequence counts as applied). With LOSE: -DNO_SPAN (the
 * next server restores a chunk by the frame, so not without it), -DONE_SPAN (the record has one span),
 * -DSPAN_FIRST (a span counts before its place is written), -DTORN_ADDED (torn := torn + 1),
 * -DTORN_LATE (torn is stored after the cursor says that all is applied). */
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
byte record[S];  /* sequence of the frame in flight */
byte record_step[S];
byte steps[S];
#ifdef LOSE
bool lost;           /* the ring */
byte first[S * 2];   /* of the spans: number of its chunk */
byte place[S * 2];
byte torn[S], tear[S];
#define PLACE(c) (C - 1 - (c))
#define IS_THERE (lost || slot[record[k] % N] == record[k] + 1)
#define MOVED(x) (x == TORN -> TORN : (lost -> x : x + 1))
#ifdef ONE_SPAN
#define SPAN(which) (k * 2)
#else
#define SPAN(which) (k * 2 + (which))
#endif
#ifdef TORN_ADDED
#define TEAR torn[k]
#else
#define TEAR tear[k]
#endif
#else
#define PLACE(c) (c)
#define IS_THERE (slot[record[k] % N] == record[k] + 1)
#define MOVED(x) (x == TORN -> TORN : x + 1)
#endif
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

#ifdef LOSE
inline note_span() {
    first[SPAN(which)] = IDLE;
#ifdef SPAN_FIRST
    first[SPAN(which)] = c;
    place[SPAN(which)] = PLACE(c);
#else
    place[SPAN(which)] = PLACE(c);
    first[SPAN(which)] = c;
#endif
    which = 1 - which
}

/* Where chunk c of a dead server belongs; the other span is written next. */
inline find_place() {
    d_step {
        which = (first[SPAN(1)] <= c && (first[SPAN(0)] > c || first[SPAN(1)] > first[SPAN(0)]));
        p = place[SPAN(which)];
        assert(p < C);
        which = 1 - which
    }
}

inline note_torn() {
    if
    :: lost -> torn[k] = TEAR + 1
    :: !lost
    fi
}
#endif

inline apply_chunks() {
    do
    :: c < C ->
#ifdef LOSE
        note_span();
#endif
#ifndef NO_UNDO
        if
        :: x -> x = 0 /* restored: the log is overwritten by what is in it */
        :: !x -> UNDO = TORN; UNDO = w[k * C + PLACE(c)]
        fi;
#endif
        cursor[k] = c * 2 + 1;
        d_step { assert(IS_THERE); x = w[k * C + PLACE(c)]; w[k * C + PLACE(c)] = TORN }
#ifdef TAIL_FIRST
        if
        :: c == C - 1 -> tail[k] = record[k] + 1
        :: else
        fi;
#endif
        d_step {
            assert(IS_THERE);
            w[k * C + PLACE(c)] = MOVED(x);
            x = 0;
            c++ /* and stays open until the next one is */
        }
#ifdef LOSE
    :: c < C && lost -> atomic { c = C; x = 0 } /* seen at a look between two stretches */
#endif
#if defined(LOSE) && !defined(TORN_LATE)
    :: c == C -> note_torn(); atomic { cursor[k] = C * 2; c = 0 }; break
#else
    :: atomic { c == C -> cursor[k] = C * 2; c = 0 }; break
#endif
    od
#ifdef TORN_LATE
    ;
    note_torn()
#endif
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
#ifdef LOSE
    byte p;
    bit which;
#endif
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
#ifdef LOSE
#ifdef NO_SPAN
            :: x && !lost ->
#else
            :: x ->
#endif
                find_place();
                w[k * C + p] = TORN; /* it stays open */
                w[k * C + p] = UNDO;
                p = 0
#ifdef NO_SPAN
            :: x && lost -> x = 0
#endif
#else
            :: x ->
                w[k * C + c] = TORN; /* it stays open */
                w[k * C + c] = UNDO
#endif
            :: !x
#else
            :: x = 0
#endif
            fi;
#ifdef LOSE
            if
            :: cursor[k] == C * 2 -> c = 0
            :: cursor[k] != C * 2 && lost -> note_torn(); c = 0; x = 0
            :: cursor[k] != C * 2 && !lost -> apply_chunks()
            fi;
#else
            apply_chunks();
#endif
            finish()
        fi;
        tail[k] = applied[k];
        /* serve */
end_idle: do
#ifdef LOSE
        :: head != tail[k] && !lost ->
            d_step {
                tear[k] = torn[k];
                first[k * 2] = IDLE;
                first[k * 2 + 1] = IDLE
            }
#else
        :: head != tail[k] ->
#endif
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
#ifdef LOSE
            p = 0;
            which = 0;
#endif
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
#ifdef LOSE
        :: lost = true; break
#endif
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
#ifdef LOSE
        assert(learner_killed || lost || head == F);
        for (i : 0 .. S * C - 1) {
            assert(w[i] <= applied[i / C]); /* and is whole */
            assert(w[i] == applied[i / C] || w[i] + 1 == applied[i / C] && torn[i / C])
        }
        for (i : 0 .. S - 1) {
            assert(lost || applied[i] == head && !torn[i]);
            assert(applied[i] <= head && torn[i] <= 1);
            assert(steps[i] == applied[i] && tail[i] == applied[i] && cursor[i] == IDLE)
        }
#else
        assert(learner_killed || head == F);
        for (i : 0 .. S * C - 1) { assert(w[i] == head) }
        for (i : 0 .. S - 1) {
            assert(applied[i] == head && steps[i] == head && tail[i] == head && cursor[i] == IDLE)
        }
#endif
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
