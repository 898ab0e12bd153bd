"""Keras 3 on its torch backend: a callback makes fit() train with a job.

    model.compile(optimizer=keras.optimizers.AdamW(1e-3), loss=...)
    model.fit(data, epochs=10, callbacks=[Learner()])

Keras computes, clips and accumulates the gradients, and sets the learning rate of each step. The
job has the weights, the momentum and the moments.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import keras
import torch

from gadei_ps.errors import UsageError
from gadei_ps.learners.torch import Optimizer

NO_JOB = "a job has SGD, Adam and AdamW, as torch computes them; compile with one of these"


def _settings(optimizer: Any, variables: Iterable[Any]) -> dict[str, Any]:
    """Return the settings of Keras's optimizer by the names of torch.optim. Raises UsageError if a
    job cannot have it."""
    own = type(optimizer).__module__.startswith("keras.")
    kind = type(optimizer).__name__ if own else ""
    has = optimizer.get_config()
    decay = has.get("weight_decay") or 0.0
    refused = [one for one in ("amsgrad", "use_ema") if has.get(one)]
    if kind == "SGD" and has["momentum"] and decay:
        refused.append("weight_decay with momentum")
    if refused or kind not in ("SGD", "Adam", "AdamW"):
        what = f"{type(optimizer).__name__}({', '.join(refused)})"
        raise UsageError(f"model.compile(optimizer={what}): {NO_JOB}")
    bound = [one.path for one in variables if one.constraint is not None]
    if bound:
        raise UsageError(f"{bound[0]} has a constraint, which a job does not keep: leave it out")
    rate = has["learning_rate"]
    if isinstance(rate, dict):  # a schedule; of one that begins with 0, rates are relative to 1
        rate = rate["config"].get("initial_learning_rate")
    settings = {"lr": rate if isinstance(rate, float) and rate > 0 else 1.0, "weight_decay": decay}
    free = [one.path for one in variables if decay and not optimizer._use_weight_decay(one)]
    settings |= {"groups": [{"params": free, "weight_decay": 0.0}]} if free else {}
    if kind == "SGD":
        return settings | {"kind": "sgd", "momentum": has["momentum"], "nesterov": has["nesterov"]}
    betas = has["beta_1"], has["beta_2"]
    return settings | {"kind": "adamw" if decay else "adam", "betas": betas, "eps": has["epsilon"]}


class Learner(keras.callbacks.Callback):  # type: ignore[misc]
    """Trains the model with a job from the beginning of fit() to its end.

    job, options: see gadei_ps.learners.torch.Optimizer. Its settings are those of the compiled
    optimizer, unless options give others. Raises UsageError, and what Optimizer raises.
    """

    def __init__(self, job: str | None = None, **options: Any) -> None:
        super().__init__()
        if (backend := keras.backend.backend()) != "torch":
            raise UsageError(f"Keras computes with {backend}: set KERAS_BACKEND=torch first")
        # Keras writes to weights in place, so they are not views of the job's.
        self._options = {**options, "job": job, "view": False}
        self._settings: dict[str, Any] = {}  # what the first fit() begins with
        self._fits = False
        self._end, self._pause = contextlib.ExitStack(), contextlib.ExitStack()

    def on_train_begin(self, logs: Any = None) -> None:
        self._end.close()  # of a fit() that an error has ended
        optimizer, trained = self.model.optimizer, self.model.trainable_variables
        if self.model.jit_compile:
            raise UsageError("model.compile(jit_compile=True): a job needs jit_compile=False")
        self._settings = self._settings or _settings(optimizer, trained)
        module = torch.nn.Module()
        for one in trained:
            module.register_parameter(one.path, one.value)
        for one in self.model.non_trainable_variables:
            if one.value.is_floating_point():
                module.register_buffer(one.path, one.value)
        self._job = Optimizer(module, **self._settings | self._options)
        self._end.callback(self._job.close)
        self._end.callback(self._job.backend.close, keep=True)  # perhaps a callback has loaded it
        for group in self._job.param_groups:
            group["initial_lr"] = group["lr"]
        self._parameters = dict(module.named_parameters())
        self._wave: dict[str, torch.Tensor] = {}  # sums of gradients that are not pushed yet
        # The job decays the weights, too.
        for name, own in (
            ("_backend_update_step", self._step),
            ("_apply_weight_decay", lambda _: None),
        ):
            setattr(optimizer, name, own)
            self._end.callback(delattr, optimizer, name)
        self._end.callback(self._pause.close)
        self._end.callback(setattr, self, "_fits", False)
        self._fits = True

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._mean = next((one for one in self.model.metrics if one.name == "loss"), None)
        self._reported = 0.0, 0.0  # loss and samples of the epoch that were reported

    def _step(self, gradients: Iterable[Any], variables: Iterable[Any], rate: Any) -> None:
        """Push, in place of Keras's update. Keras clears gradients even within a wave."""
        for gradient, variable in zip(gradients, variables, strict=True):
            has = self._wave.get(variable.path)
            self._wave[variable.path] = gradient if has is None else has + gradient
        for name, parameter in self._parameters.items():
            parameter.grad = self._wave.get(name)
        for group in self._job.param_groups:
            group["lr"] = group["initial_lr"] * (float(rate) / self._settings["lr"])
        now = self._reported
        if self._mean is not None:
            now = float(self._mean.total), float(self._mean.count)
            samples = now[1] - self._reported[1]
            if samples > 0:
                self._job.report(loss=(now[0] - self._reported[0]) / samples, samples=int(samples))
        before = self._job.client.published
        self._job.step()
        if self._job.client.published != before:
            self._wave, self._reported = {}, now
        if self._job.client.stopping:
            self.model.stop_training = True

    def on_test_begin(self, logs: Any = None) -> None:
        if self._fits:
            self._pause.enter_context(self._job.pause())

    def on_test_end(self, logs: Any = None) -> None:
        self._pause.close()

    def stop_job(self, reason: str = "") -> None:
        """End fit() of all learners of the job (early stopping); see Client.stop_job."""
        self._job.stop_job(reason)

    def on_train_end(self, logs: Any = None) -> None:
        self._end.close()
