/* A watcher sleeps on a ring in the place of a shard, without any time-out of the shard: no wake-up is
 * lost.
 *
 * Code: native/ps_ring.c ps_publish, ps_shard_sleep, ps_wait_any; sleep in gadei_ps/server/known.py;
 * gadei_ps/server/watchers.py.
 *
 * Processes: a learner that publishes F frames; a shard; a watcher. The watcher takes the ring over
 * and leaves it to the shard at any time (periods, and how many rings it may leave), or stays asleep
 * for good while the shard watches. More shards change nothing: each waits on its own. Memory is
 * sequentially consistent: sleep.pml has the fences between a store and the load after it.
 *
 * Wrong on purpose: -DHEAD_LATE (the watcher loads the head after it has said that it watches),
 * -DFLAG_LATE (the shard asks who watches after it has looked at the head), -DNO_BELL (the watcher
 * leaves the ring to the shard and does not ring), -DBELL_FIRST (it rings before it says so). */
#ifndef F
#define F 3
#endif

byte head, bell, tail;
bool watched, sleeping; /* `watched` of the row; the shard's bit in `sleepers` */
bool shard_asleep, on_head, watcher_asleep;
bool learner_done;

active proctype Learner() {
    do
    :: head < F ->
        head++;
        if
        :: sleeping ->
            d_step { /* FUTEX_WAKE of the head */
                watcher_asleep = false;
                if
                :: on_head -> shard_asleep = false; on_head = false
                :: else
                fi
            }
        :: !sleeping
        fi
    :: head == F -> break
    od;
    learner_done = true
}

active proctype Shard() {
    byte seen;
    bool apart;
end: do
    :: seen = bell;
        if
        :: head != tail -> tail++
        :: head == tail ->
#ifndef FLAG_LATE
            apart = watched;
#endif
            sleeping = true;
            if
            :: head != tail
            :: head == tail ->
#ifdef FLAG_LATE
                apart = watched;
#endif
                atomic { /* the kernel compares and queues */
                    if
                    :: bell == seen && (apart || head == tail) ->
                        shard_asleep = true;
                        on_head = !apart
                    :: else
                    fi
                };
end_asleep:     !shard_asleep
            fi;
            sleeping = false;
            apart = false
        fi;
        seen = 0
    od
}

inline ring_bell() {
    atomic { bell = (bell + 1) % 8; shard_asleep = false; on_head = false }
}

active proctype Watcher() {
    byte known, now;
    bool mine;
end: do
    :: now = head;
        if
        :: mine && now != known ->
            known = now;
            if
            :: ring_bell() /* it watches on: it may leave no more rings */
            ::
#ifdef BELL_FIRST
                ring_bell();
#endif
                watched = false;
                mine = false;
#if !defined(NO_BELL) && !defined(BELL_FIRST)
                ring_bell()
#else
                skip
#endif
            fi
        :: mine && now == known
        :: !mine ->
            known = now;
            if
            :: watched = true; mine = true
#ifdef HEAD_LATE
                ; known = head
#endif
            :: skip
            fi
        fi;
        now = 0;
        if
        :: mine ->
            atomic {
                if
                :: head == known -> watcher_asleep = true
                :: else
                fi
            };
end_asleep: !watcher_asleep
        :: !mine ->
            if
            :: skip  /* the next period */
            :: break /* none ever comes */
            fi
        fi
    od
}

active proctype Monitor() {
    timeout ->
    d_step {
        assert(learner_done);
        assert(tail == F)
    }
}
