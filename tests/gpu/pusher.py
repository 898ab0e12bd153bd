"""A learner on a device that pushes ones until it is killed: python pusher.py JOB emulated|cuda"""

import contextlib
import itertools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import emulator

from gadei_ps.learners import devices
from gadei_ps.learners.client import Client


def main(job: str, kind: str) -> None:
    with emulator.installed() if kind == "emulated" else contextlib.nullcontext():
        client = Client(job)
        link = devices.choose("cuda").link(client)
        weights = link.buffer()
        link.fill(weights)
        link.pull(weights)
        for number in itertools.count(1):
            gradients = link.gradients()
            for array in gradients.values():
                array.fill(1)
            link.push(gradients, link.version)
            if link.pulled():
                link.pull(weights)
            if number == 4:  # so three are published
                print("going", flush=True)


main(*sys.argv[1:])
