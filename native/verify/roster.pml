/* A row of the roster, used by G learners one after the other; two shards, KILLS + 1 servers, a
 * watchdog that may be killed and started again.
 *
 * Code: watchdog/roster.py adopt, begin, admit, _leave, free_rows; _adopt_rings in watchdog/job_memory.py;
 * gadei_ps/server/manager.py _follow, _map_ring, _look_at_members, _evict, _retire, _abandoned; take_in
 * in gadei_ps/server/driver.py; gadei_ps/server/rings.py; gadei_ps/memory/ring.py; gadei_ps/server/shard.py
 * stand_by, serve, _update_accounts; gadei_ps/server/known.py look_up; gadei_ps/server/arrival.py on_arrival,
 * settle_broken; gadei_ps/server/recover.py; finish in gadei_ps/server/record.py; native/ps_guard.c; for
 * DETACH native/ps_calls.c, ps_publish_frame in native/ps_ring.c, native/gadei_push.c, ps_land, detach in
 * learners/attach.py.
 *
 * Processes: a learner for each generation (publishes up to H frames, ends at any time); the watchdog
 * and its successor; the managers and shard threads of the servers, all but the last of which may be
 * killed; the kernel, which ends their threads one by one, later, in any order. A third server is
 * started once one of the first two is gone.
 *
 * What a learner may do beside that:
 *   -DDETACH    it detaches while another thread of it pushes, and dies later or not before
 *   -DTRUNCATE  truncates its ring at any time: every process that reads it finds zeros, knowing that
 *   -DUNLINK    removes the ring's name: a process that has not mapped it yet finds it only through
 *               one that has
 *   -DWILD      writes heads that cannot be: each look at the head finds one of these, or the right one
 *
 * Abstractions: one row, because rows share nothing but the table's version. A frame's chunks and
 * accounts are one step (apply.pml, accounting.pml). Ring of generation g is g; `name` says which of them the
 * name ring.0 leads to; `mapped` is a set of bits. The table's version counts 1, 2, 3, 1: no shard is
 * ever further behind, because a manager waits after it has taken a ring out; with one row there is
 * nothing that it could do meanwhile. Reading a word and acting on it is one step where the word can
 * only change in the direction that keeps the condition true (head of a dead learner, applied). A frame
 * that is torn counts in `did` like one that is applied: chunk by chunk it is in apply.pml. Of the
 * rings that other processes keep under a lost name only the right one is found; an older one
 * would hold frames of another generation, which are refused.
 *
 * Who dies is limited by -DSERVER_LIVES and -DWATCHDOG_LIVES; -DWHOLE: the threads of a server
 * end together. A death is a rendezvous with the kernel, as in apply.pml. -DALL_PUBLISH: every learner
 * publishes H frames, not fewer.
 *
 * Wrong on purpose:
 *   -DNO_GENERATION  recover takes whatever ring its table has in the row
 *   -DNO_RING_WAIT   recover goes on without the ring if its table does not have it yet
 *   -DALWAYS_RING    recover waits for the ring also where all is applied and accounted for (with NO_HELD)
 *   -DNO_MAP_CHECK   who maps by name does not compare the ring's generation
 *   -DSHARED_SEEN    versions of the table that shards have seen: one word for all servers (with NO_HELD)
 *   -DSERVED_STAYS   a manager that takes a ring in does not clear `served` first
 *   -DALWAYS_RESET   a manager zeroes `applied` of every ring it takes in, served before or not
 *   -DNO_SERVED_CHECK  shards take what their table shows without looking at `served`
 *   -DNO_RETIRED_CHECK shard 0 lets go of a learner without looking at `retired`
 *   -DONLY_LAST      a ring is forgotten only if it is the last that was retired in its row
 *   -DDEAF_RECOVERY  a shard that waits for a ring in recover does not say what it has seen
 *   -DHALF_ROWS      a server without watchdog also lets go of rows that were being given away
 *   -DEVICT_ALIVE    wanted := 0 while the learner can still publish
 *   -DNO_ENTER       (with DETACH) a thread publishes without entering
 *   -DNO_SHUT        (with DETACH) who detaches does not wait for the thread that is publishing
 *   -DWORD_FIRST     (with DETACH) `detached` is stored before that wait
 *   -DUNSEEN         a ring is written down as broken before every shard knows it
 *   -DNO_GATE        a broken ring is let go without another look at the shards' counts
 *   -DNO_NOTE        the next server does not look whether a ring is written down as broken
 *   -DNO_SETTLE      shards do not consume what another one has consumed of a broken ring
 *   -DNO_HELD        a manager lets a ring go before all shards serve
 *   -DNO_ZEROS       a served ring that cannot be mapped is not replaced */
#ifndef G
#define G 2
#endif
#ifndef H
#define H 1
#endif
#ifndef KILLS
#define KILLS 1
#endif
#define NOBODY 9
#define SERVERS (KILLS + 1)
#define S 2
#define WATCHDOG 9
chan die = [0] of { byte } /* server * 3 + thread, or WATCHDOG */
#define BIT(g) (1 << (g))
#define OTHER (1 - k)    /* shard */

/* the row */
byte generation, wanted, served, retired;
bool drained;
byte applied[S];
byte name;
byte head[G + 1];
bool alive[G + 1];
#if defined(TRUNCATE) || defined(UNLINK) || defined(WILD)
#define DAMAGE
byte broken;             /* generation */
bool unlinked;           /* the name leads nowhere */
byte truncated;          /* bits of rings */
byte wild;               /* bits of rings with heads that cannot be */
byte kept;               /* rings that the watchdog has mapped */
byte mark[SERVERS];      /* in the table of rings: the generation that is not read any more */
byte zeros[SERVERS];     /* rings in whose place zeros are mapped */
byte harmed;             /* rings of which frames may be lost */
#endif
#ifdef DETACH
bool inside[G + 1];      /* a thread of the learner is publishing */
#ifndef NO_ENTER
bool left[G + 1];
#endif
bool detached[G + 1];    /* in the ring */
bool asked[G + 1];       /* the watchdog has heard it */
#endif
/* records */
byte cursor[S];          /* 0: idle, 1: begun, 2: all applied and accounted for */
byte rec_generation[S], rec_sequence[S];
/* leases */
byte lease[S] = NOBODY;
byte manager_lease = NOBODY;
bool watchdog_killed;
bool dead[SERVERS * 3];  /* threads, by server * 3 + shard; 2: the manager */
/* private to the servers */
byte table[SERVERS];     /* generation of the ring that shards are shown; 0: none */
byte ring[SERVERS];      /* what is really behind it */
byte mapped[SERVERS];
byte version[SERVERS] = 1;
byte seen[SERVERS * S];  /* by server * S + shard */
bool ready[SERVERS * S]; /* has its lease, and reads the table */
bool holds[SERVERS * S]; /* has recovered */
byte did[9];             /* frames of each generation in the weights, by shard * (G + 1) + generation */
byte counter;
bool done;

#ifdef SHARED_SEEN
#define SEEN(i, k) seen[k]
#else
#define SEEN(i, k) seen[(i) * S + (k)]
#endif
#ifdef NO_SERVED_CHECK
#define SERVED_IS(g) true
#else
#define SERVED_IS(g) served == g
#endif
#define ALL_SEEN(i) (SEEN(i, 0) == version[i] && SEEN(i, 1) == version[i])
#define SEEN_OR_BLIND(i, k) (!ready[(i) * S + (k)] || SEEN(i, k) == version[i])
#define NOBODY_LOOKS(i) (SEEN_OR_BLIND(i, 0) && SEEN_OR_BLIND(i, 1))
#define DYING(i) (dead[(i) * 3] || dead[(i) * 3 + 1] || dead[(i) * 3 + 2])
#define GONE(i) (dead[(i) * 3] && dead[(i) * 3 + 1] && dead[(i) * 3 + 2])
#if KILLS > 1
#define STARTED (i < 2 || GONE(0) || GONE(1))
#else
#define STARTED true
#endif
#define MAY_WAIT (i == 0 || (STARTED && DYING(i - 1)))

#ifdef DAMAGE
#define LOST(r) ((truncated | zeros[i]) & BIT(r))
#define IS_MARKED(g) (mark[i] == (g))
#define IS_HARMED(r) (harmed & BIT(r))
#ifdef NO_NOTE
#define IS_NOTED(g) false
#else
#define IS_NOTED(g) (broken == (g))
#endif
#else
#define LOST(r) false
#define IS_MARKED(g) false
#define IS_HARMED(r) false
#endif
#ifdef DETACH
#define MAY_LEAVE(g) (!alive[g] || asked[g])
#define SAYS_LEFT(g) (detached[g] && (mapped[i] & BIT(g)) && !(LOST(g)))
#else
#define MAY_LEAVE(g) (!alive[g])
#define SAYS_LEFT(g) false
#endif

inline work(r, label) { /* applies all chunks from ring r, which the shard believes to be `label` */
    d_step {
        assert(mapped[i] & BIT(r)); /* not forgotten */
        assert(r == label);         /* not another learner's */
#ifdef DAMAGE
        if
        :: LOST(r) -> mark[i] = label /* torn */
        :: else -> assert(rec_sequence[k] < head[r])
        fi;
#else
        assert(rec_sequence[k] < head[r]);
#endif
        did[k * (G + 1) + r] = did[k * (G + 1) + r] + 1;
        assert(did[k * (G + 1) + r] == rec_sequence[k] + 1); /* once */
        cursor[k] = 2
    }
}

inline finish() {
    d_step { assert(served == rec_generation[k]); applied[k] = rec_sequence[k] + 1 }
    d_step { cursor[k] = 0; rec_generation[k] = 0; rec_sequence[k] = 0 }
}

/* The words private to a process go with its last thread. */
inline clear(s) {
    if
    :: GONE(s) ->
        table[s] = 0; ring[s] = 0; mapped[s] = 0; version[s] = 0;
        ready[s * S] = false; ready[s * S + 1] = false;
        holds[s * S] = false; holds[s * S + 1] = false;
#ifdef DAMAGE
        mark[s] = 0; zeros[s] = 0;
#endif
#ifndef SHARED_SEEN
        seen[s * S] = 0; seen[s * S + 1] = 0;
#endif
        skip
    :: else
    fi
}

#ifdef WHOLE /* the rendezvous hands the atomic step on */
#define NEXT_DIES die ! i * 3 + k + 1
#else
#define NEXT_DIES skip
#endif

inline end_thread(thread, lock) {
    d_step {
        dead[i * 3 + thread] = true;
        if
        :: lock == i -> lock = NOBODY
        :: else
        fi;
        clear(i)
    }
}

#ifdef NO_GENERATION
#define HAS_RING table[i]
#else
#define HAS_RING table[i] == rec_generation[k]
#endif

#ifdef ALWAYS_RING
#define MUST_WAIT cursor[k]
#else
#define MUST_WAIT (cursor[k] == 1)
#endif

proctype Shard(byte i; byte k) {
    byte known, known_ring, t, v;
    bool looked; /* at the table */
end_spare: {
        atomic {
            MAY_WAIT && lease[k] == NOBODY ->
            lease[k] = i;
            ready[i * S + k] = true;
            SEEN(i, k) = 0 /* nothing is known yet */
        };
        if
        :: MUST_WAIT ->
#ifdef NO_RING_WAIT
            if
            :: table[i] == rec_generation[k] -> work(ring[i], rec_generation[k])
            :: table[i] != rec_generation[k] -> cursor[k] = 2 /* no ring, so nothing is applied */
            fi
#else
            do
            :: HAS_RING -> break
#ifndef DEAF_RECOVERY
            :: !(HAS_RING) && SEEN(i, k) != version[i] -> SEEN(i, k) = version[i]
#endif
            od;
            if
            :: cursor[k] == 1 -> work(ring[i], rec_generation[k])
            :: else
            fi
#endif
        :: !MUST_WAIT
        fi;
        if
        :: cursor[k] -> finish()
        :: !cursor[k]
        fi;
        holds[i * S + k] = true;
end_idle: do
        :: SEEN(i, k) != version[i] || !looked ->
            d_step { known = table[i]; known_ring = ring[i]; t = applied[k]; v = version[i]; looked = true }
            d_step {
#ifndef NO_SERVED_CHECK
                if
                :: known && served != known -> known = 0; known_ring = 0; t = 0
                :: else
                fi;
#endif
#ifdef DAMAGE
                if
                :: known && IS_NOTED(known) -> mark[i] = known
                :: else
                fi;
#endif
                SEEN(i, k) = v;
                v = 0
            }
#ifdef DAMAGE
        /* reads the head, and finds that the memory is lost, or nonsense */
        :: known && !IS_MARKED(known) && ((truncated | wild) & BIT(known_ring)) -> mark[i] = known
#ifndef NO_SETTLE
        :: atomic { known && IS_MARKED(known) && applied[OTHER] > applied[k] -> v = applied[OTHER] };
            d_step {
                assert(served == known);
                did[k * (G + 1) + known_ring] = did[k * (G + 1) + known_ring] + v - applied[k];
                applied[k] = v;
                t = v;
                v = 0
            }
#endif
        :: k == 0 && known && wanted != known && !drained && retired < known && IS_MARKED(known) &&
            broken == known &&
            !(cursor[1] && rec_generation[1] == known) &&
            applied[0] == applied[1] ->
            if
            :: applied[0] == applied[1] -> drained = true /* looked at after the cursor */
            :: applied[0] != applied[1]
            fi
#endif
        :: known && !IS_MARKED(known) && !(LOST(known_ring)) && head[known_ring] != t ->
            d_step { /* the record counts only from `cursor` on */
                assert(mapped[i] & BIT(known_ring));
                assert(served == known);
                rec_generation[k] = known;
                rec_sequence[k] = t;
                t++;
                cursor[k] = 1
            }
            work(known_ring, known);
            finish()
#ifdef NO_RETIRED_CHECK
        :: k == 0 && known && wanted != known && !drained && !IS_MARKED(known) && !(LOST(known_ring)) &&
#else
        :: k == 0 && known && wanted != known && !drained && retired < known && !IS_MARKED(known) &&
           !(LOST(known_ring)) &&
#endif
           applied[0] == head[known_ring] && applied[1] == head[known_ring] ->
            d_step { assert(mapped[i] & BIT(known_ring)); drained = true }
        od
    } unless { atomic { die ? eval(i * 3 + k) ->
            end_thread(k, lease[k]);
            known = 0; known_ring = 0; t = 0; v = 0; looked = false;
            NEXT_DIES
        } }
}

#ifdef DAMAGE
#define KEPT(g) ((kept | (mapped[0] & ~zeros[0]) | (mapped[1] & ~zeros[1])) & BIT(g))
#define CAN_MAP(g) ((name && !unlinked && !(truncated & BIT(name))) || (KEPT(g) && !(truncated & BIT(g))))
#else
#define CAN_MAP(g) true
#endif

/* Maps the ring that ring.0 names, or one that another process keeps; n: its generation, 0: none. */
inline map() {
    d_step {
        n = name;
#ifdef DAMAGE
        if
        :: !name || unlinked || (truncated & BIT(name)) ->
            n = (KEPT(g) && !(truncated & BIT(g)) -> g : 0)
        :: else
        fi;
#endif
        mapped[i] = mapped[i] | BIT(n);
        if
        :: !n -> mapped[i] = mapped[i] & ~BIT(0)
        :: else
        fi
    }
}

/* The name is used again: what was mapped is this learner's if it has not been retired yet. */
inline look_again() {
    d_step {
#ifndef NO_MAP_CHECK
        if
        :: retired >= g -> mapped[i] = mapped[i] & ~BIT(n); n = 0
        :: else -> assert(generation == g)
        fi;
#endif
#ifdef DAMAGE
        if
        :: n && IS_NOTED(g) -> mark[i] = g
        :: else
        fi;
#endif
        skip
    }
}

#define NEXT(v) v = v % 3 + 1

inline put_up() { d_step { table[i] = g; ring[i] = n; NEXT(version[i]); n = 0; g = 0 } }

#ifdef DAMAGE
#define NOT_TOLD told = false
#else
#define NOT_TOLD skip
#endif

inline forget() {
    d_step { n = ring[i]; table[i] = 0; ring[i] = 0; NEXT(version[i]); NOT_TOLD }
}

inline retire() {
    d_step {
        assert(IS_HARMED(n) || did[n] == head[n]);
        assert(did[n] == did[G + 1 + n]);
        assert(did[n] <= head[n]);
        mapped[i] = mapped[i] & ~BIT(n);
        retired = n;
        n = 0
    }
}

inline unmap() { d_step { mapped[i] = mapped[i] & ~BIT(n); n = 0 } }

#ifdef ONLY_LAST
#define IS_RETIRED (retired == table[i])
#else
#define IS_RETIRED (retired >= table[i])
#endif
#ifdef NO_HELD
#define HELD true
#else
#define HELD (holds[i * S] && holds[i * S + 1])
#endif
#if !defined(DAMAGE) || defined(NO_GATE)
#define MAY_FORGET true
#else
#define MAY_FORGET (!(IS_MARKED(table[i]) || IS_NOTED(table[i])) || \
    (told && !cursor[0] && !cursor[1] && applied[0] == applied[1]))
#endif
#ifdef HALF_ROWS
#define IS_GIVEN wanted
#else
#define IS_GIVEN (wanted && wanted == generation)
#endif

proctype Manager(byte i) {
    byte n, g;
#ifdef DAMAGE
    bool told; /* every shard knows that the ring is broken */
#endif
end_spare: {
        STARTED;
        /* standby: follows the roster */
end_follow: do
        :: atomic { MAY_WAIT && manager_lease == NOBODY -> manager_lease = i }; break
        :: atomic {
                generation != retired && served == generation && !table[i] && CAN_MAP(generation) ->
                g = generation
            };
            map();
            look_again();
            if
            :: n -> put_up()
            :: else -> g = 0
            fi
        :: table[i] && IS_RETIRED -> forget(); NOBODY_LOOKS(i); unmap()
        od;
        /* active */
end_serve: do
        :: table[i] && IS_RETIRED -> /* left over from the standby's time */
            forget(); NOBODY_LOOKS(i); unmap()
        :: atomic { generation != retired && !table[i] -> g = generation };
            map();
#ifdef DAMAGE
            if
            :: !n && served != g -> retired = g; g = 0 /* refused */
            :: !n && served == g ->
#ifndef NO_ZEROS
                d_step {
                    n = g;
                    mapped[i] = mapped[i] | BIT(g);
                    zeros[i] = zeros[i] | BIT(g);
                    harmed = harmed | BIT(g);
                    mark[i] = g
                }
#else
                false
#endif
            :: n
            fi;
#endif
            look_again();
            if
            :: !n -> g = 0
            :: n ->
#ifdef ALWAYS_RESET
                if
                :: true ->
#else
                if
                :: served != g ->
#endif
#ifndef SERVED_STAYS
                    served = 0;
#endif
                    d_step { applied[0] = 0; applied[1] = 0 } /* each has its own reader */
                    served = g
                :: served == g
                fi;
                put_up()
            fi
#ifdef DAMAGE
        :: table[i] && !told && (IS_MARKED(table[i]) || IS_NOTED(table[i])) ->
            mark[i] = table[i];
#ifndef UNSEEN
            NEXT(version[i]);
            ALL_SEEN(i);
#endif
            d_step { told = true; broken = table[i] }
        :: table[i] && told && wanted == table[i] -> wanted = 0
#endif
        :: table[i] && generation == table[i] && wanted != table[i] && drained &&
            retired != table[i] && HELD && MAY_FORGET ->
            forget();
            ALL_SEEN(i);
            retire()
        :: watchdog_killed && IS_GIVEN && (!alive[wanted] || SAYS_LEFT(wanted)) -> wanted = 0
        od
    } unless { atomic { die ? eval(i * 3 + 2) -> end_thread(2, manager_lease); n = 0; g = 0; NOT_TOLD } }
}

#ifdef DETACH
/* A thread that pushes. */
proctype Learner(byte g) {
end_unborn: alive[g];
    {
        do
        :: head[g] < H ->
#ifndef NO_ENTER
            if
            :: atomic { !inside[g] -> inside[g] = true }
            :: inside[g] -> break /* refused */
            fi;
            if
            :: left[g] -> inside[g] = false; break
            :: !left[g]
            fi;
#endif
            if
            :: detached[g] -> break
            :: !detached[g] -> head[g] = head[g] + 1
            fi;
#ifndef NO_ENTER
            inside[g] = false
#endif
        :: break
        od
    } unless { !alive[g] }
}

/* The thread that detaches. */
proctype Leaver(byte g) {
end_unborn: alive[g];
    {
#ifndef NO_ENTER
        left[g] = true;
#endif
#ifdef WORD_FIRST
        detached[g] = true;
#endif
#ifndef NO_SHUT
        atomic { !inside[g] -> inside[g] = true }; /* and never leaves */
#endif
        detached[g] = true;
        asked[g] = true
    } unless { !alive[g] }
}

proctype End(byte g) {
end_unborn: alive[g];
    alive[g] = false
}
#else
proctype Learner(byte g) {
end_unborn: alive[g];
    do
    :: head[g] < H -> head[g] = head[g] + 1
#ifdef TRUNCATE
    :: d_step { !(truncated & BIT(g)) -> truncated = truncated | BIT(g); harmed = harmed | BIT(g) }
#endif
#ifdef WILD
    :: d_step { !(wild & BIT(g)) -> wild = wild | BIT(g); harmed = harmed | BIT(g) }
#endif
#ifdef UNLINK
    :: d_step { name == g && !unlinked -> unlinked = true }
#endif
#ifdef ALL_PUBLISH
    :: head[g] == H -> break
#else
    :: break
#endif
    od;
    alive[g] = false /* killed, or detached by itself */
}
#endif

#ifdef DAMAGE
#define KEEP(rings) kept = rings
#define FREE_NAME name = 0; unlinked = false
#else
#define KEEP(rings) skip
#define FREE_NAME name = 0
#endif

/* What `attach` and the others do; `counter` is lost with the process. */
proctype Watchdog(byte me) {
end_spare: {
        me == 0 || watchdog_killed;
        /* adoption, from the memory alone */
        d_step {
            counter = (generation > name -> generation : name);
            counter = (wanted > counter -> wanted : counter)
        }
        if
        :: wanted && wanted != generation -> wanted = 0 /* an attach that was not finished */
        :: else
        fi;
        if
        :: name && generation == retired -> FREE_NAME
        :: else
        fi;
#ifdef DAMAGE
        d_step {
            if
            :: name && CAN_MAP(generation) -> kept = BIT(generation)
            :: else -> FREE_NAME
            fi
        };
        if
        :: wanted && !kept -> wanted = 0 /* the ring is lost */
        :: else
        fi;
#endif
end_loop: do
        :: counter < G && generation == retired && !name ->
            d_step { counter++; name = counter; KEEP(BIT(counter)) }
            drained = false;
            wanted = counter;
            d_step { generation = counter; alive[counter] = true }
#ifdef EVICT_ALIVE
        :: wanted && wanted == generation ->
#else
        :: wanted && wanted == generation && MAY_LEAVE(wanted) ->
#endif
            wanted = 0
        :: generation == retired && name ->
#ifdef DAMAGE
            if
            :: wanted == generation -> wanted = 0 /* its ring was refused */
            :: wanted != generation
            fi;
#endif
            d_step { FREE_NAME; KEEP(0) }
        od
    } unless {
        atomic { die ? eval(WATCHDOG + me) -> watchdog_killed = true; counter = 0; KEEP(0) }
    }
}

/* Ends the first watchdog, and the threads of every server but the last one by one, whenever it
 * likes; each by a rendezvous, so that the thread is gone in that step. */
proctype Kernel() {
end: do
#ifndef SERVER_LIVES
    :: die ! 0
#if KILLS > 1
    :: die ! 3
#endif
#ifndef WHOLE
    :: die ! 1
    :: die ! 2
#if KILLS > 1
    :: die ! 4
    :: die ! 5
#endif
#endif
#endif
#ifndef WATCHDOG_LIVES
    :: die ! WATCHDOG
#endif
    :: false
    od
}

proctype Monitor() {
    byte g;
    timeout ->
    d_step {
        assert(generation == retired && !name && !wanted && counter == G);
        for (g : 1 .. G) {
            assert(!alive[g] && did[g] == did[G + 1 + g]);
            assert(IS_HARMED(g) || did[g] == head[g])
        }
        assert(!cursor[0] && !cursor[1]);
        assert(!table[manager_lease] && !mapped[manager_lease]);
        done = true
    }
}

ltl progress { <> done }

init {
    atomic {
        byte g;
#ifdef SHARED_SEEN
        version[1] = 3; /* other rows have made the servers count differently */
#endif
        for (g : 0 .. SERVERS - 1) { run Shard(g, 0); run Shard(g, 1); run Manager(g) }
        for (g : 1 .. G) {
            run Learner(g);
#ifdef DETACH
            run Leaver(g);
            run End(g)
#endif
        }
        g = 0;
        run Watchdog(0);
#ifndef WATCHDOG_LIVES
        run Watchdog(1);
#endif
        run Kernel();
        run Monitor()
    }
}
