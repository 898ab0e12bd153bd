"""A learner for the job of compose.yaml: least squares on numbers of its own."""

import os

import numpy as np

from gadei_ps.errors import JobStopped
from gadei_ps.learners.client import Client

wanted = np.linspace(-1.0, 1.0, 1000, dtype=np.float32)
random = np.random.default_rng(int(os.environ.get("GADEI_PS_LEARNER", "0")))
try:
    with Client(tensors={"w": np.zeros(1000, np.float32)}) as client:
        for step in range(4_000):
            error = client.weights["w"] - wanted + random.normal(0.0, 0.1, 1000).astype(np.float32)
            loss = float(error @ error) / 1000
            client.push({"w": error}, samples=1, loss=loss)
            if step % 1000 == 0:
                print(f"step {step}: loss {loss:.4f}", flush=True)
except JobStopped:
    print("the job has been stopped", flush=True)
