"""Time limits of the watchdog (s) whose order matters.

tests/unit/test_durations.py checks it, also against the limits of other processes.
"""

MARGIN_S = 20.0
"""Extra time of a process that waits for another one with a limit of its own."""

# Limits of a start, without progress.
FORK_SERVER_SILENT_S = 60.0
START_SILENT_S = 180.0
"""Limit of the job's start: then it fails."""
SERVER_SILENT_S = START_SILENT_S + MARGIN_S
"""Limit of a server's start: then it is killed. The start of the job has failed before."""

# Limits of a stop: learners leave, then published gradients and the last checkpoint are completed.
LEAVE_TIMEOUT_S = 10.0
LEAVE_NOW_S = 1.0  # if the stop does not drain
PUBLISH_S = 1.0  # for moving one word; then the learner is stopped or hangs, and is killed
STOP_SILENT_S = 45.0  # without progress, as where a disk blocks
STOP_END_S = 15.0  # for what comes after that

# Limits of this process' end: a child is killed after END_S, and abandoned KILL_S later.
LEARNERS_END_S, LEARNERS_KILL_S = 1.0, 2.0
WRITER_KILL_S = 2.0  # of checkpoints
HISTORY_END_S, HISTORY_KILL_S = 5.0, 1.0  # its process may just be starting
MOST_MONITORS = 4
MONITORS_END_S, MONITORS_KILL_S = 20.0, 1.0
"""Limits for the processes that export metrics or write curves: together, and for each.

The job's memory is free before. In a short job, this includes imports of large libraries.
"""
SERVER_END_S = 5.0
SERVER_KILL_S = 2.0  # then it is frozen, or the kernel blocks it
FORK_SERVER_KILL_S = 5.0
WORKER_END_S = 5.0  # for the current piece: a learner's file may be on a disk that blocks
LAST_REPLIES_S = 1.0  # for all clients together

LONGEST_END_S = (
    LEAVE_TIMEOUT_S
    + PUBLISH_S
    + LEARNERS_END_S
    + LEARNERS_KILL_S
    + WRITER_KILL_S
    + HISTORY_END_S
    + HISTORY_KILL_S
    + MONITORS_END_S
    + MOST_MONITORS * MONITORS_KILL_S
    + 2 * 2 * SERVER_END_S
    + FORK_SERVER_KILL_S
    + 2 * WORKER_END_S
    + LAST_REPLIES_S
)
"""Sum of these after SIGTERM; the last checkpoint may take longer."""
