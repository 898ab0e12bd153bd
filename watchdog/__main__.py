"""`python -m gadei_ps.watchdog`: a job's watchdog as the child of a command.

The command is commands/daemon.py. Little is imported here: the fork server, which loads the modules
of servers, is started first, so that both load at the same time.
"""

from __future__ import annotations

import gc
import os
import signal
import sys

from gadei_ps.watchdog import fork_server


def _outlive() -> None:
    """Continue in a process of its own session, which no launcher takes for its own.

    The one that the launcher has started ends with it, or is killed once the job is ready.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    child = os.fork()
    if child:
        os.closerange(3, 1024)  # the launcher is to see when the other one closes its pipe
        signal.signal(signal.SIGTERM, lambda number, _: os.kill(child, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    if not child:
        os.setsid()
        return
    # It is not reaped: a SIGTERM of this moment must not be passed on to another process.
    end = os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    assert end is not None
    os._exit(end.si_status if end.si_code == os.CLD_EXITED else 128 + end.si_status)


def main() -> None:
    """The last argument is the descriptor of a socket to the command, see entry.serve_command."""
    if "--keep" in sys.argv:
        _outlive()
    end = int(sys.argv[-1])
    os.set_inheritable(end, False)
    if "--silent" in sys.argv:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    early = fork_server.start_early()
    gc.disable()  # what is imported stays; the collector need not look at it

    from gadei_ps.watchdog import entry  # which imports all that a watchdog needs

    gc.freeze()
    gc.enable()
    sys.exit(entry.serve_command(end, early))


if __name__ == "__main__":
    main()
