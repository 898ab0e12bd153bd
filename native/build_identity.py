"""Writes ps_build.h: the identity of the extension's C sources and of the layout.

Run it after a change of these sources; a test fails when the file is not that of the sources:

    python native/build_identity.py

It needs the Python standard library only, so it also runs before anything is installed.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

NATIVE = Path(__file__).resolve().parent
MADE = "ps_build.h"
_SOURCES = re.compile(r"^SOURCES = \((.*?)^\)", re.M | re.S)
_INCLUDE = re.compile(rb'^#include "([^"]+)"', re.M)

TEXT = """\
/* Written by build_identity.py: the identity of the layout and of the extension's C sources. */
#ifndef PS_BUILD_H
#define PS_BUILD_H

#define PS_BUILD 0x{identity}ull

#endif
"""


def sources(native: Path = NATIVE) -> list[Path]:
    """Return the sources that setup.py names and the headers that they include, by name."""
    said = _SOURCES.search((native.parent / "setup.py").read_text())
    assert said is not None
    waiting = [f"{name}.c" for name in re.findall(r'"(\w+)"', said[1])]
    found: set[str] = {MADE}
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += [one.decode() for one in _INCLUDE.findall((native / name).read_bytes())]
    return [native / name for name in sorted(found - {MADE})]


def header(native: Path = NATIVE) -> str:
    """Return the text of ps_build.h for the present sources."""
    digest = hashlib.sha256()
    for path in sources(native):
        text = path.read_bytes()
        digest.update(f"{path.name} {len(text)}\n".encode() + text)
    return TEXT.format(identity=digest.hexdigest()[:16])


def main() -> None:
    path = NATIVE / MADE
    if not path.exists() or path.read_text() != header():
        path.write_text(header())
        print(f"{path.name} renewed")


if __name__ == "__main__":
    main()
