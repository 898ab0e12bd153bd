"""Ends a job that has lost its watchdog, as that would have: with its last checkpoint."""

from __future__ import annotations

from dataclasses import replace

from gadei_ps.errors import GadeiError, JobDiffers, JobInUse
from gadei_ps.job.config import JobConfig
from gadei_ps.watchdog import supervisor
from gadei_ps.watchdog.dead import end_servers
from gadei_ps.watchdog.lock import NameLock
from gadei_ps.watchdog.notify import Notify
from gadei_ps.watchdog.supervisor import Options


def finish(config: JobConfig, options: Options, notify: Notify) -> int:
    """Does nothing if nothing of the job is there. Returns the exit code.

    Whatever goes wrong, no server goes on afterwards; memory with gradients that no checkpoint has
    stays then. Raises GadeiError, JobInUse where another watchdog has the job.
    """
    try:
        return supervisor.serve(config, replace(options, finish=True), notify)
    except GadeiError as error:
        if isinstance(error, JobInUse) and not isinstance(error, JobDiffers):
            raise
        lock = NameLock(config.name)
        try:
            end_servers(config.name)
        finally:
            lock.release()
        raise
