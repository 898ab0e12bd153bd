"""Directories of the system's units, and when a process takes them as its defaults.

The units name theirs by environment variables. A command that is given no more than their runtime
directory, as the documentation has it, finds the others by the rule in this module.
"""

from __future__ import annotations

import os
from pathlib import Path

JOBS = Path("/etc/gadei-ps")  # files of jobs
RUNTIME = Path("/run/gadei-ps")
STATE = Path("/var/lib/gadei-ps")
CACHE = Path("/var/cache/gadei-ps")


def of_the_system() -> bool:
    """Return whether the runtime directory is given as that of the system's units."""
    return Path(os.environ.get("GADEI_PS_RUNTIME_DIR", "")) == RUNTIME
