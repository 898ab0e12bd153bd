"""Runs all benchmarks one after the other, each in a process of its own; `make bench`."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

ALL = ("apply", "undo", "start", "memory", "accuracy")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=ALL, help=f"of {', '.join(ALL)}")
    options = parser.parse_args()
    for name in options.names:
        print(f"== {name}", flush=True)
        script = Path(__file__).with_name(f"{name}.py")
        subprocess.run([sys.executable, str(script)], check=True)


if __name__ == "__main__":
    main()
