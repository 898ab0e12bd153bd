"""JAX with a job's optimizer, or with one of Optax in each learner.

python optax_train.py --plain                                    # JAX and Optax alone
gadei-ps run demo --learners 2 -- python optax_train.py          # the job's optimizer
gadei-ps run demo --learners 2 -- python optax_train.py --own    # Optax's; the job adds changes
"""

import argparse
import os

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gadei_ps.learners.jax

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--plain", action="store_true", help="without a job")
parser.add_argument("--own", action="store_true", help="an optimizer of Optax in each learner")
parser.add_argument("--steps", type=int, default=1000)
args = parser.parse_args()
SETTINGS = {"b1": 0.9, "b2": 0.999, "eps": 1e-8, "weight_decay": 1e-2}


@jax.jit
def mean_loss(params, inputs, labels):
    for layer in params["layers"][:-1]:
        inputs = jnp.tanh(inputs @ layer["weight"] + layer["bias"])
    logits = inputs @ params["layers"][-1]["weight"] + params["layers"][-1]["bias"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def make_layer(draw, inputs, outputs):
    weight = draw.standard_normal((inputs, outputs), np.float32) / inputs**0.5
    return {"weight": jnp.asarray(weight), "bias": jnp.zeros(outputs)}


def make_data(draw, count):
    inputs = draw.standard_normal((count, 20), np.float32)
    return inputs, (inputs[:, :10].sum(1) > inputs[:, 10:].sum(1)).astype(int)


start = np.random.default_rng(0)
params = {"layers": [make_layer(start, 20, 64), make_layer(start, 64, 2)]}
draw = np.random.default_rng(1 + int(os.environ.get("GADEI_PS_LEARNER", "0")))
loss_and_gradients = jax.jit(jax.value_and_grad(mean_loss))
optimizer = optax.adamw(2e-3, **SETTINGS)
if args.plain:
    state = optimizer.init(params)
    for _ in range(args.steps):
        loss, gradients = loss_and_gradients(params, *make_data(draw, 32))
        updates, state = optimizer.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
else:
    of_job = {"kind": "adamw", "lr": 2e-3, "weight_decay": 1e-2}
    chosen = optimizer if args.own else of_job
    with gadei_ps.learners.jax.Learner(params, optimizer=chosen) as learner:
        for _ in range(args.steps):
            loss, gradients = loss_and_gradients(learner.weights(), *make_data(draw, 32))
            learner.step(gradients, loss=loss, samples=32)
        params = learner.current()
print("loss", float(mean_loss(params, *make_data(np.random.default_rng(9), 1024))))
