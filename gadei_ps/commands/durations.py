"""Time limits of commands (s) that follow from those of the watchdog, or have an order."""

from gadei_ps.watchdog import durations as watchdog

START_SILENT_S = watchdog.START_SILENT_S + watchdog.MARGIN_S
"""Limit of a watchdog's start, without progress."""
END_TIMEOUT_S = watchdog.LONGEST_END_S + 6.0
"""Limit of a watchdog's end after SIGTERM; then it is killed."""
STOP_MARGIN_S = watchdog.MARGIN_S
"""Limit of a stop after the learners have left."""
DRAIN_S = 30.0
"""Time for learners to finish when a job stops."""
ORPHAN_S = 10.0
"""Time until servers end whose watchdog and command are dead."""
ORPHANS_END_S = 2 * ORPHAN_S
"""Limit of the end of such a job."""
GRACE_S = 30.0
"""Time for learners that are asked to end, as torchrun gives."""
APPLY_S = 5.0
"""Time until the job has applied the published gradients of ended learners."""
ANSWER_TIMEOUT_S = 3.0
"""Limit of a watchdog's answer to a request that needs no work."""
