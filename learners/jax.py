"""JAX: the weights of a job as a pytree, with the job's optimizer or with one of Optax.

    learner = Learner(params, optimizer={"kind": "adamw", "lr": 1e-3})    # or optax.adamw(1e-3)
    for inputs, targets in data:
        loss, gradients = loss_and_gradients(learner.weights(), inputs, targets)
        learner.step(gradients, loss=loss, samples=len(inputs))

The job's optimizer has its state in the server, and learners push gradients. One of Optax belongs
to its learner, and the job adds what learners change.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from gadei_ps.errors import ModelMismatch, UsageError
from gadei_ps.learners.client import DRAIN_TIMEOUT_S, Client
from gadei_ps.learners.waves import GradientWaves, Waves


def _named(tree: Any) -> dict[str, Any]:
    """Return the arrays of a pytree by name, such as layers/0/bias."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    found = {jax.tree_util.keystr(at, simple=True, separator="/"): one for at, one in leaves}
    if len(found) < len(leaves):
        raise ModelMismatch("two arrays of a pytree have one name: leave '/' out of its keys")
    return found


def _finite(tree: Any) -> bool:
    return all(bool(jnp.isfinite(one).all()) for one in jax.tree_util.tree_leaves(tree))


class Learner:
    """One learner, which belongs to the thread that makes it.

    params: a pytree of floating-point arrays; the first learner's make the job's model, in float32.
    optimizer: the job's, with the keywords of gadei_ps.learners.optimizer_settings, or an
    optax.GradientTransformation of this learner's own. options: further keywords of Client. Raises
    ModelMismatch for other params, and what Client raises.
    """

    def __init__(
        self, params: Any, job: str | None = None, *, optimizer: Any = None, **options: Any
    ) -> None:
        arrays = {name: jnp.asarray(one) for name, one in _named(params).items()}
        self._types = {name: one.dtype for name, one in arrays.items()}
        self._tree = jax.tree_util.tree_structure(params)
        for name, kind in self._types.items():
            if not jnp.issubdtype(kind, jnp.floating):
                raise ModelMismatch(f"params: {name!r} is {kind}: a job trains floating point only")
        start = {name: np.asarray(one, np.float32) for name, one in arrays.items()}
        self._local = local = optimizer is not None and not isinstance(optimizer, Mapping)
        options["optimizer"] = {"kind": "add"} if local else optimizer
        self.client = Client(job, tensors=start, **options)
        try:
            self.waves = Waves(self.client) if local else GradientWaves(self.client)
        except BaseException:
            self.client.detach()
            raise
        self._kept = False  # whether a wave has gradients that are not pushed
        if local:
            self.state = optimizer.init(self._pytree(self.waves.weights))
            """State of the learner's own optimizer."""
            self._update = jax.jit(optimizer.update)

    def _pytree(self, arrays: Mapping[str, np.ndarray]) -> Any:
        # Of copies, for JAX may use the memory of an array, and later than now.
        leaves = [jnp.asarray(arrays[name].copy(), kind) for name, kind in self._types.items()]
        return jax.tree_util.tree_unflatten(self._tree, leaves)

    def weights(self) -> Any:
        """Return the weights for the next gradient; waits for the turn to compute it."""
        if not self.waves.in_flight:
            self.waves.begin()
        return self._pytree(self.waves.weights)

    def current(self) -> Any:
        """Return the newest weights, for a validation or a file; waits for this learner's last
        push.

        The job's, or with an optimizer of its own this learner's.
        """
        self.client.wait_applied()
        return self._pytree((self.waves if self._local else self.client).weights)

    def step(self, gradients: Any, *, loss: Any = math.nan, samples: int = 0) -> None:
        """Take the gradients of weights(), a pytree like it; pushes at the end of a wave.

        A gradient that is not finite changes nothing unless the job accepts it. Raises
        ModelMismatch for another pytree, and what Client.push raises.
        """
        if not self.waves.in_flight:
            raise UsageError("step() without weights(): compute each gradient from weights()")
        if jax.tree_util.tree_structure(gradients) != self._tree:
            raise ModelMismatch("step: the gradients are another pytree than params")
        changes, to = gradients, self.waves.weights
        if isinstance(self.waves, GradientWaves):
            to = self.waves.gradients
        elif self.client.refuses_nonfinite and not _finite(gradients):
            changes = {}  # else it would stay in the state of the learner's optimizer
        else:
            changes, self.state = self._update(gradients, self.state, self._pytree(to))
        for name, change in _named(changes).items():
            to[name] += np.asarray(change, np.float32)
        self._kept = not self.waves.end(loss=float(loss), samples=samples)

    def report(self, **values: Any) -> None:
        """Report values by name, such as an accuracy; see Client.report."""
        self.client.report(**values)

    def stop_job(self, reason: str = "", timeout_s: float = DRAIN_TIMEOUT_S) -> None:
        """Stop the job for all its learners (early stopping); see Client.stop_job."""
        self.client.stop_job(reason, timeout_s)

    def close(self) -> None:
        """Push what an unfinished wave of WSP has changed, and leave the job."""
        try:
            if self._kept and self.waves.in_flight:
                self.waves.end()  # weights() without step()
            if self._kept:
                self.waves.flush()
        finally:
            self.client.detach()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
