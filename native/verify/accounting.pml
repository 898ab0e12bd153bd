/* Accounting of shard 0: B batches handed to two learners, answered, handed out again when one dies.
 *
 * Code: gadei_ps/server/account.py account_arrival, top_up_all, depart, show_work, show_all_work;
 * gadei_ps/server/ledger.py; gadei_ps/server/journal.py; begin and finish in gadei_ps/server/record.py;
 * gadei_ps/server/recover.py; _update_accounts in gadei_ps/server/shard.py; native/ps_ring.c ps_hand_out, ps_take_work.
 *
 * Processes: two learners, of which the second may be killed; the watchdog, who then says so; shard
 * 0's thread in KILLS + 1 servers, each but the last killed at any step.
 *
 * Abstractions: a gradient's chunks are one step (apply.pml has them). The journal is a copy of all
 * words of the accounts, made before `open`: a log of single old values is the same, because an entry
 * is whole before its word changes. One thread has the lease at a time (apply.pml), so a kill ends
 * the thread at once and the next begins to recover. Statistics are one counter for each row, and one
 * for those that are gone.
 * -DLEARNER_LIVES: only servers die. Which of several things to do comes first is left open, so
 * every order of the real loop is there.
 *
 * Wrong on purpose: -DNO_JOURNAL (nothing is rolled back), -DCOPY_FIRST (the learner sees a batch
 * before the transaction is committed), -DACCOUNTED_LATE (`accounted` stored after the journal is closed
 * instead of among its words). */
#ifndef B
#define B 3
#endif
#ifndef AHEAD
#define AHEAD 1
#endif
#ifndef KILLS
#define KILLS 2
#endif
#define R 2
#define N 1          /* slots of a ring */

typedef Accounts {
    byte out[R * AHEAD];    /* batch + 1 with a learner; 0: free */
    byte items[R * AHEAD];  /* the last batches handed to each, by handed % AHEAD */
    byte handed[R];
    byte next;
    byte agains;            /* how many of `again` are to be handed out again */
    byte past;              /* counted of those that are gone */
    byte counted[R];
    bool accounted
}
Accounts now;           /* in control */
Accounts old;           /* the journal; zero when it is closed, only to keep states few */
bool open;
byte again[B];       /* not in the journal: what stands above `agains` means nothing */

byte copy[R * AHEAD];  /* in the ring: what the learner reads */
byte work_head[R], work_tail[R];
byte frame[R * N];     /* batch + 1 that the frame answers */
byte head[R], tail[R], applied[R];
bool idle = true;      /* cursor == IDLE */
byte record_row, record_frame;
bool wanted[R] = true;
bool drained;          /* the second row */
bool killed[R], done;
byte up;               /* the server that serves */
byte answered[B], holder[B];
chan die = [0] of { byte }
chan die_learner = [0] of { byte }

inline set_all(to, from) { /* one word after the other matters only where a kill can fall between */
    d_step {
        for (i : 0 .. R * AHEAD - 1) { to.out[i] = from.out[i]; to.items[i] = from.items[i] }
        for (i : 0 .. R - 1) {
            to.handed[i] = from.handed[i]; to.counted[i] = from.counted[i]
        }
        to.next = from.next; to.agains = from.agains; to.past = from.past;
        to.accounted = from.accounted; i = 0
    }
}

inline clear_old() {
    for (i : 0 .. R * AHEAD - 1) { old.out[i] = 0; old.items[i] = 0 }
    for (i : 0 .. R - 1) { old.handed[i] = 0; old.counted[i] = 0 }
    old.next = 0; old.agains = 0; old.past = 0; old.accounted = false; i = 0
}

inline begin_accounting() { set_all(old, now); open = true }
inline commit() { d_step { open = false; clear_old() } }

inline roll_back() { /* word by word: a second death in it must be harmless */
    now.accounted = old.accounted;
    now.next = old.next;
    now.agains = old.agains;
    now.past = old.past;
    d_step { for (i : 0 .. R - 1) { now.counted[i] = old.counted[i] } i = 0 }
    now.handed[0] = old.handed[0];
    now.handed[1] = old.handed[1];
    d_step { for (i : 0 .. R * AHEAD - 1) { now.out[i] = old.out[i] } i = 0 }
    d_step { for (i : 0 .. R * AHEAD - 1) { now.items[i] = old.items[i] } i = 0 }
    commit()
}

/* The slot of row r that holds value v, or AHEAD. */
inline find(r, v) {
    i = 0;
    do
    :: i < AHEAD && now.out[r * AHEAD + i] != v -> i++
    :: else -> break
    od
}

/* The ring's copy of what row r holds. */
inline write_copy(r) {
    do
    :: work_head[r] < now.handed[r] ->
        copy[r * AHEAD + work_head[r] % AHEAD] = now.items[r * AHEAD + work_head[r] % AHEAD];
        d_step {
            i = copy[r * AHEAD + work_head[r] % AHEAD] - 1;
            assert(!answered[i]);
            assert(!holder[i] || killed[holder[i] - 1]); /* never with two that live */
            holder[i] = r + 1;
            i = 0;
            work_head[r] = work_head[r] + 1
        }
    :: else -> break
    od;
    assert(work_head[r] == now.handed[r])
}

/* Hands out until row r holds AHEAD. */
inline top_up(r) {
    do
    :: atomic { find(r, 0); b = i; i = 0 };
        if
        :: b == AHEAD -> break
        :: b < AHEAD && now.agains ->
            d_step { x = again[now.agains - 1]; now.out[r * AHEAD + b] = x };
            now.agains = now.agains - 1
        :: b < AHEAD && !now.agains && now.next < B ->
            d_step { x = now.next + 1; now.out[r * AHEAD + b] = x };
            now.next = now.next + 1
        :: b < AHEAD && !now.agains && now.next == B -> break
        fi;
        now.items[r * AHEAD + now.handed[r] % AHEAD] = x;
        now.handed[r] = now.handed[r] + 1;
#ifdef COPY_FIRST
        write_copy(r);
#endif
        x = 0
    od;
    atomic { b = 0; x = 0 }
}

inline account(more) { /* of the frame in flight */
    begin_accounting();
    now.counted[record_row] = now.counted[record_row] + 1;
    atomic { find(record_row, record_frame); assert(i < AHEAD); now.out[record_row * AHEAD + i] = 0; i = 0 };
    if
    :: more && wanted[record_row] -> top_up(record_row)
    :: else
    fi;
#ifdef ACCOUNTED_LATE
    commit();
    now.accounted = true;
#else
    now.accounted = true;
    commit();
#endif
}

inline finish() {
    d_step { /* absolute; the ghost `answered` counts only what is new */
        if
        :: applied[record_row] < tail[record_row] + 1 ->
            applied[record_row] = tail[record_row] + 1;
            answered[record_frame - 1] = answered[record_frame - 1] + 1;
            assert(answered[record_frame - 1] == 1)
        :: else
        fi
    };
    d_step { idle = true; record_row = 0; record_frame = 0 }
}

#define WORK(r) (now.agains || now.next < B) && \
    (now.out[r * AHEAD] == 0 || now.out[r * AHEAD + AHEAD - 1] == 0)

proctype Shard0(byte me) {
    byte i, b, x, r;
end_spare: {
        me == up;
        /* recover */
        if
        :: open ->
#ifdef NO_JOURNAL
            commit()
#else
            roll_back()
#endif
        :: else
        fi;
        if
        :: !idle ->
            if
            :: !now.accounted -> account(false)
            :: else
            fi;
            finish()
        :: else
        fi;
        tail[0] = applied[0];
        tail[1] = applied[1];
        write_copy(0);
        write_copy(1);
        /* serve */
end_idle: do
        :: atomic { if :: head[0] != tail[0] -> r = 0 :: head[1] != tail[1] -> r = 1 fi };
            d_step { record_row = r; record_frame = frame[r]; now.accounted = false };
            idle = false;
            account(true);
            finish();
            write_copy(r);
            d_step { tail[r] = applied[r]; r = 0 }
        :: atomic { if :: wanted[0] && WORK(0) -> r = 0 :: wanted[1] && WORK(1) -> r = 1 fi };
            begin_accounting();
            top_up(r);
            commit();
            write_copy(r);
            r = 0
        :: !wanted[1] && applied[1] == head[1] && !drained && idle ->
            begin_accounting();
            do
            :: atomic { i = 0; do :: i < AHEAD && !now.out[AHEAD + i] -> i++ :: else -> break od; b = i; i = 0 };
                if
                :: b < AHEAD ->
                    again[now.agains] = now.out[AHEAD + b];
                    now.agains = now.agains + 1;
                    now.out[AHEAD + b] = 0
                :: else -> break
                fi
            od;
            b = 0;
            now.past = now.past + now.counted[1];
            now.counted[1] = 0;
            commit();
            drained = true
        od
    } unless { atomic { die ? eval(me) -> up++; i = 0; b = 0; x = 0; r = 0 } }
}

proctype Learner(byte r) {
    byte b;
    {
end:    do
        :: work_tail[r] != work_head[r] ->
            d_step { b = copy[r * AHEAD + work_tail[r] % AHEAD]; work_tail[r] = work_tail[r] + 1 };
            head[r] == tail[r];
            frame[r] = b;
            d_step { head[r] = head[r] + 1; b = 0 }
        od
    } unless { atomic { die_learner ? eval(r) -> killed[r] = true; b = 0 } }
}

/* Ends the second learner, and the serving thread of shard 0 up to KILLS times, whenever it likes;
 * each by a rendezvous, so that it is gone in that step. */
proctype Kernel() {
end: do
#ifndef LEARNER_LIVES
    :: die_learner ! 1
#endif
    :: up < KILLS -> die ! up
    :: false
    od
}

proctype Watchdog() {
end: killed[1] -> wanted[1] = false
}

proctype Monitor() {
    byte i;
    timeout ->
    d_step {
        for (i : 0 .. B - 1) { assert(answered[i] == 1) }
        for (i : 0 .. R * AHEAD - 1) { assert(!now.out[i]) }
        assert(now.next == B && now.agains == 0 && idle && !open);
        assert(now.counted[0] == head[0] && now.counted[1] + now.past == head[1]);
        assert(drained == killed[1] && (!drained || !now.counted[1]));
        done = true
    }
}

ltl progress { <> done }

init {
    atomic {
        byte i;
        for (i : 0 .. KILLS) { run Shard0(i) }
        i = 0;
        run Learner(0); run Learner(1); run Kernel(); run Watchdog(); run Monitor()
    }
}
