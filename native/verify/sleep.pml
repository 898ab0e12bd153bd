/* Sleep and wake on futexes, without any time-out: no wake-up may be lost.
 *
 * Code: native/ps_ring.c ps_publish, ask, ps_shard_sleep and ps_wide_awake (a bit in sleepers, the
 * rings' heads, the bell), WAIT_UNTIL with wait_slot, ps_pass and ps_release (waits_slot, released);
 * on_arrivals in gadei_ps/server/arrival.py: one or more frames of a ring, and then one wake;
 * gadei_ps/server/shard.py serve, which clears the bit of a shard that died asleep, and look_up in
 * gadei_ps/server/known.py, which releases again what the dead one may have released without waking.
 *
 * Processes: a learner that publishes F frames through N slots; two shards; the second shard's
 * thread may be killed at any step and has a successor.
 *
 * Memory is not sequentially consistent here: every thread has a store buffer (a FIFO channel) which
 * is written to memory at any later time. A fence and a read-modify-write wait until it is empty.
 * This is what x86 does, and store-then-load is the only order that the sleeping protocol asks of a
 * fence; the other orders are acquire and release. A thread reads its own words from a private copy.
 * futex_wait compares and sleeps in one step, as the kernel does under its lock. A thread sleeps as
 * soon as it may: spinning first only hides races. Time-outs are left out on purpose.
 *
 * Wrong on purpose: -DNO_FENCE_PUBLISH, -DNO_FENCE_RELEASE, -DNO_FENCE_CLAIM (the fence at that place
 * left out), -DNO_RELEASE_AGAIN (the next one does not release), -DNO_WAKE (a visit to a ring ends
 * without a wake), -DASK (the learner also sets `wants` and wakes the same futex, which no change of
 * a watched word accompanies). */
#ifndef N
#define N 1
#endif
#ifndef F
#define F (N + 1)
#endif
#define S 2

/* memory */
byte head, sleepers, released;
bool waits_slot, wants;
byte tail[S], applied[S];
/* the kernel */
bool asleep[S], learner_asleep;
bool dead, learner_done, asked, done;
chan die = [0] of { bit }

mtype = { HEAD, WAITS, WANTS, TAIL, APPLIED }
chan of_learner = [5] of { mtype, byte }
chan of_shard[S] = [4] of { mtype, byte }

#define FENCE(buffer) empty(buffer)
#define SLOT_FREE (h - tail[0] < N && h - tail[1] < N)

active proctype Memory() {
    byte v;
end: do
    :: atomic { of_learner ? HEAD(v) -> head = v; v = 0 }
    :: atomic { of_learner ? WAITS(v) -> waits_slot = v; v = 0 }
    :: atomic { of_learner ? WANTS(v) -> wants = v; v = 0 }
    :: atomic { of_shard[0] ? TAIL(v) -> tail[0] = v; v = 0 }
    :: atomic { of_shard[1] ? TAIL(v) -> tail[1] = v; v = 0 }
    :: atomic { of_shard[0] ? APPLIED(v) -> applied[0] = v; v = 0 }
    :: atomic { of_shard[1] ? APPLIED(v) -> applied[1] = v; v = 0 }
    od
}

inline wake_shards() { d_step { asleep[0] = false; asleep[1] = false } }

active proctype Learner() {
    byte h, seen;
#ifdef ASK
    of_learner ! WANTS(1);
    FENCE(of_learner);
    if
    :: sleepers -> wake_shards()
    :: !sleepers
    fi;
    asked; /* it wants an answer before it goes on */
#endif
    do
    :: h < F ->
        do /* WAIT_UNTIL */
        :: SLOT_FREE -> break
        :: !SLOT_FREE ->
            seen = released;
            of_learner ! WAITS(1);
#ifndef NO_FENCE_CLAIM
            FENCE(of_learner);
#endif
            if
            :: !SLOT_FREE ->
                if
                :: atomic { released == seen -> learner_asleep = true };
                    !learner_asleep
                :: released != seen
                fi
            :: SLOT_FREE
            fi;
            of_learner ! WAITS(0)
        od;
        seen = 0;
        h++;
        of_learner ! HEAD(h);
#ifndef NO_FENCE_PUBLISH
        FENCE(of_learner);
#endif
        if
        :: sleepers -> wake_shards()
        :: !sleepers
        fi
    :: h == F -> break
    od;
    learner_done = true
}

/* A visit to the ring: frames that are there, any number of them from one on. */
inline visit() {
    do
    :: head != t ->
        t++;
        of_shard[k] ! APPLIED(t);
        of_shard[k] ! TAIL(t); /* ps_pass */
        if
        :: break
        :: head != t
        :: atomic { head == t -> break }
        fi
    od;
#ifndef NO_WAKE
    release()
#endif
}

inline release() {
    of_shard[k] ! TAIL(t);
#ifndef NO_FENCE_RELEASE
    FENCE(of_shard[k]);
#endif
    if
    :: waits_slot ->
        atomic { FENCE(of_shard[k]) -> released++ }; /* ps_ring_bell, a read-modify-write */
        learner_asleep = false
    :: !waits_slot
    fi
}

#define AWAKE sleepers = sleepers & ~(1 << k)

proctype Shard(byte k; bool heir) {
    byte t;
end_spare: {
        if
        :: heir && dead && FENCE(of_shard[k]) -> /* what the dead one had stored has arrived */
            atomic { t = applied[k]; AWAKE };
#ifndef NO_RELEASE_AGAIN
            release()
#endif
        :: !heir
        fi;
end_idle: do
        :: head != t -> visit()
#ifdef ASK
        :: k == 0 && wants && !asked -> asked = true
        :: head == t && !(k == 0 && wants && !asked) ->
#else
        :: head == t ->
#endif
            atomic { FENCE(of_shard[k]) -> sleepers = sleepers | (1 << k) };
            if
            :: head != t
            :: atomic { head == t -> asleep[k] = true };
end_asleep:     !asleep[k]
            fi;
            atomic { FENCE(of_shard[k]) -> AWAKE }
        od
    } unless { atomic { die ? eval(k == 0 || heir) -> dead = true; asleep[k] = false; t = 0 } }
}

active proctype Kernel() {
end: do
#ifndef SHARD_LIVES
    :: die ! 0 /* only the first thread of shard 1 hears it */
#endif
    :: false
    od
}

active proctype Monitor() {
    timeout ->
    d_step {
        assert(learner_done);
        assert(tail[0] == F && tail[1] == F);
#ifdef ASK
        assert(asked);
#endif
        done = true
    }
}

ltl progress { <> done }

init {
    atomic { run Shard(0, false); run Shard(1, false); run Shard(1, true) }
}
