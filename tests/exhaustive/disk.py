"""A disk as it may be found after a power cut, from the record of what a program did to it.

What was synced is there. What was not is there, or is not, or is there in part:

- names: each entry that was made, renamed or removed since its directory was synced is as it was
  before or as it is now, independently of all others. A rename is atomic: both of its names change,
  or none. A file system with a journal keeps the order of such changes; its states are among
  these.
- data: a file that was written since it was synced has its old length and bytes; those after the
  first, the middle or the last write; the last write cut in half, also with zeros to its length; or
  zeros behind what was synced. A disk may leave more than these: they stand for the rest.

A file that was never synced may be empty while its name is there.
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

MOST_OPEN = 14  # changes in one directory that are not synced; each may double the states

State = tuple[tuple[str, bytes | None], ...]
"""Return paths below the root, in order, with what files hold; None for a directory."""


@dataclass(eq=False)
class File:
    """A file: what was synced of it, and what it holds after each write since then."""

    synced: bytes = b""
    since: list[bytes] = field(default_factory=list)

    @property
    def now(self) -> bytes:
        return self.since[-1] if self.since else self.synced

    def write(self, at: int, data: bytes) -> None:
        now = self.now.ljust(at, b"\0")
        self.since.append(now[:at] + data + now[at + len(data) :])

    def truncate(self, size: int) -> None:
        self.since.append(self.now[:size].ljust(size, b"\0"))

    def sync(self) -> None:
        self.synced = self.now
        self.since.clear()

    def contents(self) -> list[bytes]:
        """Return contents that it may have after a power cut: some of that, at most seven."""
        if not self.since:
            return [self.synced]
        before = self.since[-2] if len(self.since) > 1 else self.synced
        half = (len(before) + len(self.now)) // 2
        chosen = [
            *(self.since[at] for at in (0, len(self.since) // 2, len(self.since) - 1)),
            self.now[:half],  # the last write, or a rewritten file, is cut in two
            self.now[:half].ljust(len(self.now), b"\0"),
            self.synced[: len(self.now)].ljust(len(self.now), b"\0"),
        ]
        return list(dict.fromkeys([self.synced, *chosen]))


@dataclass(eq=False)
class Folder:
    """A directory: its entries when it was synced, and now."""

    synced: dict[str, Node] = field(default_factory=dict)
    now: dict[str, Node] = field(default_factory=dict)


Node = File | Folder


@dataclass(frozen=True)
class Change:
    """A change of names in one directory, atomic and not synced: what these names are then."""

    folder: Folder
    names: tuple[tuple[str, Node | None], ...]

    def apply(self, entries: dict[str, Node]) -> None:
        for name, node in self.names:
            if node is None:
                entries.pop(name, None)
            else:
                entries[name] = node


class Disk:
    """The directory `root`, with all in it on the disk; then what the record says is done to it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._nodes: dict[int, Node] = {}
        top = self._read(root)
        assert isinstance(top, Folder)
        self._top = top
        self.open: list[Change] = []

    def _read(self, path: Path) -> Node:
        made: Node
        if path.is_dir():
            made = Folder({one.name: self._read(one) for one in path.iterdir()})
            made.now = dict(made.synced)
        else:
            made = File(path.read_bytes())
        self._nodes[path.stat().st_ino] = made
        return made

    # -- what is done to it -----------------------------------------------------------------------

    def play(self, log: Path) -> Iterator[str | None]:
        """Repeat what was recorded, step by step; between two steps the power may be cut.

        Yields once before the first step, and after each: the text of a mark, or None.
        """
        yield None
        raw, at = log.read_bytes(), 0
        while at < len(raw):
            end = raw.index(b"\n", at)
            what, _, rest = raw[at:end].decode().partition(" ")
            at = end + 1
            if what == "write":
                number, begin, size = map(int, rest.split())
                self._file(number).write(begin, raw[at : at + size])
                at += size
            elif what != "mark":
                getattr(self, f"_{what}")(rest)
            yield rest if what == "mark" else None

    def _file(self, number: int | str) -> File:
        found = self._nodes[int(number)]
        assert isinstance(found, File)
        return found

    def _place(self, path: str) -> tuple[Folder, str]:
        """The directory that holds a path, and the name there."""
        folder: Node = self._top
        *parents, name = Path(path).relative_to(self.root).parts
        for one in parents:
            assert isinstance(folder, Folder)
            folder = folder.now[one]
        assert isinstance(folder, Folder)
        return folder, name

    def _change(self, folder: Folder, *names: tuple[str, Node | None]) -> None:
        change = Change(folder, names)
        change.apply(folder.now)
        self.open.append(change)

    def _enter(self, rest: str, node: Node | None = None) -> None:
        number, path = rest.split(" ", 1)
        if node is not None:
            self._nodes[int(number)] = node
        folder, name = self._place(path)
        self._change(folder, (name, self._nodes[int(number)]))

    def _create(self, rest: str) -> None:
        self._enter(rest, File())

    def _mkdir(self, rest: str) -> None:
        self._enter(rest, Folder())

    def _link(self, rest: str) -> None:
        self._enter(rest)

    def _remove(self, path: str) -> None:
        folder, name = self._place(path)
        self._change(folder, (name, None))

    _unlink = _rmdir = _remove

    def _rename(self, rest: str, exchange: bool = False) -> None:
        (folder, old), (other, new) = map(self._place, rest.split("\t"))
        assert folder is other, "a rename between directories: not one change"
        self._change(folder, (old, folder.now[new] if exchange else None), (new, folder.now[old]))

    def _exchange(self, rest: str) -> None:
        self._rename(rest, exchange=True)

    def _truncate(self, rest: str) -> None:
        number, size = rest.split()
        self._file(number).truncate(int(size))

    def _fsync(self, number: str) -> None:
        node = self._nodes[int(number)]
        if isinstance(node, File):
            node.sync()
            return
        for change in self.open:
            if change.folder is node:
                change.apply(node.synced)
        self.open = [one for one in self.open if one.folder is not node]
        reached = self._reached()
        self.open = [one for one in self.open if one.folder in reached]

    def _reached(self) -> set[Folder]:
        """Return directories that some state may show."""
        found: set[Folder] = set()
        todo: list[Node | None] = [self._top]
        while todo:
            one = todo.pop()
            if isinstance(one, Folder) and one not in found:
                found.add(one)
                todo += one.synced.values()
                changes = [change for change in self.open if change.folder is one]
                todo += [to for change in changes for _, to in change.names]
        return found

    # -- how it may be found ----------------------------------------------------------------------

    def states(self) -> Iterator[State]:
        """Yield states in which the disk may be found after a cut now; some come twice.

        Each set of names, with each combination of its files' contents().
        """
        for tree in self._trees(self._top, ""):
            files = list(dict.fromkeys(node for _, node in tree if isinstance(node, File)))
            for contents in itertools.product(*(one.contents() for one in files)):
                held = dict(zip(files, contents, strict=True))
                yield tuple((path, held.get(node)) for path, node in tree)  # type: ignore[arg-type]

    def _trees(self, folder: Folder, path: str) -> Iterator[list[tuple[str, Node]]]:
        """Each tree of names that may be found below a directory: paths and what is there."""
        for entries in self._entries(folder):
            parts: list[list[list[tuple[str, Node]]]] = []
            for name, node in sorted(entries.items()):
                below: list[list[tuple[str, Node]]] = [[]]
                if isinstance(node, Folder):
                    below = list(self._trees(node, f"{path}{name}/"))
                parts.append([[(path + name, node), *one] for one in below])
            for chosen in itertools.product(*parts):
                yield list(itertools.chain.from_iterable(chosen))

    def _entries(self, folder: Folder) -> list[dict[str, Node]]:
        """Each set of entries that may be found in a directory."""
        changes = [one for one in self.open if one.folder is folder]
        assert len(changes) <= MOST_OPEN, f"{len(changes)} changes of names are not synced"
        known: dict[frozenset[tuple[str, int]], dict[str, Node]] = {}
        for kept in itertools.product((False, True), repeat=len(changes)):
            entries = dict(folder.synced)
            for change in itertools.compress(changes, kept):
                change.apply(entries)
            known.setdefault(frozenset((name, id(node)) for name, node in entries.items()), entries)
        return list(known.values())

    def now(self) -> State:
        """All that was done to it."""
        return tuple(
            (path, node.now if isinstance(node, File) else None)
            for path, node in _walk(self._top, "")
        )


def _walk(folder: Folder, path: str) -> Iterator[tuple[str, Node]]:
    """All that is now below a directory."""
    for name, node in sorted(folder.now.items()):
        yield path + name, node
        if isinstance(node, Folder):
            yield from _walk(node, f"{path}{name}/")


def found(root: Path) -> State:
    """Return what lies in a directory."""
    paths = sorted(root.rglob("*"), key=lambda path: path.relative_to(root).parts)
    return tuple(
        (str(one.relative_to(root)), None if one.is_dir() else _content(one)) for one in paths
    )


def _content(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() else b""  # of a socket


def put(state: State, root: Path) -> None:
    """Make a directory that is in this state, in the place of what is there."""
    if root.exists():
        shutil.rmtree(root)
    root.mkdir()
    for path, data in state:
        if data is None:
            (root / path).mkdir(mode=0o700)
        else:
            with open(root / path, "xb", buffering=0, opener=_open) as file:
                file.write(data)


def _open(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
