"""`make bench`: runs all benchmarks, writes results into the checkout, plots and tables into docs/.

    python -m gadei_ps.benchmarks [--quick] [NAME]...

Each benchmark runs in its own process, so that none inherits threads and memory of another.
"""

from __future__ import annotations

import argparse
import subprocess

from gadei_ps.benchmarks import (
    asynchrony_tables,
    group_tables,
    plots,
    result_tables,
    script_tables,
    suite,
    virtual_tables,
)
from gadei_ps.machine import process


def main() -> None:
    parser = argparse.ArgumentParser(description="Runs benchmarks and draws their plots.")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("names", nargs="*", help=f"of {', '.join(suite.BENCHMARKS)}")
    options = parser.parse_args()
    suite.check(options.names)
    for name in options.names or suite.BENCHMARKS:
        command = process.module_command("gadei_ps", "bench", name)
        # Quick figures mean little, so they do not replace the others.
        command += ["--quick"] if options.quick else ["--out", str(suite.RESULTS)]
        subprocess.run(command, check=True)
    if not options.quick:
        for path in plots.draw(suite.RESULTS, suite.RESULTS.parents[1] / "docs" / "plots"):
            print(path)
        virtual_tables.write()
        one_each = script_tables.TABLE, asynchrony_tables.TABLE, *group_tables.TABLES
        for table in (*one_each, *result_tables.TABLES):
            table.write()


if __name__ == "__main__":
    main()
