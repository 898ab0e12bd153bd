"""A learner in JAX: gadei-ps run demo --learners 2 -- python jax_learner.py

On a GPU arrays go from one library to the other without a copy (DLPack); on the host they are
NumPy's. Several JAX processes on one GPU need XLA_PYTHON_CLIENT_PREALLOCATE=false.
"""

import jax
import jax.numpy as jnp
import numpy as np

from gadei_ps.learners import devices
from gadei_ps.learners.client import Client
from gadei_ps.learners.pipeline import Pipeline

BATCH, STEPS = 32, 2000
rng = np.random.default_rng()


@jax.jit
def loss_and_gradients(weights, inputs, targets):
    def loss(weights):
        hidden = jnp.tanh(inputs @ weights["hidden"])
        logits = hidden @ weights["out"]
        return -jax.nn.log_softmax(logits)[jnp.arange(BATCH), targets].mean()

    return jax.value_and_grad(loss)(weights)


def main() -> None:
    start = np.random.default_rng(0)
    tensors = {
        "hidden": 0.3 * start.standard_normal((20, 64), np.float32),
        "out": 0.1 * start.standard_normal((64, 2), np.float32),
    }
    device = devices.choose()
    said = {"kind": "sgd", "lr": 0.01}  # the optimizer is the job's
    with (
        Client(tensors=tensors, optimizer=said) as client,
        Pipeline(client, device) as pipeline,
    ):
        for step in range(STEPS):
            weights = {name: jnp.from_dlpack(array) for name, array in pipeline.weights().items()}
            inputs = rng.standard_normal((BATCH, 20), np.float32)
            loss, gradients = loss_and_gradients(weights, inputs, (inputs.sum(1) > 0).astype(int))
            if device.name == "host":  # a GPU keeps the order by itself
                jax.block_until_ready(gradients)
            # Looking at a loss waits for it, so only now and then.
            told = {"loss": float(loss)} if step % 100 == 0 else {}
            pipeline.push(gradients, samples=BATCH, **told)


main()
