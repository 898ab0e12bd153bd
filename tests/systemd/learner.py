"""Pushes ones until its job ends; counts the pushes that have returned in a file.

learner.py JOB FILE
"""

import sys
from pathlib import Path

import numpy as np

from gadei_ps.errors import GadeiError, JobStopped
from gadei_ps.learners.client import Client

job, file = sys.argv[1:]
client = Client(job)
ones = np.ones(client.model.elements, np.float32)
with Path(file).open("w", buffering=1) as out:
    try:
        while True:
            client.push(ones, samples=1)
            if client.published % 100 == 1:
                print("pushed", client.published, file=out)
    except JobStopped:
        print("stopped", client.published, file=out)
    except GadeiError as error:
        print("failed", client.published, type(error).__name__, error, file=out)
