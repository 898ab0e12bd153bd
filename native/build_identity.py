"""Writes ps_build.h: the identity of the extension's C sources and of the layout.

Run it after a change of these sources; a test fails when the file is not that of the sources:

    python native/build_identity.py

It needs the Python standard library only, so it also runs before anything is installed.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

NATIVE = Path(__file__).resolve().parent
MADE = "ps_build.h"

TEXT = """\
/* Written by build_identity.py: the identity of the layout and of the extension's C sources. */
#ifndef PS_BUILD_H
#define PS_BUILD_H

#define PS_BUILD 0x{identity}ull

#endif
"""


def sources(native: Path = NATIVE) -> list[Path]:
    """Return the extension's sources and headers, by name."""
    found = {*native.glob("module*.[ch]"), *native.glob("ps_*.[ch]")}
    return sorted(found - {native / MADE})


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
