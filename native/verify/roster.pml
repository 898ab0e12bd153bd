/* A row of the roster, used by G learners one after the other; two shards, KILLS + 1 servers, a
 * watchdog that may be killed and started again.
 *
 * Code: watchdog/roster.py adopt, attach, _leave, free_rows; gadei_ps/server/manager.py _follow, _map_ring,
 * _take_in, _retire, _abandoned; gadei_ps/server/rings.py; gadei_ps/server/shard.py stand_by, serve,
 * _keep_books; gadei_ps/server/known.py look_up; gadei_ps/server/arrival.py on_arrival;
 * gadei_ps/server/recover.py; finish in gadei_ps/server/record.py.
 *
 * Processes: a learner for each generation (publishes up to H frames, ends at any time, killed or
 * by itself); the watchdog and its successor; the managers and shard threads of the servers, all but
 * the last of which may be killed; the kernel, which ends their threads one by one, later, in any
 * order. A third server is started once one of the first two is gone.
 *
 * Abstractions: one row, because rows share nothing but the table's version. A frame's chunks and
 * books are one step (apply.pml, books.pml). Ring of generation g is g; `name` says which of them the
 * name ring.0 leads to; `mapped` is a set of bits. The table's version counts 1, 2, 3, 1: no shard is
 * ever further behind, because a manager waits after it has taken a ring out; with one row there is
 * nothing that it could do meanwhile. Reading a word and acting on it is one step where the word can
 * only change in the direction that keeps the condition true (head of a dead learner, applied).
 *
 * Who dies is limited by -DSERVER_LIVES and -DWATCHDOG_LIVES; -DWHOLE: the threads of a server
 * end together. A death is a rendezvous with the kernel, as in apply.pml. -DALL_PUBLISH: every learner
 * publishes H frames, not fewer.
 *
 * Wrong on purpose:
 *   -DNO_GENERATION  recover takes whatever ring its table has in the row
 *   -DNO_RING_WAIT   recover goes on without the ring if its table does not have it yet
 *   -DALWAYS_RING    recover waits for the ring also where all is applied and booked
 *   -DNO_MAP_CHECK   who maps by name does not compare the ring's generation
 *   -DSHARED_SEEN    versions of the table that shards have seen: one word for all servers
 *   -DSERVED_STAYS   a manager that takes a ring in does not clear `served` first
 *   -DALWAYS_RESET   a manager zeroes `applied` of every ring it takes in, served before or not
 *   -DNO_SERVED_CHECK  shards take what their table shows without looking at `served`
 *   -DNO_RETIRED_CHECK shard 0 lets go of a learner without looking at `retired`
 *   -DONLY_LAST      a ring is forgotten only if it is the last that was retired in its row
 *   -DDEAF_RECOVERY  a shard that waits for a ring in recover does not say what it has seen
 *   -DHALF_ROWS      a server without watchdog also lets go of rows that were being given away
 *   -DEVICT_ALIVE    wanted := 0 while the learner can still publish */
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

/* the row */
byte generation, wanted, served, retired;
bool drained;
byte applied[S];
byte name;
byte head[G + 1];
bool alive[G + 1];
/* records */
byte cursor[S];          /* 0: idle, 1: begun, 2: all applied and booked */
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

inline work(r, label) { /* applies all chunks from ring r, which the shard believes to be `label` */
    d_step {
        assert(mapped[i] & BIT(r)); /* not forgotten */
        assert(r == label);         /* not another learner's */
        assert(rec_sequence[k] < head[r]);
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
end_spare: {
        atomic { MAY_WAIT && lease[k] == NOBODY -> lease[k] = i; ready[i * S + k] = true };
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
        SEEN(i, k) = 0; /* nothing is known yet */
end_idle: do
        :: SEEN(i, k) != version[i] ->
            d_step { known = table[i]; known_ring = ring[i]; t = applied[k]; v = version[i] }
            d_step {
#ifndef NO_SERVED_CHECK
                if
                :: known && served != known -> known = 0; known_ring = 0; t = 0
                :: else
                fi;
#endif
                SEEN(i, k) = v;
                v = 0
            }
        :: known && head[known_ring] != t ->
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
        :: k == 0 && known && wanted != known && !drained &&
#else
        :: k == 0 && known && wanted != known && !drained && retired < known &&
#endif
           applied[0] == head[known_ring] && applied[1] == head[known_ring] ->
            d_step { assert(mapped[i] & BIT(known_ring)); drained = true }
        od
    } unless { atomic { die ? eval(i * 3 + k) ->
            end_thread(k, lease[k]);
            known = 0; known_ring = 0; t = 0; v = 0;
            NEXT_DIES
        } }
}

/* Maps the ring that ring.0 names; n: its generation, 0 if it must not be used. */
inline map() {
    d_step {
        n = name;
#ifndef NO_MAP_CHECK
        if
        :: n != g -> n = 0
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

#define NEXT(v) v = v % 3 + 1

inline put_up() { d_step { table[i] = g; ring[i] = n; NEXT(version[i]); n = 0; g = 0 } }

inline forget() {
    d_step { n = ring[i]; table[i] = 0; ring[i] = 0; NEXT(version[i]) }
}

inline retire() {
    d_step {
        assert(did[n] == head[n] && did[G + 1 + n] == head[n]);
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
#ifdef HALF_ROWS
#define IS_GIVEN wanted
#else
#define IS_GIVEN (wanted && wanted == generation)
#endif

proctype Manager(byte i) {
    byte n, g;
end_spare: {
        STARTED;
        /* standby: follows the roster */
end_follow: do
        :: atomic { MAY_WAIT && manager_lease == NOBODY -> manager_lease = i }; break
        :: atomic { generation != retired && served == generation && !table[i] -> g = generation };
            map();
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
            assert(n == g); /* the name stays until the row is retired */
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
        :: table[i] && generation == table[i] && wanted != table[i] && drained && retired != table[i] ->
            forget();
            ALL_SEEN(i);
            retire()
        :: watchdog_killed && IS_GIVEN && !alive[wanted] -> wanted = 0
        od
    } unless { atomic { die ? eval(i * 3 + 2) -> end_thread(2, manager_lease); n = 0; g = 0 } }
}

proctype Learner(byte g) {
end_unborn: alive[g];
    do
    :: head[g] < H -> head[g] = head[g] + 1
#ifdef ALL_PUBLISH
    :: head[g] == H -> break
#else
    :: break
#endif
    od;
    alive[g] = false /* killed, or detached by itself */
}

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
        :: name && generation == retired -> name = 0
        :: else
        fi;
end_loop: do
        :: counter < G && generation == retired && !name ->
            d_step { counter++; name = counter }
            drained = false;
            wanted = counter;
            d_step { generation = counter; alive[counter] = true }
#ifdef EVICT_ALIVE
        :: wanted && wanted == generation ->
#else
        :: wanted && wanted == generation && !alive[wanted] ->
#endif
            wanted = 0
        :: generation == retired && name -> name = 0
        od
    } unless { atomic { die ? eval(WATCHDOG + me) -> watchdog_killed = true; counter = 0 } }
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
        for (g : 1 .. G) { assert(!alive[g] && did[g] == head[g] && did[G + 1 + g] == head[g]) }
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
        for (g : 1 .. G) { run Learner(g) }
        g = 0;
        run Watchdog(0);
#ifndef WATCHDOG_LIVES
        run Watchdog(1);
#endif
        run Kernel();
        run Monitor()
    }
}
