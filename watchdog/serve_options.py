"""Start options of a watchdog."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gadei_ps.memory.layout import Kept
from gadei_ps.watchdog.durations import START_SILENT_S
from gadei_ps.watchdog.fork_server import ForkServer


@dataclass(frozen=True)
class Options:
    """Start options of a watchdog.

    fresh: use neither the memory of a dead watchdog nor checkpoints. resume: look for checkpoints;
    False for the jobs of commands. survives: unless a client has asked for the stop, the memory
    stays at the end for the next `gadei-ps run` of the job. finish: serve nothing, but end a job
    that is in memory without a watchdog. recorded: the configuration was read from that memory.
    checkpoint: resume from this one instead of from memory. notice: a warning to log once the job
    is served. quiet, verbose, as_json: of the servers' log. start_silent_s: how long the start may
    make no progress. learners: how many are to come, if the job file has no number: their rings
    must fit into memory beside the model. `fork_server`: a fork server that was started before.
    """

    fresh: bool = False
    resume: bool = True
    survives: bool = False
    finish: bool = False
    recorded: bool = False
    checkpoint: Path | None = None
    notice: str = ""
    verbose: bool = False
    quiet: bool = False
    as_json: bool = False
    start_silent_s: float = START_SILENT_S
    learners: int = 1
    fork_server: ForkServer | None = None

    @property
    def kept(self) -> Kept:
        """Command that continues with the job's memory."""
        if self.survives:
            return Kept.BY_RUN
        return Kept.BY_SERVE if self.resume else Kept.NEVER

    @property
    def flags(self) -> list[str]:
        given = {"--verbose": self.verbose, "--quiet": self.quiet, "--json": self.as_json}
        return [flag for flag, wanted in given.items() if wanted]
