/* The paper's learner: a training thread, a push thread and a pull thread around queues of size one.
 *
 * Code: learners/pipeline.py (weights, push, flush, close); learners/host.py (_push_loop, _pull_loop,
 * _copy), Queue(1); `writes` in learners/client.py; native/ps_ring.c ps_claim, ps_publish; unlock and
 * finish in gadei_ps/server/record.py; GaDei, section 4.1, figure 5 and its lemmas.
 *
 * Processes: the three threads; a server that consumes the ring of N slots: it writes to the weights,
 * lets go of them, and counts the gradient then; optionally the watchdog evicts the learner at any
 * time, so that the push thread fails. Before it closes, the training thread asks for weights until
 * it has those with all gradients, under their version.
 *
 * Abstractions: threads of one process share memory under Python's lock or behind a queue, which is
 * a barrier: sequentially consistent. A wait with the time-out POLL_S that looks at _closing is a
 * guard on both. A gradient's content is a number, TORN while it is written; that of weights is how
 * many gradients are in them. The server is one tail: for the learner several shards are their
 * slowest, and `writes` is their sum.
 *
 * A gradient array is in use from its first write until it is stored in a slot. There are three at a
 * time: computed, queued, being stored. GRADIENTS arrays are used in turn.
 *
 * Wrong on purpose: -DGRADIENTS=2 (an array on its way is written again), -DSHARED_BACK (one buffer of
 * weights instead of front and back), -DNO_FAILURE_CHECK (push does not look whether a thread failed),
 * -DWRITES_ONLY (a pull is skipped while nothing is written, though a gradient counts later),
 * -DVERSION_LATE (the version is read after the weights). */
#ifndef N
#define N 2
#endif
#ifndef F
#define F 4
#endif
#ifndef GRADIENTS
#define GRADIENTS 3
#endif
#define TORN 99

byte slot[N], head, tail;
byte gradient[GRADIENTS];
bool busy[GRADIENTS];       /* handed over and not yet in a slot */
bool loading[2];            /* the pull thread writes this buffer of weights */
byte version_of[2], held[2]; /* by each buffer: the version it is said to have, and its gradients */
byte writes, weights, version, front;
byte unfinished;
bool closing, failed, evicted, push_ended, pull_ended, trained, done;
#ifdef WRITES_ONLY
#define COUNTED 0
#else
#define COUNTED version
#endif

chan to_push = [1] of { byte, byte }
chan to_pull = [1] of { byte }
chan pulled = [1] of { byte }

inline take() { /* weights(), where a pull has arrived */
    pulled ? b;
    d_step { g = front; front = b; b = 0 };
    assert(version_of[front] <= held[front]);
    assert(empty(to_pull)); /* so that put() does not wait */
    to_pull ! g;
    g = 0
}

active proctype Train() {
    byte i, g, b;
    to_pull ! 1;
    do
    :: i < F && !failed ->
        if
        :: nempty(pulled) -> take()
        :: empty(pulled)
        fi;
        g = i % GRADIENTS;
        /* compute: reads the front weights from begin to end, writes a gradient */
        b = version_of[front];
        d_step { assert(!loading[front] && !busy[g]); gradient[g] = TORN };
        i++;
        d_step { assert(!loading[front] && version_of[front] == b && !busy[g]); gradient[g] = i; busy[g] = true };
        b = 0;
        /* push() */
        unfinished++;
        if
        :: to_push ! g, i
#ifndef NO_FAILURE_CHECK
        :: failed && full(to_push)
#endif
        fi;
        g = 0
    :: i == F || failed -> break
    od;
    i = 0;
    do
    :: nempty(pulled) && version_of[front] != F && !failed -> take()
    :: version_of[front] == F || failed -> break
    od;
    /* close(): flush, then join */
    if
    :: !unfinished
    :: failed
    fi;
    closing = true;
    push_ended && pull_ended;
    trained = true
}

active proctype Push() {
    byte g, i;
    do
    :: to_push ? g, i ->
        if
        :: head - tail < N && !evicted
        :: evicted || (closing && head - tail == N) -> failed = true; break
        fi;
        slot[head % N] = TORN;
        assert(gradient[g] == i && busy[g]);
        d_step { slot[head % N] = gradient[g]; assert(gradient[g] == i) };
        head++;
        d_step { busy[g] = false; unfinished--; g = 0; i = 0 }
    :: closing && empty(to_push) -> break
    :: closing && nempty(to_push) -> break /* only after a failure: flush() has seen to that */
    od;
    atomic { g = 0; i = 0; push_ended = true }
}

active proctype Pull() {
    byte b, seen;
    do
    :: to_pull ? b ->
        writes + COUNTED != seen || closing;
#ifdef SHARED_BACK
        b = front;
#endif
        loading[b] = true;
        seen = writes;
        seen = seen + COUNTED;
#ifdef VERSION_LATE
        held[b] = weights;
        version_of[b] = version;
#else
        version_of[b] = version;
        held[b] = weights;
#endif
        loading[b] = false;
        assert(empty(pulled)); /* so that put() does not wait */
        pulled ! b;
        b = 0
    :: closing -> break
    od;
    atomic { seen = 0; pull_ended = true }
}

active proctype Server() {
end: do
    :: tail != head ->
        assert(slot[tail % N] == tail + 1); /* each once, whole, in order */
        writes++; /* locked */
        weights++;
        writes++;
        version++;
        tail++
    od
}

active proctype Watchdog() {
#ifdef EVICT
    evicted = true
#endif
    skip
}

active proctype Monitor() {
    timeout ->
    d_step {
        assert(trained);
        assert(failed || head == F);
        assert(tail == head && version == head);
        done = true
    }
}

ltl progress { <> done }
