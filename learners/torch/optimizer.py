"""The optimizer that a training script uses in place of torch's own."""

from __future__ import annotations

import contextlib
import inspect
import operator
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Any, NoReturn

import torch

from gadei_ps.errors import JobNotFound, UsageError
from gadei_ps.kernels.optimizers import Kind
from gadei_ps.learners.attach import warn
from gadei_ps.learners.client import DRAIN_TIMEOUT_S, REST_FIRST, Batch, Client, not_copied
from gadei_ps.learners.torch import assign, casts, gpu_backend, host_backend, model_loading
from gadei_ps.learners.torch import convert_settings as like_torch
from gadei_ps.learners.torch.backend import Backend
from gadei_ps.learners.torch.buffers import OWN, Buffers, check
from gadei_ps.learners.torch.first_batch import FirstBatch
from gadei_ps.learners.torch.gpu_backend import GpuBackend
from gadei_ps.learners.torch.hooks import weakly
from gadei_ps.learners.torch.host_backend import HostBackend
from gadei_ps.learners.torch.job_settings import JobSettings
from gadei_ps.learners.torch.model import Trained
from gadei_ps.learners.torch.sampler import JobSampler
from gadei_ps.learners.torch.state import (
    MOVED_BY_SCHEDULERS,
    OURS,
    READ_ONLY,
    State,
    load_state,
    read_state,
    warn_of_settings,
    whole_group,
)
from gadei_ps.learners.waves import adds

# Hooks on every optimizer's step; under these names in every torch since 2.0.
_MODULE = sys.modules[torch.optim.Optimizer.__module__]
_HOOKS_OF_ALL = tuple(
    getattr(_MODULE, f"_global_optimizer_{when}_hooks", {}) for when in ("pre", "post")
)
# Without torch's wrapper, which loads torch._dynamo: that takes seconds of each learner's start.
_ADD_PARAM_GROUP = inspect.unwrap(torch.optim.Optimizer.add_param_group)
_ZERO_GRAD = inspect.unwrap(torch.optim.Optimizer.zero_grad)
_STATE_DICT = inspect.unwrap(torch.optim.Optimizer.state_dict)

STAYS = (
    "close: what the script has written to parameters since the last step stays in this model; "
    "optimizer.assign gives it to the job"
)


def _brief(value: object) -> str:
    """Return a value in a form for a message of one line."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)}"
    return repr(value)


def _end(buffers: Buffers, backend: Backend) -> None:
    buffers.close()
    backend.close(keep=True)


def _join(trained: Trained, job: str | None, **options: Any) -> Client:
    """Join the job, and name the usual mistake if there is none of that name."""
    try:
        return trained.join(job, **options)
    except JobNotFound as error:
        if job is None or job.upper() not in Kind.__members__:
            raise
        raise UsageError(
            f"{error}; the second argument is the job's name: write kind={job.lower()!r}"
        ) from None


class _NotWanted(Exception):
    """Raised when the synchronization model has continued without the current gradient."""


class JobOptimizer(torch.optim.Optimizer):
    """An optimizer whose parameters are a job's: none can be added, and it is not copied."""

    _made = False

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group for torch's own constructor only. Raises UsageError later."""
        if self._made:
            raise UsageError("a job's model is fixed: parameters cannot be added to it")
        _ADD_PARAM_GROUP(self, param_group)

    def __reduce__(self) -> NoReturn:
        raise not_copied(self)


class Optimizer(JobOptimizer):
    """Optimizer of a training script that pushes the model's gradients to a job.

    model: its parameters that require a gradient become the job's. They are all on one device; move
    the model to its GPU before. They are float32, float64, bfloat16 or float16; the job has all in
    float32, and the learner casts them at every step. job: a name or a socket's path; None takes it
    from the environment (`gadei-ps run`, `attach`).

    kind, lr, momentum, nesterov, betas, alpha, eps, weight_decay: the job's optimizer, in the words
    of torch.optim; see gadei_ps.learners.optimizer_settings. like: instead of them an optimizer of
    torch, or its class with further keywords. The command line and the job file override them;
    later learners must give the same as the first one.

    groups: parameters with settings of their own, as torch's parameter groups: dicts of `params`
    (parameters, modules, names or patterns of names, or several of these), lr, momentum, betas,
    alpha, eps and weight_decay. Other settings of a group are those of all others. A parameter
    belongs to the first group that names it.

    view: whether parameters on the CPU are views of the weights segment (see
    gadei_ps.learners.torch); never where some are of another type than float32. wire,
    error_feedback: see Client.

    wait: whether step() waits until its gradient is in the weights that the next forward pass uses,
    as torch's optimizers do. By default it does with view=False; with view=True and on a GPU it
    costs the server's time for a gradient, in which the learner could compute.

    free_gradients: backward() copies each gradient into the ring while it is in the cache, and
    frees it; those of torch.nn.Linear are computed in the ring (see linear()). This is faster for
    models larger than the cache, and gradients need no memory. But `parameter.grad` is None after
    backward(), so that nothing can be clipped (use the job's clip_norm) or accumulated.

    buffers: whose buffers (as statistics of batch norm) are the job's copy, which new learners,
    checkpoints and exports get. Each learner always has its own. "first": those of the attached
    learner with the lowest number. "mean": each learner moves the copy toward its own; a buffer
    that is not finite is as with "first". "own": buffers are not part of the job.

    frozen: whether parameters that require no gradient are part of the job, so that checkpoints and
    exports load strictly. The job has those of the learner that makes its model, and so have later
    learners. They take their size in shared memory and in each checkpoint.

    skip_unused: parameters without a gradient stay as they are, and so does their momentum, as in
    torch.optim: those that a mini-batch does not use, or that are frozen after Optimizer was made.
    Otherwise momentum, moments and weight decay move them as by a gradient of zero.

    Torch's learning-rate schedulers work: the rate of each group travels with each gradient,
    relative to the job's, and so does a momentum that they move. Other settings in `param_groups`
    are the job's, and changing them is rejected at the next step. Raises UsageError, DeviceError,
    and what Client raises.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        job: str | None = None,
        *,
        kind: str | None = None,
        lr: float | torch.Tensor | None = None,
        momentum: float | None = None,
        nesterov: bool | None = None,
        betas: tuple[float, float] | None = None,
        alpha: float | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        groups: Iterable[Mapping[str, Any]] | None = None,
        like: torch.optim.Optimizer | type[torch.optim.Optimizer] | None = None,
        view: bool = True,
        wait: bool | None = None,
        wire: str = "float32",
        error_feedback: bool = False,
        free_gradients: bool = False,
        skip_unused: bool = True,
        buffers: str = "first",
        frozen: bool = True,
        name: str = "",
        **others: Any,
    ) -> None:
        if not isinstance(job, str | None):
            raise UsageError(
                f"Optimizer's second argument is the job's name, not {job!r}: write lr=... for the "
                "learning rate and like=... for an optimizer of torch"
            )
        check(buffers)
        self._trained = trained = Trained.of(
            model, any_type=True, buffers=buffers != OWN, fixed=frozen
        )
        view = view and not trained.is_cast
        self._on_gpu = on_gpu = gpu_backend.is_on_gpu(next(iter(trained.parameters.values())))
        wait = bool(wait) if on_gpu or wait is not None else not view
        given = {
            "kind": kind,
            "lr": lr,
            "momentum": momentum,
            "nesterov": nesterov,
            "betas": betas,
            "alpha": alpha,
            "eps": eps,
            "weight_decay": weight_decay,
            "groups": groups,
            **others,
        }
        settings, from_zero = like_torch.from_zero(like_torch.settings(like, given, trained))
        if on_gpu and free_gradients:
            raise UsageError(
                "free_gradients is for models on the CPU; on a GPU gradients are pushed while the "
                "next step computes"
            )
        if not on_gpu:
            host_backend.check(model, view=view)
        earlier = model_loading.end_previous(model, free_gradients=free_gradients)
        trained.check_free()
        self.client = _join(
            trained, job, optimizer=settings, wire=wire, error_feedback=error_feedback, name=name
        )
        self._frees = free_gradients
        self._waits = wait and not on_gpu
        with contextlib.ExitStack() as undo:
            self._start(undo, buffers, earlier, view=view, wait=wait, skip_unused=skip_unused)
            self._job = JobSettings(self.client, trained, settings, from_zero)
            super().__init__(self._job.groups, self._job.defaults)
            self.state = State(self.client, trained, self._parameters())
            self._made = True
            self.client.set_owner(self)
            # If it is dropped without close(), the model gets memory of its own all the same.
            self._dropped = weakref.finalize(self, _end, self._buffers, self.backend)
            self._dropped.atexit = False
            undo.pop_all()

    def _start(
        self,
        undo: contextlib.ExitStack,
        buffers: str,
        earlier: model_loading.PreviousState | None,
        *,
        view: bool,
        wait: bool,
        skip_unused: bool,
    ) -> None:
        """Bind the model to the job, and set the state of the training loop.

        undo: receives what reverts this. earlier: state that an earlier Optimizer of the model has
        left. The others: see the class.
        """
        trained = self._trained
        if earlier is not None:
            undo.callback(earlier.put_back, {**trained.parameters, **trained.buffers})
        undo.callback(self.client.detach)
        if adds(self.client):
            raise UsageError(
                f"job {self.client.job!r} adds updates, and Optimizer pushes gradients: use "
                "LocalOptimizer, or start the job with another optimizer than add"
            )
        undo.callback(trained.disown, self)
        trained.own(self)
        self.backend: Backend = (
            GpuBackend(self.client, trained, wait=wait, skip_unused=skip_unused)
            if self._on_gpu
            else HostBackend(
                self.client,
                trained,
                view=view,
                wait=wait,
                free_gradients=self._frees,
                skip_unused=skip_unused,
            )
        )
        """Binding of the model's parameters to the job's weights."""
        undo.callback(self.backend.close, keep=False)
        self._buffers = Buffers(self.client, trained, buffers)
        undo.callback(self._buffers.close, write=False)
        own = weakref.WeakMethod(self.close)
        self._loads = model_loading.PendingLoads(
            self.client, trained, self.backend, self._buffers, own
        )
        undo.callback(self._loads.close)
        if earlier is not None:
            self._loads.resume(earlier)
        self._own_data = True
        self._sampler: JobSampler | None = None
        self._first: FirstBatch | None = FirstBatch(trained.module)
        self._loss: float | torch.Tensor = float("nan")
        self._samples = 0
        self._steps = 0  # of the current wave
        self._of_batch = False  # the wave is one of the server's batches
        self._wave = 1  # mini-batches in the wave
        self._may_drop = False  # inside iteration(), and the job may continue without this learner
        self._undo = contextlib.ExitStack()
        self._undo.callback(self._first.remove)
        undo.callback(self._undo.close)
        self._watched = False  # hooks check whether the gradient is still wanted
        self._saved: Mapping[str, int] | None = None
        """Steps in the last state_dict()."""

    def share_memory(self) -> None:
        """Do nothing; scripts of Hogwild call it of an optimizer whose state is to be shared."""
        warn(
            "share_memory: momentum and moments are in the job's server; there is nothing to share",
        )

    # -- one step -------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Push the gradients of backward(); waits for a free slot, and for the server if `wait`.

        A learner with data of its own also waits here for the turn that the synchronization model
        gives; one that takes batches() waits there. Returns what the closure returns. Under WSP
        only the last step of a wave pushes, the sum of the wave's gradients; until then
        zero_grad() keeps them.
        """
        return self._hooked_step(closure) if self._is_watched() else self._push(closure)

    # Torch would wrap step() in its profiler's and its hooks' code, which takes some 80 µs between
    # backward() and the push, when it is not in the cache: as long as all the rest of a step.
    # It leaves alone a step that has this attribute.
    step.hooked = True  # type: ignore[attr-defined]

    def _is_watched(self) -> bool:
        """Return whether hooks or torch's profiler observe steps."""
        own = self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks
        profiles = torch.autograd._profiler_enabled  # type: ignore[attr-defined]
        return bool(own or any(_HOOKS_OF_ALL) or profiles())

    def _push(self, closure: Callable[[], Any] | None) -> Any:
        self._job.follow(self.param_groups)
        self._write()
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
            if isinstance(result, torch.Tensor) and result.numel() == 1:
                self.report(loss=result)
        if self._first is not None:
            if self._own_data and self._sampler is None:
                self._first.compare(self.client)
            self._first.remove()
            self._first = None
        scale = self._job.scales(self.param_groups)
        if self._trained.frozen:
            self._trained.warn_of_unfrozen()
        if self._wave_goes_on():
            return result
        before = self.client.published
        sampler = self._sampler
        samples = self._samples or (0 if sampler is None else sampler.samples_in_flight())
        try:
            self.backend.push(self._loss, samples=samples, rate_scale=scale)
        except BaseException:  # such as KeyboardInterrupt
            if self.client.published == before:
                self._steps -= 1  # this step has not been made
            else:
                self._forget()
            raise
        self._end_iteration()
        return result

    _hooked_step = torch.optim.Optimizer.profile_hook_step(_push)

    def _wave_goes_on(self) -> bool:
        """Count a mini-batch of a wave; return whether more of them follow."""
        if self._own_data and self._of_batch and self._wave > 1:
            raise UsageError(REST_FIRST)
        if self._own_data and not self._steps:
            self._wave = self.client.wave
        self._steps += 1
        if self._steps == self._wave:
            return False
        if self._frees:
            raise UsageError(
                "free_gradients gives each gradient away at once; WSP adds up those of a wave: "
                "use the one or the other"
            )
        return True

    def _forget(self) -> None:
        """Start the next wave, after the current one was pushed."""
        self._steps, self._of_batch = 0, False
        self.backend.forget()
        self._loss = float("nan")

    def _end_iteration(self) -> None:
        self._forget()
        self._buffers.write_if_due()
        if self._own_data:
            self._end_turn()
        if self._waits and not (self._own_data and self._sampler is None):
            self.backend.refresh()  # now, for the script may write to what it reads

    def _refresh(self) -> None:
        """Pull weights for the next step, unless the script has loaded or written others."""
        if not self._loads.pending and not self._is_written():
            self.backend.refresh()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients, as torch's; those that are set to None are neither cleared nor added to.

        In the middle of a wave it does nothing.
        """
        if self._steps:
            return
        self.backend.forget()
        if not set_to_none:
            _ZERO_GRAD(self, set_to_none=False)
            return
        for parameter in self._trained.parameters.values():
            parameter.grad = None

    def report(
        self, *, loss: float | torch.Tensor | None = None, samples: int | None = None, **values: Any
    ) -> None:
        """Report loss and samples of the next step for status and metrics. Does not wait for a GPU.

        loss: one number. samples: a whole number. values: others by name, such as accuracy=0.9; see
        Client.report. Raises UsageError.
        """
        if values:
            self.client.report(**values)
        if loss is not None:
            try:
                if isinstance(loss, torch.Tensor):
                    self._loss = self.backend.loss(loss)
                else:
                    self._loss = float(loss)
            except (TypeError, ValueError, RuntimeError):
                raise UsageError(f"report(loss={_brief(loss)}): give one number") from None
        if samples is not None:
            try:
                self._samples = operator.index(samples)
            except TypeError:
                raise UsageError(f"report(samples={samples!r}): give a whole number") from None

    # -- gradients that are not wanted any more -------------------------------------------------

    @contextlib.contextmanager
    def iteration(self) -> Iterator[None]:
        """Run zero_grad() to step() in a block that ends early once the gradient is not wanted any
        more.

            with optimizer.iteration():
                optimizer.zero_grad()
                criterion(model(inputs), targets).backward()
                optimizer.step()

        Cutoff continues without stragglers. A straggler leaves the block at the next module or
        gradient, and continues after it; its batch is handed out again. Without this block it
        computes to the end, and its gradient is dropped.
        """
        if not self._watched:
            self._watched = True
            self._watch()
        self._may_drop = self.client.drops
        try:
            yield
        except _NotWanted:
            self._may_drop = False
            self.client.abandon()
            self._end_iteration()
            self.zero_grad()
        finally:
            self._may_drop = False

    def _watch(self) -> None:
        check = weakly(self._check_wanted)
        for module in self._trained.module.modules():
            if not any(True for _ in module.children()):
                hook = module.register_forward_pre_hook(check)
                self._undo.callback(hook.remove)
        for parameter in self._trained.parameters.values():
            made = parameter.register_post_accumulate_grad_hook(check)  # type: ignore[no-untyped-call]
            self._undo.callback(made.remove)

    def _check_wanted(self, *_: object) -> None:
        if self._may_drop and not self.client.wanted:
            raise _NotWanted

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Pause in a block that takes long and computes no gradient (validation); see Client.pause.

        Afterwards, a learner with data of its own waits for its turn and has the current weights.
        """
        with self.client.pause():
            yield
        if self._own_data:
            self._end_turn()

    # -- writes to the weights ------------------------------------------------------------------

    def _write(self) -> None:
        """Give the job what the script has loaded or written. Raises what assign() raises."""
        self._loads.write()
        if values := self.backend.written():
            self.client.assign({name: casts.host(one) for name, one in values.items()})
            self.backend.follow()

    def _is_written(self) -> bool:
        """Return whether the script has written to parameters since the last step."""
        try:
            return bool(self.backend.written())
        except UsageError:  # which the next step raises
            return True

    def _keeps_written(self) -> bool:
        """Return whether the model keeps at the end what the script has written; warns."""
        try:
            written = self.backend.written()
        except UsageError:  # other types: the model keeps them
            return True
        if written:
            warn(STAYS)
        return bool(written)

    def assign(self, values: Mapping[str, Any], *, reset: bool = False) -> None:
        """Replace weights of the job, exactly once; returns when they are in all shards.

        values: tensors by the names of model.state_dict(), some of them or all. What this learner
        has pushed before is applied before; what others push meanwhile, before or after. reset: the
        optimizer's momentum and moments of these parameters become zero; otherwise they stay. See
        Client.assign for what it raises.
        """
        given = assign.split(self._trained, self.client.model, values)
        self._write()
        self.client.assign(given.job, reset=reset)
        self.backend.assigned()
        given.write_local(self._trained)
        self._buffers.warn_of_frozen(given.local)

    # -- the optimizer's state -------------------------------------------------------------------

    @property
    def state(self) -> Any:
        """Momentum and moments of each parameter: see gadei_ps.learners.torch.state.State."""
        return self._state

    @state.setter
    def state(self, given: Any) -> None:
        if self._made:
            raise UsageError(READ_ONLY)
        self._state = given

    def state_dict(self) -> dict[str, Any]:
        """Return the state as torch's class of the job's kind does, with momentum and moments of
        the server.

        Between two gradients of all learners, after what this one has pushed. Raises what
        Client.job_state raises; UsageError after close().
        """
        if self.client.left:
            raise UsageError("state_dict: momentum and moments were the job's; save before close()")
        shown, self._state = self._state, {}
        try:
            parts: dict[str, Any] = _STATE_DICT(self)
        finally:
            self._state = shown
        parts["state"], steps = read_state(self.client, self._trained, self._parameters())
        groups = [whole_group(self.client, one) for one in parts["param_groups"]]
        self._saved = {"steps": steps}
        return parts | {"param_groups": groups, OURS: self._saved}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what state_dict() of this optimizer or of torch's class has returned.

        Momentum and moments go to the job's server, and the learning rate is this learner's. Of
        learners that load when they begin, one writes, before the job's first step; see
        Client.load_optimizer_state. Warns where the job keeps another state, or where this moves
        the rate. Raises ValueError, as torch does, for another model's state, UsageError for that
        of another optimizer.
        """
        saved = state_dict["param_groups"]
        parameters = self._parameters()
        sizes = [len(one["params"]) for one in saved]
        if sizes != [len(one["params"]) for one in self.param_groups]:
            # Torch's optimizers are mostly given frozen parameters as well.
            parameters = list(self._trained.module.parameters())
            if len(self.param_groups) > 1 or sizes != [len(parameters)]:
                raise ValueError("the state is of other parameters than this optimizer's")
        warn_of_settings(state_dict, self._job.torch_settings)
        # A learner that comes late may be handed back what it has read, as accelerate does, while
        # the job trains on.
        if not self.client.is_new or state_dict.get(OURS, {}) != self._saved:
            load_state(self.client, self._trained, parameters, state_dict)
        for number, (group, one) in enumerate(zip(self.param_groups, saved, strict=True)):
            before = float(group["lr"])
            names = ["lr", "initial_lr"]
            if "initial_lr" in one:
                names += [name for name in MOVED_BY_SCHEDULERS if group.get(name)]
            group |= {name: one[name] for name in names if name in one}
            if float(group["lr"]) != before and "initial_lr" not in one:  # else a scheduler's
                of = f" of param_groups[{number}]" if len(saved) > 1 else ""
                warn(
                    f"load_state_dict sets this learner's learning rate{of} to "
                    f"{float(group['lr']):g}; it was {before:g}, the job's is "
                    f"{self._job.rates[number]:g}",
                )

    def _parameters(self) -> list[torch.Tensor]:
        return [one for group in self.param_groups for one in group["params"]]

    # -- work and the end -----------------------------------------------------------------------

    def batches(self, samples: int, batch_size: int, epochs: int, seed: int = 0) -> Iterator[Batch]:
        """Take mini-batches from the server; see Client.batches. One step() for each."""
        self._own_data = False
        if self._steps and self._of_batch:  # it was left in the middle
            self._restart_wave()
        elif self._steps:
            scale = self._job.scales(self.param_groups)
            self.backend.push(self._loss, samples=self._samples, rate_scale=scale)
            self._forget()
        try:
            for batch in self.client.batches(samples, batch_size, epochs, seed):
                self._refresh()
                count = len(batch.indices)
                self._wave = -(-count // batch_size)
                for begin in range(0, count, batch_size):
                    self._samples = min(begin + batch_size, count)
                    steps = self._steps
                    self._of_batch = True
                    yield batch._replace(indices=batch.indices[begin : begin + batch_size])
                    last = begin + batch_size >= count
                    if self.client.unanswered if last else self._steps != steps + 1:
                        raise UsageError("step() was not called for a batch: call it once for each")
        finally:
            self._own_data = True
            self._refresh()

    def sampler(
        self,
        dataset: Sized,
        batch_size: int,
        *,
        epochs: int,
        seed: int = 0,
        drop_last: bool = False,
        accumulate: int = 1,
        sized: bool = True,
    ) -> JobSampler:
        """Return a sampler for DataLoader(dataset, batch_sampler=optimizer.sampler(...)).

        Each mini-batch of batch_size rows is answered once an epoch by one of the job's learners,
        whose scripts give the same numbers. One step() for each, or for `accumulate` of them.
        drop_last: leaves out the rows that do not fill the last one of an epoch. sized: whether it
        has a length, that of the job's epoch, which a pass of one learner may not reach. Raises
        UsageError, ControlError.
        """
        try:
            samples = len(dataset)
        except TypeError:
            raise UsageError(
                f"sampler({type(dataset).__name__}): give a dataset that has a length, not one "
                "that is only iterated over"
            ) from None
        self._sampler = JobSampler(
            self.client,
            self._begin_turn,
            samples,
            batch_size,
            epochs,
            seed,
            drop_last=drop_last,
            accumulate=accumulate,
        )
        self._sampler.sized, self._sampler.restart = sized, self._restart_wave
        return self._sampler

    def _begin_turn(self) -> None:
        self.client.wait_turn()
        self._refresh()

    def _restart_wave(self) -> None:
        """Drop what a loop that was left has computed: its mini-batches come again."""
        self._steps = 0
        self.zero_grad()

    def _end_turn(self) -> None:
        """Wait for the next turn after a push of a learner that does not loop over batches()."""
        sampler = self._sampler
        if sampler is None or sampler.finished or self.client.unanswered:
            self._begin_turn()
        elif not sampler.is_under_way:  # it has no work, and no turn before it gets some
            self._refresh()

    def stop_job(self, reason: str = "", timeout_s: float = DRAIN_TIMEOUT_S) -> None:
        """Stop the job for all its learners (early stopping); see Client.stop_job."""
        self.client.stop_job(reason, timeout_s)

    def close(self) -> None:
        """Leave the job; the model keeps the job's weights as they are now, in memory of its own,
        and its own buffers.

        Waits at most 10 s until the weights contain this learner's last gradient; under BSP that
        needs the other learners.

        Where load_state_dict() or the script has given it other weights since the last step, it
        keeps those. A second call does nothing.
        """
        self._undo.close()
        loaded = self._loads.pending
        keep = loaded or (not self.client.left and self._keeps_written())
        self._loads.close()
        try:
            self._buffers.close(write=not loaded)
            self.backend.close(keep=keep)
        finally:
            self._dropped.detach()
            self._trained.disown(self)
            self.client.detach()
