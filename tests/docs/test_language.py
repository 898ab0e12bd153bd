"""The rules of plain English that a program can check, in sources, help texts and documents.

`language.txt` lists how often each file still breaks each rule. No rule may be broken more often
than listed; moved lines count only once. `python tests/docs/test_language.py` rewrites the list,
and `python tests/docs/test_language.py FILE...` prints what is found in these files.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
LIST = Path(__file__).with_name("language.txt")
SOURCES = ("gadei_ps", "learners", "watchdog", "benchmarks", "examples", "native", "tests")
SUBJECT = 72  # characters of a commit's first line

BEGINNING = re.compile(
    r"(About|After|Against|As|At|Before|Between|By|During|For|From|If|In|Of|On|Over|Per|Since|That"
    r"|Through|To|Towards|Under|Until|While|With|Within|Without|What|When|Where|Which|Who|Whoever"
    r"|Whose|Why|How)\b(?!-)"
)
# A verb in the third person, or a noun: functions begin with an imperative.
THIRD = re.compile(r"[A-Z][a-z]*[^\Ws]s\b")
# Wrong whatever the subject is.
WORDS = (
    r"\b(vouch(es|ed)?|anew|obeys?|newcomers?|nursery|lookouts?|belongings|in hand|signs of life"
    r"|(let|lets|letting) go|(gives?|gave|giving) up|(takes?|took|taken) back|stands? still"
    r"|goes on|go on|going on|went on|gone on|tells?|told|hears?|heard|wish(es)?)\b"
)
# In a message, the program speaks of processes, which report, print, require and set. A daemon is a
# watchdog there, but in start.json.
MESSAGES = re.compile(rf"{WORDS}|\b(say|says|said|knows|given up|daemon(?![-=]| ready\b))\b", re.I)
TEXTS = {
    "word": re.compile(WORDS, re.I),
    "none": re.compile(
        r"(?<![Tt]here )\b(is|are|was|were) (none\b|no (?!longer|more|less|later|earlier)[a-z])"
    ),
    "number": re.compile(r"\d µ?us\b|[\[(]us[\])]|\d %(?![\w(.])"),
    "inverted": re.compile(r"(, |^)should (a|an|it|the|they|this)\b", re.I),
    "even": re.compile(r"\balso (if|once|where)\b", re.I),
}

CODE = re.compile(r"^(`{3,})[^\n]*\n.*?^\1$|`[^`\n]*`", re.M | re.S)


class Fault(NamedTuple):
    """One place that breaks a rule."""

    rule: str
    line: int
    text: str


def texts_of(rule_of_words: re.Pattern[str], text: str, line: int) -> Iterator[Fault]:
    """Find the faults of every text, of prose and of messages."""
    for rule, pattern in (TEXTS | {"word": rule_of_words}).items():
        for found in pattern.finditer(text):
            around = text[max(0, found.start() - 30) : found.end() + 30]
            number = line + text.count("\n", 0, found.start())
            yield Fault(rule, number, " ".join(around.split()))


def docstrings(nodes: list[ast.AST]) -> dict[ast.Constant, bool]:
    """Return every docstring, and whether it belongs to a function that is not a property."""
    found = {}
    for node in nodes:
        if not isinstance(body := getattr(node, "body", None), list):
            continue
        function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not any(
            "property" in ast.unparse(one) for one in node.decorator_list
        )
        for at, one in enumerate(body):
            text = one.value if isinstance(one, ast.Expr) else None
            if isinstance(text, ast.Constant) and isinstance(text.value, str):
                found[text] = function and not at
    return found


def literals(nodes: list[ast.AST], others: Iterable[ast.AST]) -> Iterator[tuple[str, int]]:
    """Yield the strings of a module except these others; a value in an f-string reads 0."""
    skipped = set(others)
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            skipped |= set(node.values)
            parts = [getattr(one, "value", 0) for one in node.values]
            yield "".join(one if isinstance(one, str) else "0" for one in parts), node.lineno
        elif isinstance(node, ast.Constant) and node not in skipped and isinstance(node.value, str):
            yield node.value, node.lineno


def faults_of_python(source: str) -> Iterator[Fault]:
    """Find the faults of a module: docstrings, messages and help texts, comments."""
    nodes = [*ast.walk(ast.parse(source))]
    documented = docstrings(nodes)
    for node, function in documented.items():
        text = node.value.strip()
        if BEGINNING.match(text):
            yield Fault("docstring", node.lineno, text.split("\n")[0])
        if function and text.startswith("Whether "):
            yield Fault("whether", node.lineno, text.split("\n")[0])
        if function and THIRD.match(text):
            yield Fault("imperative", node.lineno, text.split("\n")[0])
        yield from texts_of(TEXTS["word"], CODE.sub("", node.value), node.lineno)
    for text, line in literals(nodes, documented):
        if " " in text.strip():
            yield from texts_of(MESSAGES, text, line)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield from texts_of(TEXTS["word"], CODE.sub("", token.string), token.start[0])


def faults_of_c(source: str) -> Iterator[Fault]:
    """Find the faults of a C source: comments, messages."""
    for found in re.finditer(r"/\*.*?\*/|//[^\n]*|\"(?:[^\"\\\n]|\\.)*\"", source, re.S):
        rule = MESSAGES if found.group().startswith('"') else TEXTS["word"]
        text = re.sub(r"\n\s*\*", "\n", found.group())
        yield from texts_of(rule, text, source.count("\n", 0, found.start()) + 1)


def faults_of_prose(text: str) -> Iterator[Fault]:
    """Find the faults of a document; code in it is not read."""
    prose = CODE.sub(lambda found: "\n" * found.group().count("\n"), text)
    yield from texts_of(TEXTS["word"], prose, 1)


def faults_of(path: Path) -> list[Fault]:
    """Find the faults of one file."""
    read = {".py": faults_of_python, ".md": faults_of_prose}.get(path.suffix, faults_of_c)
    return sorted(read(path.read_text()), key=lambda one: (one.line, one.rule))


def files() -> Iterator[Path]:
    """Yield all files that the rules hold for."""
    for folder in SOURCES:
        for path in sorted((ROOT / folder).rglob("*")):
            # This file has examples of every fault.
            if path.suffix in {".py", ".c", ".h", ".md"} and path != Path(__file__).resolve():
                yield path
    yield from sorted(ROOT.glob("*.md"))
    yield from (path for path in sorted(ROOT.glob("docs/**/*.md")) if "_build" not in path.parts)


def listed(text: str) -> Counter[tuple[str, str]]:
    """Return the counts of a list by rule and file."""
    rows = (line.split() for line in text.splitlines())
    return Counter({(rule, name): int(count) for rule, name, count in rows})


def grown(now: Counter[tuple[str, str]], allowed: Counter[tuple[str, str]]) -> set[tuple[str, str]]:
    """Return the files and rules with more faults than allowed, if the rule's sum grew too."""
    sums = [Counter[str](), Counter[str]()]
    for total, counts in zip(sums, (now, allowed), strict=True):
        for (rule, _), count in counts.items():
            total[rule] += count
    return {key for key in now if now[key] > allowed[key] and sums[0][key[0]] > sums[1][key[0]]}


def test_no_rule_is_broken_more_often() -> None:
    found = {str(path.relative_to(ROOT)): faults_of(path) for path in files()}
    now = Counter((one.rule, name) for name, faults in found.items() for one in faults)
    wrong = grown(now, listed(LIST.read_text()))
    lines = [
        f"{name}:{one.line}: {one.rule}: {one.text}"
        for name, faults in found.items()
        for one in faults
        if (one.rule, name) in wrong
    ]
    assert not lines, "\n".join(lines)


def test_the_walk_sees_all_kinds_of_files() -> None:
    names = {str(path.relative_to(ROOT)) for path in files()}
    assert {"gadei_ps/errors.py", "native/ps_frame.c", "README.md", "docs/groups.md"} <= names
    assert {"tests/conftest.py", "tests/native/fences.c"} <= names
    assert {"native/ps_layout.h", "learners/client.py", "native/examples/README.md"} <= names


@pytest.mark.parametrize(
    ("source", "rules"),
    [
        ('"""Of the next life."""', ["docstring"]),
        ('class A:\n    x: int\n    """Until it ends (s)."""', ["docstring"]),
        ('def f():\n    """What it is."""', ["docstring"]),
        ('def f():\n    """As-is copy."""', []),
        ('def f():\n    """Whether it is."""', ["whether"]),
        ('def f():\n    """Sends it."""', ["imperative"]),
        ('def f():\n    """Process it."""', []),
        ('class A:\n    """Bytes of it."""', []),
        ('def f():\n    """Return whether it is."""', []),
        ('def f(self):\n    self.x = True\n    """Whether it is."""', []),
        ('@property\ndef f():\n    """Whether it is."""', []),
        ('class A:\n    x: bool\n    """Whether it is."""', []),
        ('say("the job went on")', ["word"]),
        ('raise E(f"{name} knows no batch")', ["word"]),
        ('say("the daemon ends")', ["word"]),
        ('run("systemctl daemon-reload")', []),
        ('counts["told"]', []),
        ('"""Number of bytes.\n\nIt tells the server."""', ["word"]),
        ("x = 1  # vouched for", ["word"]),
        ('raise E(f"{name!r} is no name")', ["none"]),
        ("# it is none, `it is none`", ["none"]),
        ("# there is no way, and it is no longer here; x is None", []),
        ('say(f"in {time} us")', ["number"]),
        ('say(f"{share} %")', ["number"]),
        ('"""Latency (us)."""', ["number"]),
        ('x = "%d %s" % (5 % 3)', []),
        ("# wait, should it fail", ["inverted"]),
        ("# also if it fails", ["even"]),
    ],
)
def test_faults_of_python_are_found(source: str, rules: list[str]) -> None:
    assert [one.rule for one in faults_of_python(source)] == rules


def test_faults_of_c_and_of_prose_are_found() -> None:
    message, fault = faults_of_c('x = "a daemon";\n/* one daemon\n * that is told */')
    assert message == Fault("word", 1, '"a daemon"')
    assert fault == Fault("word", 3, "/* one daemon that is told */")
    (fault,) = faults_of_prose("`told`\n```\ntold\n```\nIt took 5 us.\n")
    assert fault == Fault("number", 5, "It took 5 us.")


def test_growth_is_found_and_a_move_is_not() -> None:
    allowed = listed("word a.py 2\nword b.py 1\nnone b.py 1\n")
    assert grown(listed("word a.py 3\nword b.py 1\n"), allowed) == {("word", "a.py")}
    assert grown(listed("word c.py 3\nnone a.py 2"), allowed) == {("none", "a.py")}


def unlanded() -> list[str]:
    """Return the subjects of the commits of this branch that its upstream or `main` lacks."""
    for base in ("@{upstream}", "origin/main", "main"):
        log = ["git", "log", "--no-merges", "--format=%s", f"{base}..HEAD"]
        done = subprocess.run(log, cwd=ROOT, capture_output=True, text=True)
        if not done.returncode:
            return done.stdout.splitlines()
    return []


def too_long(subjects: list[str]) -> list[str]:
    """Return the subjects with too many characters."""
    return [one for one in subjects if len(one) > SUBJECT]


def test_commit_subjects_are_short() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    assert not too_long(unlanded())
    assert too_long(["x" * SUBJECT, "x" * (SUBJECT + 1)]) == ["x" * (SUBJECT + 1)]


def main(names: list[str]) -> None:
    """Print the faults of the named files, or rewrite the list."""
    for name in names:
        for one in faults_of(Path(name)):
            print(f"{name}:{one.line}: {one.rule}: {one.text}")
    if not names:
        counts = Counter((o.rule, str(p.relative_to(ROOT))) for p in files() for o in faults_of(p))
        LIST.write_text("".join(f"{r} {n} {c}\n" for (r, n), c in sorted(counts.items())))


if __name__ == "__main__":
    main(sys.argv[1:])
