"""Letters between agents whose network is gone for a while, in a network namespace of their own."""

from __future__ import annotations

import fcntl
import shutil
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import support
from support import eventually
from support.agents import IDENTITY

from gadei_ps.agents.letters import Entry, Letter
from gadei_ps.agents.listener import Listener
from gadei_ps.agents.post import Post
from gadei_ps.groups.membership import Member
from gadei_ps.groups.messages import Message, Ready

APART = ["unshare", "--user", "--map-root-user", "--net"]
PIECE_S = 0.3
GET_FLAGS, SET_FLAGS, UP = 0x8913, 0x8914, 1


def _why_not() -> str:
    if shutil.which("unshare") is None:
        return "there is no unshare(1)"
    done = subprocess.run([*APART, "true"], capture_output=True, text=True, check=False)
    return done.stderr.strip()


WHY_NOT = _why_not()


def loopback(up: bool) -> None:
    """The only device of the namespace. While it is down, all that is sent is lost."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_one:
        request = struct.pack("16sh22x", b"lo", 0)
        (flags,) = struct.unpack_from("16xh", fcntl.ioctl(any_one, GET_FLAGS, request))
        flags = flags | UP if up else flags & ~UP
        fcntl.ioctl(any_one, SET_FLAGS, struct.pack("16sh22x", b"lo", flags))


class End:
    """One agent."""

    def __init__(self, number: int) -> None:
        self.me = Member(str(number), 0)
        self.door = Listener(("127.0.0.1", 0), IDENTITY)
        self.heard: list[Letter] = []
        self.ended: list[Member] = []
        facts = self.me, self.door.address, self.heard.append, self.ended.append
        self.post = Post(self.door, *facts, piece_s=PIECE_S)

    def reach(self, other: End) -> None:
        """Letters may be lost: says it until it is heard."""
        before = len(other.heard)

        def heard() -> bool:
            self.post.send(other.me, Message(self.me, None, Ready(0)))
            return len(other.heard) > before

        eventually(heard, what=lambda: self.post.troubles)


def cut_off() -> None:
    """In the namespace: one agent has letters for another one, which nothing reaches."""
    loopback(True)
    near, far = End(0), End(1)
    near.post.learn({1: Entry(0, *far.door.address)})
    near.reach(far)
    loopback(False)
    near.post.send(far.me, Message(near.me, None, Ready(1)))
    # Otherwise the kernel would send it again and again, more and more rarely, and all that comes
    # after it would wait for that.
    eventually(lambda: near.post.troubles)
    loopback(True)
    near.reach(far)
    assert not near.ended, "nobody has died"
    near.post.close()
    far.post.close()


@pytest.mark.skipif(bool(WHY_NOT), reason=f"this user cannot make a network namespace: {WHY_NOT}")
def test_a_connection_that_nothing_comes_through_is_given_up() -> None:
    """Its agent is called anew, and heard as soon as the network is there again."""
    done = subprocess.run(
        [
            *APART,
            sys.executable,
            "-c",
            "import test_agent_cut_off as t, os; t.cut_off(); os._exit(0)",
        ],
        env={"PYTHONPATH": f"{Path(__file__).parent}:{Path(support.__file__).parents[1]}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
