/* A global pause: all others wait while one learner copies the weights and assigns others, with the
 * deaths of a server, of the learner that asks and of another one in the middle, and a next pause.
 *
 * Code: _all_wait, _reach_pause, _assign, _end_pause, _inherited_pause, _fail_over in
 * gadei_ps/server/driver.py; _pass_held, _pass_on_arrival in
 * gadei_ps/server/shard.py; catch_up in gadei_ps/server/arrival.py; ps_ask_exclusive, ps_is_exclusive in
 * native/ps_ring.c; learners/client.py.
 *
 * Processes: a learner that pushes K gradients; A that ask for N pauses each, and with -DPUSHES push a
 * gradient of their own before the first one; the watchdog; the managers and shard threads of two
 * servers, the first of which may be killed, its threads ending one by one, later, in any order.
 *
 * Abstractions: a gradient or an assignment is made in one step (apply.pml has chunks, undo log and
 * tails), on arrival; supersteps of a model that collects are in barrier.pml. Rings are mapped and rows
 * stay (roster.pml). Of weights there is how many gradients are in them, in each shard: an assignment
 * must find as many as were copied. Who sleeps is woken (sleep.pml). A pause may end without an
 * assignment. -DGIVES_UP: a learner that waits for a pause may abandon it at any time. -DNO_TURNS: the
 * learner that pushes does not wait for its turn. -DAWAKE: shards also look once though there is nothing
 * to do. A death is a rendezvous with the kernel, as in apply.pml; -DSERVER_LIVES, -DLEARNER_LIVES and
 * -DASKER_LIVES limit who dies; of those that ask only the first may. -DWHOLE: the server's threads end
 * together.
 *
 * Checked: no gradient comes between copy and assignment, in any shard; at most one pause; each
 * gradient and assignment once; nobody pauses for ever.
 *
 * Wrong on purpose:
 *   -DNO_OBEY     the learner is notified of the pause before the shards hold
 *   -DNO_AGREE    it is notified though a shard is behind the others
 *   -DOLD_ANSWER  pauses have no number: a shard's answer to one is taken for that to the next one
 *   -DNO_CATCH_UP a shard that holds does not do what another one has done
 *   -DNO_LOOK     nor does it look again whether that was a superstep's
 *   -DSAME_WORD   the learner asks by the same word each time
 *   -DFORGET      the next server ends the pause that it finds, as if there were none
 *   -DEND_FIRST   a pause ends before what its learner has assigned is made
 *   -DNO_WANTED   the manager does not look whether the learner is gone
 *   -DNO_OWN      it does not wait for what the learner itself has pushed
 *   -DNO_GRANTS   and does not grant anew at the end
 *   -DTOGETHER    nor wait with the next pause for the end of the one in flight */
#ifndef K
#define K 2
#endif
#ifndef A
#define A 1
#endif
#ifndef N
#define N 2
#endif
#ifdef PUSHES
#define OWN 1 /* gradients of the asking learner */
#else
#define OWN 0
#endif
#define R (1 + A) /* rings: of the learner that pushes, then of those that ask */
#define NOBODY 9

/* rings and roster */
byte head[R], ask[A], pause[A];
byte grant = K;
bool gone[R], wanted[R];
/* control, state */
byte mode, pauses; /* mode: pauses << 1, and whether the shards hold */
byte superstep, whose, upto; /* who has assigned, and which frame */
byte obeyed[2], finished[2];
byte applied[6]; /* by shard * R + ring */
byte gradients[2]; /* in the weights of each shard */
byte copied[4]; /* by asking learner * 2 + shard */
byte lease[2] = NOBODY;
byte manager_lease = NOBODY;
bool dead[3], killed[2], done;
#define LEARNER 6
chan die = [0] of { byte } /* server * 3 + thread, or LEARNER + ring */

#define KILLED (dead[0] || dead[1] || dead[2])
#define ALL_FINISHED (finished[0] == superstep && finished[1] == superstep)
#define AGREE(r) (applied[r] == applied[R + r])
#define ALL_APPLIED(r) (applied[r] == head[r] && applied[R + r] == head[r])
#define HOLDS(word) (word & 1)

#ifdef OLD_ANSWER
#define MODE(holds) (holds)
#else
#define MODE(holds) (pauses << 1 | holds)
#endif

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

/* The oldest frame of a ring: a gradient, or an assignment. */
inline apply(r) {
    assert(applied[k * R + r] < head[r]);
    if
    :: r == 0 || applied[k * R + r] < OWN -> gradients[k]++
    :: else -> assert(gradients[k] == copied[(r - 1) * 2 + k])
    fi;
    applied[k * R + r]++
}

#ifdef NO_CATCH_UP
#define BEHIND(r) false
#else
#define BEHIND(r) (applied[k * R + r] < applied[(1 - k) * R + r])
#endif
#define MORE(r) (applied[k * R + r] < head[r])
#if A > 1
#define ANY(what) (what(0) || what(1) || what(2))
#define THIRD(what) :: what(2) -> r = 2
#else
#define ANY(what) (what(0) || what(1))
#define THIRD(what)
#endif

/* One of those rings; R: there is none. */
#define SOME(what) if :: what(0) -> r = 0 :: what(1) -> r = 1 THIRD(what) :: !ANY(what) -> r = R fi

#define ONE 255 /* in the place of the mode: one has been applied */

/* It looks when there is something to do; with AWAKE once more in between. */
#define DUE (superstep > finished[k] || obeyed[k] != mode || (HOLDS(mode) -> ANY(BEHIND) : ANY(MORE)))
#ifdef AWAKE
bool looked[2];
#define WAKES atomic { DUE || !looked[k] -> looked[k] = looked[k] || !(DUE) }
#else
#define WAKES DUE
#endif

proctype Shard(byte i; byte k) {
    byte s, m, r;
end_spare: {
        atomic { (i == 0 || KILLED) && lease[k] == NOBODY -> lease[k] = i };
        obeyed[k] = 0;
end_idle: do
        :: WAKES ->
            s = superstep;
            m = mode;
            if
            :: HOLDS(m) && s > finished[k] ->
                d_step { /* barrier.pml has its stores one by one */
                    r = whose + 1;
                    assert(applied[k * R + r] + 1 == upto);
                    apply(r);
                    finished[k] = s
                }
            :: HOLDS(m) && s <= finished[k] ->
                SOME(BEHIND);
                if
                :: r < R ->
                    if
#ifdef NO_LOOK
                    :: d_step { apply(r) }
#else
                    :: mode == m ->
                        if
                        :: d_step { superstep == s -> apply(r) }
                        :: superstep != s
                        fi
                    :: mode != m
#endif
                    fi
                :: r == R -> obeyed[k] = m
                fi
            :: !HOLDS(m) ->
                obeyed[k] = m;
                do /* one, or more without another look at the mode */
                :: atomic { ANY(MORE) -> SOME(MORE); d_step { apply(r); r = 0; m = ONE } }
                :: m == ONE || !ANY(MORE) -> break
                od
            fi;
            atomic { s = 0; m = 0; r = 0 }
        od
    } unless { atomic { die ? eval(i * 3 + k) -> end_thread(k, lease[k]); s = 0; m = 0; r = 0; NEXT_DIES } }
}

#ifdef NO_WANTED
#define OVER (ask[who] != asked)
#else
#define OVER (ask[who] != asked || !wanted[who + 1])
#endif
/* What is granted to the other one is pushed, and applied; or it is gone. */
#define AT_BARRIER (!wanted[0] || (grant <= head[0] && ALL_APPLIED(0)))
#ifdef NO_OWN
#define OWN_APPLIED true
#else
#define OWN_APPLIED ALL_APPLIED(who + 1)
#endif
#ifdef NO_OBEY
#define ALL_OBEY true
#else
#define ALL_OBEY (obeyed[0] == mode && obeyed[1] == mode)
#endif
#ifdef NO_AGREE
#define ALL_AGREE true
#else
#define ALL_AGREE (AGREE(0) && AGREE(1) && AGREE(R - 1))
#endif

/* The oldest frame of the asking learner is an assignment. */
#define UNMADE (applied[who + 1] >= OWN && head[who + 1] > applied[who + 1])
#ifdef END_FIRST
#define UNMADE_YET (UNMADE && !OVER)
#else
#define UNMADE_YET UNMADE
#endif

#ifdef NO_TURNS
#define MOST head[0]
#else
#define MOST head[0] + 1
#endif

/* Phases of the manager. */
#define NEW 0 /* mode and grants are to come */
#define SERVE 1
#define FREEZE 2
#define BARRIER 3
#define HOLD 4
#define BEGUN 5

inline begin(a) {
    who = a;
    asked = ask[a];
    phase = FREEZE
}

inline publish() {
    d_step { whose = who; upto = applied[who + 1] + 1; superstep++ }
}

proctype Manager(byte i) {
    byte phase, who, asked, h;
end_spare: {
        atomic { (i == 0 || KILLED) && manager_lease == NOBODY -> manager_lease = i };
        d_step {
#ifdef FORGET
            pause[0] = 0; pause[A - 1] = 0;
#endif
            if
            :: pause[0] -> who = 0; asked = pause[0]; phase = BEGUN
#if A > 1
            :: pause[1] -> who = 1; asked = pause[1]; phase = BEGUN
#endif
            :: else
            fi
        };
end_serve: do
        :: phase == NEW && ALL_FINISHED ->
            mode = MODE(0);
#ifdef NO_GRANTS
            phase = SERVE
#else
            d_step { grant = K; phase = SERVE }
#endif
        :: d_step { phase == SERVE && ask[0] && wanted[1] -> begin(0) }
#if A > 1
        :: d_step { phase == SERVE && ask[1] && wanted[2] -> begin(1) }
#endif
        :: (phase == FREEZE || phase == BARRIER || phase == HOLD) && OVER -> phase = NEW
        :: phase == FREEZE ->
            h = MOST;
            d_step { grant = (grant < h -> grant : h); h = 0; phase = BARRIER }
        :: phase == BARRIER && AT_BARRIER && OWN_APPLIED && ALL_FINISHED ->
            d_step { pauses++; mode = MODE(1); phase = HOLD }
        :: phase == HOLD && lease[0] == i && lease[1] == i && ALL_OBEY && ALL_AGREE ->
            d_step {
                pause[who] = asked;
                assert(A == 1 || !pause[A - 1 - who]);
                phase = BEGUN
            }
        :: atomic { phase == BEGUN && ALL_FINISHED && UNMADE_YET -> publish() }
        :: phase == BEGUN && ALL_FINISHED && OVER -> /* then it looks what there is to make */
            if
            :: atomic { UNMADE_YET -> publish() }
            :: !UNMADE_YET -> d_step { pause[who] = 0; phase = NEW }
            fi
#ifdef TOGETHER
        :: d_step { phase == BEGUN && ask[1 - who] -> begin(1 - who) }
#endif
        od
    } unless {
        atomic {
            die ? eval(i * 3 + 2) ->
            end_thread(2, manager_lease);
            phase = 0; who = 0; asked = 0; h = 0
        }
    }
}

proctype Learner() {
    {
        do
        :: head[0] < K ->
#ifndef NO_TURNS
            head[0] < grant; /* what is granted may be less by now */
#endif
            head[0] = head[0] + 1
        :: head[0] == K -> break
        od
    } unless { atomic { die ? eval(LEARNER) -> killed[0] = true } };
    gone[0] = true
}

proctype Asker(byte a) {
    byte n;
    {
        head[a + 1] = OWN;
        do
        :: n < N ->
            n++;
#ifdef SAME_WORD
            ask[a] = 1;
#else
            ask[a] = n;
#endif
            if
            :: pause[a] == ask[a] ->
                copied[a * 2] = gradients[0];
                copied[a * 2 + 1] = gradients[1];
                assert(copied[a * 2] == copied[a * 2 + 1]);
                if
                :: head[a + 1] = head[a + 1] + 1; ALL_APPLIED(a + 1)
                :: skip
                fi
#ifdef GIVES_UP
            :: true /* it does not wait any longer */
#endif
            fi;
            ask[a] = 0
        :: n == N -> break
        od
    } unless { atomic { die ? eval(LEARNER + 1 + a) -> killed[1] = true; n = 0 } };
    gone[a + 1] = true
}

proctype Watchdog() {
end: do
    :: atomic { wanted[0] && gone[0] -> wanted[0] = false }
    :: atomic { wanted[1] && gone[1] -> wanted[1] = false }
#if A > 1
    :: atomic { wanted[2] && gone[2] -> wanted[2] = false }
#endif
    od
}

/* Ends learners, and the first server's threads one by one, whenever it likes. */
proctype Kernel() {
end: do
#ifndef LEARNER_LIVES
    :: die ! LEARNER
#endif
#ifndef ASKER_LIVES
    :: die ! LEARNER + 1
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
    byte r, sum;
    timeout ->
    d_step {
        assert(gone[0] && (killed[0] || head[0] == K));
        for (r : 0 .. R - 1) {
            assert(gone[r] && !wanted[r]);
            assert(ALL_APPLIED(r));
            sum = sum + (r == 0 || head[r] < OWN -> head[r] : OWN)
        }
        assert(gradients[0] == sum && gradients[1] == sum);
        assert(!pause[0] && !pause[A - 1] && !HOLDS(mode) && ALL_FINISHED);
        done = true
    }
}

ltl progress { <> done }

init {
    atomic {
        byte l;
        for (l : 0 .. 1) {
            run Shard(l, 0);
            run Shard(l, 1);
            run Manager(l)
        }
        for (l : 0 .. R - 1) { wanted[l] = true }
        l = 0;
        run Learner();
        for (l : 0 .. A - 1) { run Asker(l) }
        l = 0;
        run Watchdog(); run Kernel(); run Monitor()
    }
}
