"""Command line: its commands, options and exit codes."""
