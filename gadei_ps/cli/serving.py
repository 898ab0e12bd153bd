"""Commands that run a job's watchdog, end what a dead one has left, and change what one does."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from gadei_ps.cli.exits import print_json
from gadei_ps.cli.options import (
    MODELS,
    Details,
    JobArgument,
    Json,
    JsonLog,
    MLflow,
    TensorBoard,
    WandB,
    argument,
    option,
    path_argument,
    print_result,
    switch,
)
from gadei_ps.errors import GadeiError, UsageError

if TYPE_CHECKING:
    from gadei_ps.job.config import JobConfig
    from gadei_ps.watchdog.notify import Notify
    from gadei_ps.watchdog.serve_options import Options

JobFile = Annotated[Path, path_argument("JOB.toml", "The job's configuration.")]
Name = Annotated[
    str | None,
    option(
        "JOB",
        "The job's name; an error if the file gives another one.",
        "as in the file, or its name without .toml",
    ),
]


def serve(
    file: JobFile,
    fresh: Annotated[
        bool, switch("--fresh", "Start from zero: ignore memory of a dead job and checkpoints.")
    ] = False,
    finish: Annotated[
        bool,
        switch(
            "--finish",
            "Serve nothing: end a job that has lost its watchdog, with its last checkpoint.",
        ),
    ] = False,
    keep_memory: Annotated[
        bool,
        switch(
            "--keep-memory",
            "With --finish: make no checkpoint; end the servers at once and keep the memory.",
        ),
    ] = False,
    name: Name = None,
    tensorboard: TensorBoard = None,
    mlflow: MLflow = None,
    wandb: WandB = None,
    json_log: JsonLog = False,
    verbose: Details = False,
    as_json: Json = False,
) -> int:
    """Serve a job in the foreground until SIGTERM, Ctrl-C or gadei-ps stop.

    If only the watchdog of the job was killed, the job is adopted with its servers and learners. If
    all its processes are dead, it resumes from shared memory or from its newest checkpoint.
    """
    from gadei_ps.job.config import with_curves
    from gadei_ps.watchdog.notify import Notify
    from gadei_ps.watchdog.serve_options import Options

    if fresh and finish:
        raise UsageError("give only one of --fresh and --finish")
    if keep_memory and not finish:
        raise UsageError("--keep-memory: give it with --finish")
    options = Options(fresh=fresh, finish=finish, verbose=verbose, as_json=json_log)
    notify = Notify.from_environment()
    try:
        if finish:
            return _finish(file, name, options, keep_memory, as_json, notify)
        places = {"tensorboard": tensorboard, "mlflow": mlflow, "wandb": wandb}
        job = with_curves(_load(file, name), places, str(file))
    except GadeiError as error:
        notify.failed(error)
        notify.close()
        raise
    return serve_job(job, options, as_json, notify)


def _finish(
    file: Path, name: str | None, options: Options, keep_memory: bool, as_json: bool, notify: Notify
) -> int:
    """Finish a job. Needs only its name: it ends even if the job file has a mistake."""
    from gadei_ps.commands.daemon import check_code
    from gadei_ps.machine import log
    from gadei_ps.memory import presence, shm
    from gadei_ps.watchdog.entry import end, finish

    begin = time.monotonic()
    log.set_up(as_json=options.as_json, verbose=options.verbose)
    found: JobConfig | UsageError = UsageError(f"{file}: not read")
    job = name or file.stem
    if not keep_memory or name is None:
        try:
            found = _load(file, name)
            job = found.name
        except Exception as error:  # whatever the file is
            why = f"{file}: {error or type(error).__name__}"
            found = error if isinstance(error, UsageError) else UsageError(why)
            if name is None and not presence.find(job):
                raise
    shm.check_job_name(job)
    if keep_memory:
        end(job)
    else:
        check_code(job, finish(job, found, options, notify))
    if as_json:
        print_json({"job": job, "seconds": time.monotonic() - begin})
    return 0


def _load(file: Path, name: str | None) -> JobConfig:
    from gadei_ps.job import config
    from gadei_ps.memory import shm

    if name is not None:
        shm.check_job_name(name)
    job = config.load(file)
    if name is not None and job.name != name:
        raise UsageError(
            f"{file} is the file of job {job.name!r}, not of job {name!r}: leave out `name`, and "
            f"call the file {name}.toml"
        )
    return job


def reload(file: JobFile, name: Name = None, as_json: Json = False) -> int:
    """Apply the changes in a job file to the running job.

    These may change: learner_timeout_s, hang_s and when_idle; in the table optimizer, all but kind;
    in the table checkpoint, every_s, every_gradients, keep and on_stop. If anything else differs,
    nothing is changed.
    """
    from gadei_ps.commands import change

    result = change.reload(_load(file, name))
    changed = [f"{field} = {json.dumps(value)}" for field, value in result["changed"].items()]
    shown = f"{result['job']}: {', '.join(changed) or 'nothing has changed'}"
    print_result(as_json, result, lambda: shown)
    return 0


def set_job(
    job: JobArgument,
    settings: Annotated[
        list[str],
        argument(
            "FIELD=VALUE...",
            "Fields of the optimizer, as lr=0.01 schedule=step step_size=1000; of a group of "
            f"parameters, as groups.0.lr=0.01; or sync=MODEL, alone: {MODELS}",
        ),
    ],
    timeout: Annotated[
        float, option("S", "Seconds to wait until the change takes effect.", min=0.1)
    ] = 60.0,
    as_json: Json = False,
) -> int:
    """Change hyperparameters or the synchronization model of a running job.

    Numbers change at once, between two gradients: lr, weight_decay, momentum, betas, alpha, eps,
    clip_norm, staleness_aware, spike_compensation, schedule, warmup_steps, step_size, step_gamma,
    total_steps, min_lr.
    The model changes at the next barrier. Both are kept in the job's memory and its checkpoints.
    """
    from gadei_ps.commands import change

    result, text = change.set_job(job, settings, timeout)
    print_result(as_json, result, lambda: f"{job}: {text}")
    return 0


def serve_job(job: JobConfig, options: Options, as_json: bool, notify: Notify | None = None) -> int:
    from gadei_ps.watchdog import fork_server
    from gadei_ps.watchdog.notify import Notify

    begin = time.monotonic()
    notify = notify or Notify.from_environment()  # whose variables no other process is to have
    options = replace(
        options, fork_server=fork_server.start_early()
    )  # beside the imports that follow

    from gadei_ps.commands.daemon import check_code
    from gadei_ps.machine import log
    from gadei_ps.watchdog.entry import serve

    log.set_up(as_json=options.as_json, verbose=options.verbose)
    check_code(job.name, serve(job, options, notify))
    if as_json:
        print_json({"job": job.name, "seconds": time.monotonic() - begin})
    return 0
