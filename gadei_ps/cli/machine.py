"""Commands about this machine: its fitness, its speed, and its service manager."""

from __future__ import annotations

import os
import pydoc
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gadei_ps.cli.exits import print_json
from gadei_ps.cli.options import DryRun, Json, argument, option, path_option, print_result, switch
from gadei_ps.errors import UsageError
from gadei_ps.show.plain import print_text

if TYPE_CHECKING:
    from gadei_ps.commands.service_manager import Scope


def doctor(as_json: Json = False) -> int:
    """Check whether jobs can run on this machine; exit code 1 if not."""
    from gadei_ps.commands.doctor import Level, examine
    from gadei_ps.show import view

    checks = examine()
    healthy = all(check.level != Level.ERROR for check in checks)
    rows = [asdict(check) for check in checks]
    print_result(as_json, {"ok": healthy, "checks": rows}, lambda: view.checks(rows))
    return 0 if healthy else 1


def docs(
    words: Annotated[
        list[str] | None,
        argument(
            "PAGE|WORD",
            "A page, words to look for, or a name of the API such as gadei_ps.serve.",
            "list all pages",
        ),
    ] = None,
    as_json: Json = False,
) -> int:
    """Show a page of the documentation or the API, or list the pages that have all these words."""
    from gadei_ps.commands import pages
    from gadei_ps.show import tables

    every = pages.every()
    found = pages.search(every, words) if words else every
    if not found:
        raise UsageError(f"no page has {' '.join(words or ())!r}; gadei-ps docs lists the pages")
    whole = len(found) == 1 and bool(words)
    rows = [{"page": one.name, "title": one.title} for one in found]
    result = rows[0] | {"text": found[0].text} if whole else {"pages": rows}
    if as_json or not whole:
        print_result(as_json, result, lambda: tables.facts({one.name: one.title for one in found}))
    elif sys.stdout.isatty():
        pydoc.pager(found[0].text)
    else:
        print_text(found[0].text, sys.stdout, end="")
    return 0


def bench(
    names: Annotated[list[str] | None, argument("NAME", "Benchmarks to run.", "list them")] = None,
    quick: Annotated[
        bool,
        switch("--quick", "Run small and short, to see that it works; the figures mean nothing."),
    ] = False,
    out: Annotated[
        Path | None, path_option("DIR", "Directory for the results: NAME.json for each benchmark.")
    ] = None,
    as_json: Json = False,
) -> int:
    """Compare this project with its peers on this machine."""
    from gadei_ps.benchmarks import suite
    from gadei_ps.show import tables

    if not names:
        known = suite.BENCHMARKS
        print_result(as_json, {"benchmarks": known}, lambda: tables.facts(known))
        return 0
    suite.check(names)
    if out is not None:
        suite.prepare(out)
    results = []
    for name in names:
        result, shown = suite.run(name, quick=quick)
        results.append(result)
        if out is not None:
            suite.write(result, out)
        if not as_json:
            print_text(f"== {name}\n{shown}", sys.stdout)
    if as_json:
        print_json(results[0] if len(results) == 1 else {"results": results})
    return 0


User = Annotated[bool, switch("--user", "For your own jobs; the default unless you are root.")]
System = Annotated[bool, switch("--system", "For jobs of the whole machine; the default for root.")]


def _scope(user: bool, system: bool) -> Scope:
    from gadei_ps.commands.service_manager import Scope

    if user and system:
        raise UsageError("give --user or --system, not both")
    return Scope.USER if user or (os.geteuid() and not system) else Scope.SYSTEM


def _no_name(names: list[str], advice: str) -> None:
    """Raise UsageError if a job was named where none is expected."""
    if names:
        raise UsageError(
            f"the units are those of all jobs, and {names[0]!r} is one too many: {advice}"
        )


def install_unit(
    context: typer.Context,
    user: User = False,
    system: System = False,
    run_as: Annotated[
        str | None,
        option(
            "USER",
            "With --system: user that runs the jobs.",
            "that of the units that are there, or gadei-ps",
        ),
    ] = None,
    job: Annotated[
        str | None,
        option(
            "JOB",
            "Also write a job file for this job, unless it has one.",
            "demo, if there is no job file",
        ),
    ] = None,
    force: Annotated[bool, switch("--force", "Also replace units that were edited.")] = False,
    dry_run: Annotated[
        bool, switch("--dry-run", "Print the units and write nothing.", "--print")
    ] = False,
    as_json: Json = False,
) -> int:
    """Write the systemd units of jobs and print how to start a job with them."""
    from gadei_ps.commands import unit_files

    _no_name(
        context.args,
        "--job JOB writes a job file, and systemctl enable --now gadei-ps@JOB starts one",
    )
    done = unit_files.install(
        _scope(user, system), user=run_as, job=job, force=force, dry_run=dry_run
    )
    if as_json:
        print_json(asdict(done))
    elif dry_run:
        print_text("\n".join(f"# {one.path}\n{one.unit}" for one in done.units), sys.stdout, end="")
    else:
        for one in (*done.units, *((done.job_file,) if done.job_file else ())):
            print_text(f"{'wrote' if one.written else 'is up to date:'} {one.path}", sys.stdout)
        who = f", which runs as user {done.user}" if done.user else ""
        print_text(f"\nNext, for a job named {done.job}{who}:\n", sys.stdout)
        _print_steps(done.next)
    return 0


def uninstall_unit(
    context: typer.Context,
    user: User = False,
    system: System = False,
    force: Annotated[bool, switch("--force", "Even if jobs are enabled or running.")] = False,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> int:
    """Remove what install-unit has written; job files and checkpoints stay."""
    from gadei_ps.commands import unit_files

    _no_name(context.args, "to end one job: systemctl disable --now gadei-ps@JOB")
    done = unit_files.uninstall(_scope(user, system), force=force, dry_run=dry_run)
    if as_json:
        print_json(asdict(done))
        return 0
    for path in done.removed:
        print_text(f"{'would remove' if dry_run else 'removed'} {path}", sys.stdout)
    if not done.removed:
        print_text("there is nothing to remove", sys.stdout)
    for what, why in done.left:
        print_text(f"stays: {what if what.isprintable() else ascii(what)}: {why}", sys.stdout)
    print_text("\nNext:\n", sys.stdout)
    _print_steps(done.next)
    return 0


def _print_steps(lines: Sequence[str]) -> None:
    for line in lines:
        print_text(f"  {line}", sys.stdout)
