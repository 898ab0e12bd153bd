"""A learner without a framework: softmax regression on data that it makes itself.

gadei-ps run demo --learners 2 -- python examples/numpy_learner.py
"""

import numpy as np

from gadei_ps.learners.client import Client

SAMPLES, FEATURES, CLASSES, BATCH, EPOCHS = 8000, 20, 5, 8, 10

random = np.random.default_rng(0)  # one seed: every learner makes the same samples
inputs = random.normal(size=(SAMPLES, FEATURES)).astype(np.float32)
truth = random.normal(size=(FEATURES, CLASSES))
labels = (inputs @ truth + random.gumbel(size=(SAMPLES, CLASSES))).argmax(axis=1)


def probabilities(x: np.ndarray, weights: dict[str, np.ndarray]) -> np.ndarray:
    scores = x @ weights["weight"] + weights["bias"]
    powers = np.exp(scores - scores.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


start = {"weight": np.zeros((FEATURES, CLASSES)), "bias": np.zeros(CLASSES)}
with Client(tensors=start, optimizer={"kind": "sgd", "lr": 0.01}) as client:
    for batch in client.batches(SAMPLES, BATCH, EPOCHS):
        x, wanted = inputs[batch.indices], labels[batch.indices]
        rows = np.arange(len(wanted))
        # client.weights is the shared memory itself: reading it is the pull.
        error = probabilities(x, client.weights)
        loss = -np.log(error[rows, wanted]).mean()
        error[rows, wanted] -= 1
        error /= len(wanted)
        gradients = {"weight": x.T @ error, "bias": error.sum(axis=0)}
        client.push(gradients, loss=float(loss), samples=len(wanted))
    right = probabilities(inputs, client.weights).argmax(axis=1) == labels
    print(f"learner {client.row}: {client.published} gradients, accuracy {right.mean():.3f}")
