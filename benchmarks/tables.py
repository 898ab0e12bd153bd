"""Tables of documents that are made from the results of a benchmark."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gadei_ps.benchmarks import suite

DOCS = suite.RESULTS.parents[1] / "docs"
MISSING = "Not measured yet."


@dataclass(frozen=True)
class Table:
    """A table between the comments `<!-- RESULT.json: table -->` and `<!-- end of table -->`.

    lines: those of the table, given the result.
    notes: the result's notes stand below it; if False, `lines` has them.
    all_results: `lines` reads all results itself; RESULT is then no file, and `.json` is left out.
    """

    result: str
    page: str
    lines: Callable[[dict[str, Any]], list[str]]
    all_results: bool = False
    notes: bool = True

    @property
    def mark(self) -> re.Pattern[str]:
        """The first comment, and the table as it is now, with its notes."""
        name = self.result if self.all_results else f"{self.result}.json"
        return re.compile(
            rf"(<!-- {re.escape(name)}: table -->\n).*?(?=\n\n<!-- end of table -->)", re.S
        )

    def text(self) -> str:
        """Return the text of the page."""
        return (DOCS / self.page).read_text()

    def filled(self) -> str:
        """The page with the table of the results."""
        table, path = MISSING, suite.RESULTS / f"{self.result}.json"
        if self.all_results:
            table = "\n".join(self.lines({}))
        elif path.exists():
            result = json.loads(path.read_text())
            notes = result["notes"] if self.notes else []
            table = "\n".join([*self.lines(result), *(f"\n{note}" for note in notes)])
        return self.mark.sub(lambda found: found[1] + table, self.text())

    def write(self) -> None:
        """Rewrite the page."""
        (DOCS / self.page).write_text(self.filled())
