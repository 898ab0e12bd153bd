"""End of a command: exit codes, errors in one line, and JSON on stdout.

A traceback is shown only if GADEI_PS_TRACEBACK is 1. With --json-log, the error on stderr is JSON
as well.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gadei_ps.cli.switches import command_path, separated
from gadei_ps.errors import GadeiError, JobNotFound, UsageError, in_words
from gadei_ps.machine import interrupts, log
from gadei_ps.machine.interrupts import Interrupted
from gadei_ps.show.plain import plain, print_text
from gadei_ps.show.strict_json import finite

TRACEBACK_VARIABLE = "GADEI_PS_TRACEBACK"
# Set by gadei-ps-learner@.service: the file that its command line is made of.
LEARNER_FILE_VARIABLE = "GADEI_PS_LEARNER_FILE"


class ExitCode(NamedTuple):
    """An exit code, as the manual pages and the documentation have it."""

    code: str
    meaning: str
    commands: tuple[str, ...] = ()
    """Commands that return it. None: all."""


EXIT_CODES = (
    ExitCode("0", "Done."),
    ExitCode("1", "Failed; the reason is one line on standard error."),
    ExitCode(
        "2",
        "A mistake in the request, a file, a directory or a checkpoint: nothing was changed, and "
        "another try would fail as well.",
    ),
    ExitCode(
        "3",
        "The job has stopped, but its last checkpoint failed: its memory stays.",
        ("serve", "restore", "stop"),
    ),
    ExitCode(
        "4", "The job was stopped while the command ran.", ("run", "attach", "train", "group run")
    ),
    ExitCode("128 + N", "Ended by signal N, after cleaning up."),
)


def execute(make_tree: Callable[[], Any], args: Sequence[str]) -> int:
    """Run a command line of a tree of commands; return its exit code.

    Call it once, from the main thread.
    """
    _replace_closed_streams()  # before another file gets their numbers
    interrupts.install()
    command = make_tree()
    log.outlive_reader()
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        args, mistake = separated(command, args), None
    except UsageError as error:
        mistake = error
    ours = args[: args.index("--") if "--" in args else len(args)]
    learner_file = os.environ.pop(LEARNER_FILE_VARIABLE, "")  # learners start other commands
    as_json, json_log = "--json" in ours, "--json-log" in ours
    try:
        if mistake is not None:
            raise mistake
        code = command.main(list(args), prog_name="gadei-ps", standalone_mode=False)
        sys.stdout.flush()
    except Interrupted as interrupted:
        name = signal.Signals(interrupted.number).name
        if as_json:
            print_json({"error": f"interrupted by {name}", "kind": "Interrupted"})
        _print_notes(interrupted)
        return 128 + interrupted.number
    except BrokenPipeError:
        _discard_stdout()
        return 1
    except Exception as error:
        if os.environ.get(TRACEBACK_VARIABLE) == "1":
            raise
        code = _report(error, command_path(command, args), as_json, json_log, learner_file)
        _print_notes(error)
    return code if isinstance(code, int) else 0


def _report(
    error: Exception, path: str, as_json: bool, json_log: bool = False, learner_file: str = ""
) -> int:
    """Print the error in one line, or as the log's last object; return the exit code.

    path: the command that was given.
    """
    kind, message, code = _described(error, path)
    if learner_file and code == 2:
        message = _with_file(learner_file, message)
    line = plain(message)
    if json_log:
        log.set_up(as_json=True)
        log.get(kind=kind, exit_code=code).critical(line)
    else:
        text = f"gadei-ps: {line}"
        print(log.prioritized("critical", text) if log.in_journal() else text, file=sys.stderr)
    if as_json:
        try:
            print_json({"error": line, "kind": kind})
            sys.stdout.flush()
        except OSError:  # its reader is gone, or its disk is full
            _discard_stdout()
    return code


def _print_notes(error: BaseException) -> None:
    for note in getattr(error, "__notes__", ()):
        print_text(f"gadei-ps: {plain(note)}")


def _with_file(file: str, message: str) -> str:
    """Describe the mistake in a command line made of the learner's file to its author."""
    says = "PROGRAM= names the learner's program, LEARNERS= the number of learners"
    if not Path(file).exists():
        return f"{file}: there is no such file: {says}"
    return f"{file}: {message.partition('; see gadei-ps')[0]}: {says}"


def _described(error: Exception, path: str) -> tuple[str, str, int]:
    """Kind, message and exit code. path: the command that was given."""
    if isinstance(error, JobNotFound):
        from gadei_ps.job.diagnosis import explained

        error = explained(error)
    if isinstance(error, GadeiError):
        return type(error).__name__, str(error), error.exit_code
    if hasattr(error, "format_message"):  # typer's parser, whose class has no stable module
        what = error.format_message().replace("Value error, ", "").rstrip(".")
        return "UsageError", f"{what}; see {path} --help", 2
    if isinstance(error, OSError):
        return type(error).__name__, in_words(error), 1
    if isinstance(error, MemoryError):
        return "MemoryError", "not enough memory", 1
    return (
        type(error).__name__,
        f"internal error: {type(error).__name__}: {error}; please report it "
        f"({TRACEBACK_VARIABLE}=1 shows where it happened)",
        1,
    )


def _replace_closed_streams() -> None:
    """Open /dev/null for standard streams that the parent has closed: they are None otherwise."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # Like Python's own streams it leaves its file open when it is replaced.
            null = os.open(os.devnull, os.O_RDWR)
            setattr(sys, name, os.fdopen(null, mode, closefd=False))


def _discard_stdout() -> None:
    """Discard stdout that cannot be written: the interpreter's last flush would report an error."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def print_json(value: Mapping[str, Any]) -> None:
    """One line of strict JSON: what is not finite becomes null."""
    print(json.dumps(finite(value), allow_nan=False))
