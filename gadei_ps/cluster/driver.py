"""`python -m gadei_ps.cluster.driver`: does what a command asks of a cluster of Ray.

It is a process of its own: Ray ends a program that has lost its cluster, and a command is to say
what has happened. The order comes as one line of JSON on standard input, requests as more lines;
lines of JSON go out: `say` for people, `rows` for whoever follows a run, `result` or `error` at
last.
"""

from __future__ import annotations

import _thread
import contextlib
import json
import math
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gadei_ps.cluster import config, rays
from gadei_ps.cluster.program import Program
from gadei_ps.errors import ClusterError, GadeiError, JobNotFound
from gadei_ps.show.counts import counted

POLL_S = 0.5
END_S = 90.0
"""For a machine to stop or to leave."""

Told = dict[str, Any]


class Output:
    """Lines to the command; nothing else of this process goes there."""

    def __init__(self) -> None:
        self._stream = os.fdopen(os.dup(1), "w")
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 1)
        if os.environ.get("GADEI_PS_TRACEBACK") != "1":
            os.dup2(nothing, 2)

    def __call__(self, **told: Any) -> None:
        with contextlib.suppress(BrokenPipeError):  # the command was killed: Signals sees it
            self._stream.write(json.dumps(told) + "\n")
            self._stream.flush()


def main() -> None:
    """One order."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also where it was ignored
    order = json.loads(sys.stdin.readline())
    out = Output()
    try:
        with _cluster(order, out) as address:
            result = _ORDERS[order["order"]](order, address, out)
        out(result=result)
        code = 0
    except GadeiError as error:
        out(error=str(error), kind=type(error).__name__, exit_code=error.exit_code)
        code = error.exit_code
    except Exception as error:  # of Ray; its messages have many lines
        if os.environ.get("GADEI_PS_TRACEBACK") == "1":
            raise
        out(error=f"Ray: {rays.described(error)}", kind="ClusterError", exit_code=1)
        code = 1
    os._exit(code)  # Ray's own end may wait for a cluster that is gone


@contextlib.contextmanager
def _cluster(order: Told, out: Output) -> Iterator[str]:
    """The cluster that the order names, or one of this host's own; connected."""
    with contextlib.ExitStack() as stack:
        address, token = order["address"], order["token"]
        if address is None:
            machines = config.from_mapping(order["run"], "run").machines
            out(say=f"starting Ray on this host, with {counted(machines, 'node')}")
            if (there := rays.nearby()) is not None and rays.answers(there):
                out(say=f"Ray runs already, at {there}: give --address to train on its hosts")
            address, token = stack.enter_context(rays.own(machines, Path(order["files"])))
        ray = rays.connect(address, token)
        if order["address"] is None:  # else its node would stay, as long as this is connected
            stack.callback(_disconnect, ray)
        if os.getppid() != order["command_pid"]:  # the next one may have begun
            raise ClusterError("the command was killed")
        if order["order"] == "run":
            rays.note(order["name"], address, token, order.get("files"))
        yield address
        _disconnect(ray)


def _disconnect(ray: Any) -> None:
    with contextlib.suppress(Exception):  # the cluster may be gone
        ray.shutdown()


# -- run ------------------------------------------------------------------------------------------


def run(order: Told, address: str, out: Output) -> Told:
    """Starts or adopts all machines, and waits until they have ended."""
    from gadei_ps.cluster.conductor import Conductor

    wanted = config.from_mapping(order["run"], order["where"])
    program = Program(**order["program"]) if "program" in order else None
    conductor = Conductor(wanted, order["command"], order["directory"], out, program)
    requests = Requests(interrupts=True)
    try:
        requests.start()
        if program is not None:
            conductor.bring(order["data"])
        conductor.begin()
        requests.let_go()
        conductor.has_begun()
        out(begun=address)
    except BaseException as error:
        if conductor.abandon() or order["address"] is None:
            rays.unnote(wanted.name, address)
        if isinstance(error, KeyboardInterrupt):
            raise ClusterError("interrupted before all machines had begun") from None
        raise
    until = math.inf
    for rows in conductor.watch():
        if time.monotonic() > until:
            raise ClusterError(f"run {wanted.name}: its machines have not ended in {END_S:g} s")
        if program is not None:
            out(rows=rows)
        asked = requests.next()
        if "signal" in asked:
            conductor.signal(asked["signal"])
        elif "copy" in asked:
            out(copied=conductor.copy(asked["machines"], Path(asked["copy"])))
        elif "stop" in asked or ("killed" in asked and program is not None):
            conductor.stop()
            until = min(until, time.monotonic() + END_S)
        elif "killed" in asked:
            raise ClusterError("the command was killed; the machines go on")
    rays.unnote(wanted.name, address)
    return conductor.summary()


class Requests(threading.Thread):
    """Reads requests from standard input; whose end says that the command was killed."""

    def __init__(self, *, interrupts: bool) -> None:
        """interrupts: the first request interrupts the main thread, until that lets go."""
        super().__init__(name="requests", daemon=True)
        self._interrupts = interrupts
        self._deciding = threading.Lock()
        self._lines: queue.SimpleQueue[Told] = queue.SimpleQueue()

    def run(self) -> None:
        """See Thread."""
        while line := sys.stdin.readline():
            self._put(json.loads(line))
        self._put({"killed": True})

    def _put(self, asked: Told) -> None:
        self._lines.put(asked)
        with self._deciding:
            if self._interrupts:
                self._interrupts = False  # what is to be taken back is not interrupted
                _thread.interrupt_main()

    def let_go(self) -> None:
        """Main thread: from here on nothing is interrupted. Raises KeyboardInterrupt if a request
        came first."""
        with self._deciding:
            self._interrupts = False

    def is_asked(self) -> bool:
        """Whether a request waits."""
        return not self._lines.empty()

    def next(self) -> Told:
        """One that comes within POLL_S; an empty one if none does."""
        try:
            return self._lines.get(timeout=POLL_S)
        except queue.Empty:
            return {}


# -- the others -----------------------------------------------------------------------------------


def _found(order: Told, address: str) -> Any:
    """The actors of the run. Raises JobNotFound if the cluster has none of them."""
    from gadei_ps.cluster import machines

    found = machines.actors(order["name"])
    if not found:
        raise JobNotFound(
            f"run {order['name']!r} begins or ends just now: try again in a moment"
            if order["token"]  # the cluster is there for this run alone
            else f"the cluster at {address} has no run {order['name']!r}: it has not begun there, "
            "or has ended"
        )
    return found


def status(order: Told, address: str, out: Output) -> Told:
    """A row for each machine."""
    from gadei_ps.cluster import machines

    found = _found(order, address)
    rows = machines.placed(found, machines.with_others(machines.statuses(found)))
    return {"run": order["name"], "address": address, "machines": rows}


def join(order: Told, address: str, out: Output) -> Told:
    """One more machine; none if the command ends before."""
    from gadei_ps.cluster import machines

    requests = Requests(interrupts=False)  # join() looks: an actor must not be lost on the way
    requests.start()
    where = order["name"], order["group"], order["node"]
    return machines.join(_found(order, address), *where, requests.is_asked)


def leave(order: Told, address: str, out: Output) -> Told:
    """A machine leaves its group; its job ends."""
    from gadei_ps.cluster import machines

    found = _found(order, address)
    if order["dead"]:
        return machines.give_up(found, order["name"], order["machine"])
    return machines.end(found, order["name"], "leave", order["machine"], END_S)


def stop(order: Told, address: str, out: Output) -> Told:
    """All machines end."""
    from gadei_ps.cluster import machines, strays

    living = strays.gather(order["name"])
    found = _found(order, address)
    done = machines.end(found, order["name"], "stop", None, END_S, living)
    rays.unnote(order["name"], address)
    return done


_ORDERS: dict[str, Callable[[Told, str, Output], Told]] = {
    "run": run,
    "status": status,
    "join": join,
    "leave": leave,
    "stop": stop,
}

if __name__ == "__main__":
    main()
