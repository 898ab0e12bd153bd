"""Cost of a death for the peers: DistributedDataParallel under torchrun, and torchft.

Each process of a peer (failover_member.py) writes a line of a file after each step. This process
reads the file, and kills one of them.
"""

from __future__ import annotations

import importlib.util
import os
import random
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from gadei_ps.benchmarks.gang import Failed
from gadei_ps.machine import process

MEMBERS = range(2)
MEMBER = "gadei_ps.benchmarks.failover_member"
LOOK_S = 1e-3
PATIENCE_S = 120.0
STEPS = 3
"""Steps of each member between two deaths, at least."""
APART_S = 0.2
DDP, TORCHFT = "DDP under torchrun", "torchft"
LINE = np.dtype([("pid", "<i8"), ("began", "<f8"), ("ended", "<f8"), ("steps", "<i8")])
"""Last step of a member that counts: its start and end (s, time.monotonic) and its number."""

Peer = Callable[[int, int], list[float]]
"""Takes bytes of weights and kills; returns seconds from each kill to the next step."""


class Members:
    """The processes of a peer, as this process sees them. Use it in a with-block."""

    def __init__(self, size: int) -> None:
        """size: of the weights, in bytes."""
        self._stack = ExitStack()
        scratch = self._stack.enter_context(tempfile.TemporaryDirectory())
        self.file = Path(scratch) / "lines"
        self.file.write_bytes(bytes(len(MEMBERS) * LINE.itemsize))
        self.lines = np.memmap(self.file, LINE, mode="r")
        self.values = str(size // 4)
        self._children: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Members:
        return self

    def __exit__(self, *exc: object) -> None:
        for child in self._children:
            child.send_signal(signal.SIGTERM)
        for child in self._children:
            try:
                child.wait(10.0)
            except subprocess.TimeoutExpired:
                process.kill_group(child.pid)
                child.wait()
        self._stack.close()

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Start a program of Python: the arguments of `python -m`."""
        quiet = subprocess.DEVNULL
        env = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONSAFEPATH": "1"}
        # In the store that torchrun shares with its processes lie the addresses of dead ones: who
        # is restarted first calls them, and fails (pytorch issue 135712).
        env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        child = process.spawn(
            process.module_command(*arguments), env=os.environ | env, stdout=quiet, stderr=quiet
        )
        self._children.append(child)
        return child

    def wait(self, condition: Callable[[], object]) -> None:
        """Raise Failed if it does not become true, or if a member that is there ends by itself."""
        until = time.monotonic() + PATIENCE_S
        while not condition():
            if any(child.poll() not in (None, -signal.SIGKILL) for child in self._children):
                raise Failed("it has ended")
            if time.monotonic() > until:
                raise Failed("it makes no more steps")
            time.sleep(LOOK_S)

    def have_made(self, pids: Sequence[int]) -> bool:
        """Return whether these processes, one for each member, have made STEPS steps."""
        return all(
            self.lines[one]["pid"] == pids[one] and self.lines[one]["steps"] >= STEPS
            for one in MEMBERS
        )

    def ended(self, member: int) -> float:
        """Return the end of its last step (s, time.monotonic)."""
        return float(self.lines[member]["ended"])


def ddp(size: int, kills: int) -> list[float]:
    """DDP over gloo. torchrun notices the death of a rank, ends the other one and starts both."""
    _need("torch")
    chance = random.Random(size)
    with Members(size) as members:
        how = ["--standalone", "--nnodes=1", f"--nproc-per-node={len(MEMBERS)}"]
        how += [f"--max-restarts={kills + 1}", "--monitor-interval=0.1", "-m", MEMBER, "ddp"]
        members.start("torch.distributed.run", *how, str(members.file), members.values)
        return [_kill_rank(members, chance) for _ in range(kills)]


def _kill_rank(members: Members, chance: random.Random) -> float:
    lines = members.lines
    members.wait(lambda: lines["pid"].all() and members.have_made(lines["pid"].tolist()))
    time.sleep(APART_S * chance.random())
    old = lines["pid"].copy()
    begin = time.monotonic()
    os.kill(int(chance.choice(old)), signal.SIGKILL)
    # A step's number is written last.
    members.wait(lambda: (lines["pid"] != old).all() and lines["steps"].all())
    return max(map(members.ended, MEMBERS)) - begin


def torchft(size: int, kills: int) -> list[float]:
    """Measure until the remaining replica continues with a new quorum from the lighthouse."""
    _need("torch")
    _need("torchft")
    chance = random.Random(size)
    with Members(size) as members:
        address = members.file.with_name("lighthouse")
        members.start(MEMBER, "lighthouse", str(address))
        members.wait(address.exists)
        there = [_start_replica(members, one, address) for one in MEMBERS]
        seconds = []
        for _ in range(kills):
            victim = chance.choice(MEMBERS)
            seconds.append(_kill_replica(members, there, victim, APART_S * chance.random()))
            there[victim] = _start_replica(members, victim, address)
        return seconds


def _start_replica(members: Members, member: int, lighthouse: Path) -> subprocess.Popen[bytes]:
    what = ["torchft", str(members.file), members.values, str(member), lighthouse.read_text()]
    return members.start(MEMBER, *what)


def _kill_replica(
    members: Members, there: Sequence[subprocess.Popen[bytes]], victim: int, after_s: float
) -> float:
    members.wait(lambda: members.have_made([one.pid for one in there]))
    time.sleep(after_s)
    other = len(MEMBERS) - 1 - victim
    begin = time.monotonic()
    there[victim].kill()
    # A step that the other one had begun may end as if nothing had happened.
    members.wait(lambda: members.lines[other]["began"] > begin)
    return members.ended(other) - begin


def _need(module: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise Failed(f"{module} is not installed (pip install {module})")


PEERS: dict[str, Peer] = {DDP: ddp, TORCHFT: torchft}
