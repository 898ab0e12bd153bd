/* The end of a job: rings are closed, what is published is applied, the last checkpoint is made; or it
 * cannot be made, and the job is served again from its memory while the learner still pushes.
 *
 * Code: over, begin, _tell in watchdog/stopping.py; close_rings, kill, _leave, adopt in
 * watchdog/roster.py; adopt in watchdog/job_memory.py; shut_down in watchdog/supervisor.py;
 * ps_publish_frame in native/ps_ring.c; _evict, _retire in gadei_ps/server/manager.py.
 *
 * Processes: a learner that tries to push TRIES times, and may be killed; W watchdogs one after the
 * other, all but the last of which may be killed at any time, give up a stop that does not get on, or
 * fail to save; a server.
 *
 * Abstractions: one row, one generation: a learner that was let go would attach anew, with another
 * ring (roster.pml). The server is one shard that does not die (apply.pml, roster.pml) and runs
 * between two watchdogs, too. The full fences stand between a store and a load of every process, so
 * memory is sequentially consistent here; memory-order.md has that pair ("closed").
 *
 * Checked: nothing is published in a ring that is let go; the last checkpoint has every gradient that
 * is published, so every one whose push has returned; one more at most, of a learner that died
 * between the two.
 *
 * Wrong on purpose:
 *   -DNO_SIGN      the learner does not say that it is publishing
 *   -DLOOK_FIRST   it says so after its look at the stop word
 *   -DNO_WANTED    it does not look whether it was let go
 *   -DLEAVE_HUNG   a learner that hangs while it publishes is let go, not killed
 *   -DNEVER_CLOSED learners are let go while the stop word lets them push
 *   -DSAVE_FIRST   the checkpoint is made before all that is published is applied */
#ifndef W
#define W 3
#endif
#ifndef TRIES
#define TRIES 3
#endif
#define LEARNER 0
#define WATCHDOG 1
chan die = [0] of { byte }
#define GO 0
#define NOW 1
#define CLOSED 2

byte stop = GO;
bool wanted = true, retired, publishing;
byte head, applied;
bool kept;               /* the job has ended, its memory is still there */
bool saved;
byte checkpoint;         /* how many gradients it has */
/* of the processes */
bool killed, dead;       /* the learner */
byte returned;           /* pushes */
bool done;

active proctype Learner() {
    byte tries;
    {
        do
        :: tries < TRIES ->
            tries++;
#ifdef LOOK_FIRST
            if
            :: stop == CLOSED -> goto refused
            :: else
            fi;
#endif
#ifndef NO_SIGN
            publishing = true;
#endif
#ifndef LOOK_FIRST
            if
            :: stop == CLOSED -> goto refused
            :: else
            fi;
#endif
#ifndef NO_WANTED
            if
            :: !wanted -> goto refused
            :: else
            fi;
#endif
            d_step { assert(!retired && !saved); head++ };
            publishing = false;
            returned++;
            goto next;
        refused:
            publishing = false;
        next:
            skip
        :: tries == TRIES -> break
        od;
        false /* it does other things */
    } unless {
        atomic { die ? eval(LEARNER) -> dead = true; tries = 0 }
    }
}

inline apply() {
    d_step { assert(!retired); applied++ }
}

active proctype Server() {
    do
    :: applied < head -> apply()
    :: !wanted -> break
    od;
    do /* it reads head after `wanted`: nothing more can come */
    :: applied < head -> apply()
    :: applied == head -> break
    od;
    retired = true
}

proctype Watchdog(byte i) {
    {
        /* adopts */
        if
        :: kept -> stop = GO; kept = false
        :: else
        fi;
        if
        :: wanted && dead -> wanted = false
        :: else
        fi;
        /* serves, until it is to stop, or goes on with a stop that another one had begun */
        if
        :: stop == GO -> stop = NOW
        :: else
        fi;
#ifndef NEVER_CLOSED
        stop = CLOSED;
#endif
        do
        :: wanted && !publishing -> wanted = false
        :: wanted && publishing && !killed -> /* hung */
#ifdef LEAVE_HUNG
            wanted = false
#else
            killed = true
#endif
        :: wanted && dead -> wanted = false
#ifdef SAVE_FIRST
        :: !wanted -> break
#endif
        :: retired -> break
        :: i < W - 1 -> goto keep /* it does not get on */
        od;
        checkpoint = applied;
        if
        :: d_step { saved = true; assert(checkpoint == head) }; goto over
        :: i < W - 1
        fi;
    keep:
        kept = true
    over:
        skip
    } unless {
        die ? eval(WATCHDOG)
    };
    atomic {
        if
        :: !saved -> run Watchdog(i + 1)
        :: else -> done = true
        fi
    }
}

/* They may kill the learner at any time, and do at last, and all watchdogs but the last. */
active proctype KillLearner() {
end: die ! LEARNER
}

active proctype KillWatchdogs() {
    byte kills;
    do
    :: kills < W - 1 ->
end:    die ! WATCHDOG;
        kills++
    :: kills == W - 1 -> break
    od
}

init { run Watchdog(0) }

active proctype Monitor() {
    timeout ->
    d_step {
        assert(done && saved && retired);
        assert(checkpoint == head && applied == head);
        assert(returned <= head && head <= returned + 1)
    }
}

ltl progress { <> done }
