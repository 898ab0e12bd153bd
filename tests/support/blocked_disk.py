"""A directory on a disk that blocks: every access to it waits until the disk is there again."""

from __future__ import annotations

import ctypes
import os
import struct
from multiprocessing.connection import Connection
from pathlib import Path

from support.processes import Child

DEVICE = Path("/dev/fuse")
HEADER_IN, HEADER_OUT = struct.Struct("IIQQIIIHH"), struct.Struct("IiQ")  # fuse_in_header, _out_
INIT = 26
INIT_OUT = struct.Struct("IIIIHHIIHHI28x")
MNT_DETACH = 2
_libc = ctypes.CDLL(None, use_errno=True)


def why_not() -> str:
    """Return why there can be no such disk here; empty if there can."""
    if os.geteuid() != 0:
        return "only root can mount a file system"
    return "" if DEVICE.exists() else f"there is no {DEVICE}"


def _serve(pipe: Connection, directory: Path) -> None:
    """A file system in user space that answers nothing but that it is there."""
    device = os.open(DEVICE, os.O_RDWR | os.O_CLOEXEC)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0".encode()
    if _libc.mount(b"blocked", bytes(directory), b"fuse", 0, options):
        pipe.send(os.strerror(ctypes.get_errno()))
        return
    pipe.send("")
    while True:
        # A request that has been read is waited for, also by a process that is killed meanwhile.
        request = os.read(device, 1 << 20)
        _, operation, unique, *_ = HEADER_IN.unpack_from(request)
        if operation == INIT:
            answer = INIT_OUT.pack(7, 31, 0, 0, 12, 9, 1 << 16, 1, 16, 0, 0)
            os.write(device, HEADER_OUT.pack(HEADER_OUT.size + len(answer), 0, unique) + answer)
        else:
            pipe.send(operation)


class BlockedDisk:
    """It lies over the directory meanwhile; at the end, those who wait get an error."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def __enter__(self) -> BlockedDisk:
        self._served = Child(_serve, self._directory)
        answer = self._served.receive()
        assert not answer, f"mount: {answer}"
        return self

    def waits(self) -> None:
        """Wait until a process waits for it."""
        assert self._served.receive()

    def __exit__(self, *exc: object) -> None:
        self._served.kill()
        _libc.umount2(bytes(self._directory), MNT_DETACH)
