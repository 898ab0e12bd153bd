"""Push ones until its job ends; count the pushes that have returned in a file.

learner.py JOB FILE [PUSHES [CODE]]

PUSHES: ends by itself after so many; 0 for never. CODE: what it ends with when the job is stopped.
"""

import sys
from pathlib import Path

import numpy as np

from gadei_ps.errors import GadeiError, JobStopped
from gadei_ps.learners.client import Client

job, file, *more = sys.argv[1:]
pushes, code = map(int, [*more, "0", "0"][:2])
client = Client(job)
ones = np.ones(client.model.elements, np.float32)
with Path(file).open("w", buffering=1) as out:
    try:
        while not pushes or client.published < pushes:
            client.push(ones, samples=1)
            if client.published % 100 == 1:
                print("pushed", client.published, file=out)
    except JobStopped:
        print("stopped", client.published, file=out)
        sys.exit(code)
    except GadeiError as error:
        print("failed", client.published, type(error).__name__, error, file=out)
