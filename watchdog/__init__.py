"""The watchdog: owns the job's segments and control socket, supervises its processes."""
