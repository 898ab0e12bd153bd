/* A row of the roster, used by G learners one after the other; two shards, two servers, a watchdog
 * that may be killed and started again.
 *
 * Code: watchdog/roster.py attach, _leave, free_rows, and the adoption by a new watchdog;
 * gadei_ps/server.py _take_in, _look_at_roster, _retire and the standby's following of the roster;
 * gadei_ps/shard.py serve, _look_up, _on_arrival, _keep_books; gadei_ps/apply.py recover.
 *
 * Processes: a learner for each generation (publishes up to H frames, ends at any time, killed or
 * by itself); the watchdog and its successor; the managers and shard threads of two servers, the
 * first of which may be killed; the kernel, which ends its threads one by one, later, in any order.
 *
 * Abstractions: one row, because rows share nothing but the table's version. A frame's chunks are
 * one step (apply.pml). Ring of generation g is g; `name` says which of them the name ring.0 leads
 * to; `mapped` is a set of bits. The table's version counts 1, 2, 3, 1: no shard is ever further
 * behind, because a manager waits after it has taken a ring out. Reading a word and acting on it is
 * one step where the word can only change in the direction that keeps the condition true (head of a
 * dead learner, applied).
 *
 * Who dies is limited by -DSERVER_LIVES and -DWATCHDOG_LIVES; a death is a rendezvous with the kernel,
 * as in apply.pml. -DALL_PUBLISH: every learner publishes H frames, not fewer.
 *
 * Wrong on purpose:
 *   -DNO_GENERATION  recover takes whatever ring its table has in the row
 *   -DNO_RING_WAIT   recover goes on without the ring if its table does not have it yet
 *   -DNO_MAP_CHECK   who maps by name does not compare the ring's generation
 *   -DSHARED_SEEN    versions of the table that shards have seen: one word for both servers
 *   -DSERVED_FIRST   served := 0 before retired := generation
 *   -DALWAYS_RESET   a manager zeroes `applied` of every ring it takes in, served before or not
 *   -DNO_SERVED_CHECK shards take what their table shows without looking at `served`
 *   -DDEAF_RECOVERY   a shard that waits for a ring in recover does not say what it has seen
 *   -DEVICT_ALIVE    wanted := 0 while the learner can still publish */
#ifndef G
#define G 2
#endif
#ifndef H
#define H 1
#endif
#define NOBODY 9
#define SERVERS 2
#define S 2
#define KILLED (dead[0] || dead[1] || dead[2])
#define WATCHDOG 6
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
byte cursor[S];          /* 0: idle, 1: begun, 2: all chunks done */
byte rec_generation[S], rec_sequence[S];
/* leases */
byte lease[S] = NOBODY;
byte manager_lease = NOBODY;
bool watchdog_killed;
bool dead[3];            /* threads of the first server: shard 0, shard 1, manager */
/* private to the servers */
byte table[SERVERS];     /* generation of the ring that shards are shown; 0: none */
byte ring[SERVERS];      /* what is really behind it */
byte mapped[SERVERS];
byte version[SERVERS] = 1;
byte seen[4];            /* by server * S + shard; 0: has no lease yet */
bool ready[4];
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
#define NOT_STARTED_OR_SEEN(i, k) (!ready[(i) * S + (k)] || SEEN(i, k) == version[i])

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
inline end_thread(thread, lock) {
    d_step {
        dead[thread] = true;
        if
        :: lock == 0 -> lock = NOBODY
        :: else
        fi;
        if
        :: dead[0] && dead[1] && dead[2] ->
            table[0] = 0; ring[0] = 0; mapped[0] = 0; version[0] = 0;
            ready[0] = false; ready[1] = false;
#ifndef SHARED_SEEN
            seen[0] = 0; seen[1] = 0;
#endif
            skip
        :: else
        fi
    }
}

#ifdef NO_GENERATION
#define HAS_RING table[i]
#else
#define HAS_RING table[i] == rec_generation[k]
#endif

proctype Shard(byte i; byte k) {
    byte known, known_ring, t;
end_spare: {
        atomic { (i == 0 || KILLED) && lease[k] == NOBODY -> lease[k] = i; ready[i * S + k] = true };
        if
        :: cursor[k] == 1 ->
#ifdef NO_RING_WAIT
            if
            :: table[i] == rec_generation[k] -> work(ring[i], rec_generation[k])
            :: table[i] != rec_generation[k] -> cursor[k] = 2 /* no ring, so nothing is applied */
            fi;
#else
            do
            :: HAS_RING -> break
#ifndef DEAF_RECOVERY
            :: !(HAS_RING) && SEEN(i, k) != version[i] -> SEEN(i, k) = version[i]
#endif
            od;
            work(ring[i], rec_generation[k]);
#endif
            finish()
        :: cursor[k] == 2 -> finish()
        :: else
        fi;
        SEEN(i, k) = 0; /* nothing is known yet */
end_idle: do
        :: SEEN(i, k) != version[i] ->
            d_step { known = table[i]; known_ring = ring[i]; t = applied[k]; SEEN(i, k) = version[i] }
#ifndef NO_SERVED_CHECK
            d_step {
                if
                :: known && served != known -> known = 0; known_ring = 0; t = 0
                :: else
                fi
            }
#endif
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
        :: k == 0 && known && wanted != known && !drained && SERVED_IS(known) &&
           applied[0] == head[known_ring] && applied[1] == head[known_ring] ->
            d_step { assert(mapped[i] & BIT(known_ring)); drained = true }
        od
    } unless { atomic { die ? eval(i * 3 + k) -> end_thread(k, lease[k]); known = 0; known_ring = 0; t = 0 } }
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

proctype Manager(byte i) {
    byte n, g;
end_spare: {
        /* standby: follows the roster until its shard 0 serves */
end_follow: do
        :: atomic { ready[i * S] && manager_lease == NOBODY -> manager_lease = i }; break
        :: atomic { generation != retired && served == generation && !table[i] -> g = generation };
            map();
            if
            :: n -> put_up()
            :: else -> g = 0
            fi
        :: table[i] && (retired == table[i] || generation != table[i]) ->
            forget();
            NOT_STARTED_OR_SEEN(i, 0) && NOT_STARTED_OR_SEEN(i, 1);
            unmap()
        od;
        /* active */
end_serve: do
        :: table[i] && (retired == table[i] || generation != table[i]) ->
            forget(); /* left over from the standby's time */
            ALL_SEEN(i);
            unmap()
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
                served = 0;
                d_step { applied[0] = 0; applied[1] = 0 } /* each has its own reader */
                drained = false;
                served = g
            :: served == g
            fi;
            put_up()
        :: table[i] && generation == table[i] && wanted != table[i] && drained && retired != table[i] ->
            forget();
            ALL_SEEN(i);
#ifdef SERVED_FIRST
            served = 0;
            retire()
#else
            retire();
            served = 0
#endif
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

/* Ends the first watchdog, and the threads of the first server one by one, whenever it likes; each
 * by a rendezvous, so that the thread is gone in that step. */
proctype Kernel() {
end: do
#ifndef SERVER_LIVES
    :: die ! 0
    :: die ! 1
    :: die ! 2
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
