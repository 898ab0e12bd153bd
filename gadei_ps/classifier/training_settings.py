"""Settings of a training: the options of `gadei-ps train`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gadei_ps import sync
from gadei_ps.errors import UsageError
from gadei_ps.memory.shm import check_job_name

ENSEMBLE: Final = "ensemble"
"""The default: see ensemble.py."""
CNN: Final = "cnn"
"""The paper's network and hyperparameters: see network.py."""


@dataclass(frozen=True)
class Settings:
    """The options of `train`. None: the default for the model and the size of the set.

    model: ENSEMBLE, or CNN, which groups of machines train; None: whichever of them fits. out:
    directory for the model; None: the first of model-1, model-2 and so on that is not there.
    overwrite: whether an earlier model there is replaced. groups: file that names the machines;
    None: this one alone. address: of their Ray cluster.
    """

    train_file: Path
    test_file: Path | None = None
    model: str | None = None
    learners: int = 2
    epochs: int | None = None
    batch_size: int | None = None
    optimizer: str = "adagrad"
    lr: float | None = None
    sync: str = "asp"
    patience: int = 5
    dropout: float = 0.5
    seed: int = 0
    wire: str = "float32"
    error_feedback: bool = False
    device: str = "auto"
    gpus: str | None = None
    out: Path | None = None
    overwrite: bool = False
    text_column: str | None = None
    label_column: str | None = None
    label_separator: str | None = None
    job: str | None = None
    groups: Path | None = None
    address: str | None = None
    tensorboard: Path | None = None
    mlflow: str | None = None
    wandb: Path | None = None
    replace: bool = True
    verbose: bool = False

    def __post_init__(self) -> None:
        if self.model is None:
            object.__setattr__(self, "model", CNN if self.groups is not None else ENSEMBLE)

    def check(self) -> None:
        """Raise UsageError if a value is out of range, or `out` has a model."""
        if self.out is not None and not self.overwrite and (self.out / "config.json").exists():
            raise UsageError(
                f"--out {self.out}: there is a model already; name another directory, or replace "
                "it with --overwrite"
            )
        if self.job is not None:
            try:
                check_job_name(self.job)
            except UsageError as error:
                raise UsageError(f"--job: {error}") from None
        for name in ("learners", "epochs", "batch_size", "patience"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"--{name.replace('_', '-')} must be at least 1, not {value}")
        if self.model == ENSEMBLE and self.groups is not None:
            raise UsageError("--groups trains the CNN: leave out --model ensemble")
        if self.label_separator is not None and (self.model == CNN or not self.label_separator):
            raise UsageError("--label-separator needs a separator, and the ensemble")
        if self.optimizer == "add":
            raise UsageError(
                "--optimizer add is for learners with optimizers of their own, which push updates; "
                "those of train push gradients: use another optimizer"
            )
        try:
            sync.parse(self.sync)
        except sync.SpecError as error:
            raise UsageError(f"--sync: {error}") from None
        if self.learners > 256:
            raise UsageError("--learners must be at most 256")
        if not 0 <= self.dropout < 1:
            raise UsageError(f"--dropout must be at least 0 and below 1, not {self.dropout}")
        if not 0 <= self.seed < 2**63:
            raise UsageError(f"--seed must be between 0 and {2**63 - 1}")
