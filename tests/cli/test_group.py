"""`gadei-ps group simulate`: what it shows, its JSON, and what it refuses."""

from __future__ import annotations

import pytest
from shell import Cli

SMALL = ("--groups", "2", "--rounds", "3", "--k", "2")


def test_tables(cli: Cli) -> None:
    result = cli("group", "simulate", "replace", "outer:0.7:0.5", *SMALL, "--latency", "0s")
    assert "4 in 2 groups, neighbours: ring" in result.out
    assert "outer:0.7:0.5" in result.out and "2(m-1)/m" in result.out


def test_json(cli: Cli) -> None:
    words = ("group", "simulate", "mix:0.5", *SMALL, "--train", "convex", "--k", "1epoch")
    report = cli(*words, "--wire", "int8", "--json").json
    assert (report["machines"], report["k"], report["rules"][0]["rounds"]) == (4, 32, 6)
    assert report["rules"][0]["training"]["accuracy"] > 0.5 and report["rules"][0]["curve"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["swap"], "unknown rule 'swap'; write one of replace, mix:0.5, outer:0.7:0.9"),
        (["mix:2"], "mix: weight must be a number from 0 to 1, not '2'"),
        (["replace", "--groups", "9", "--machines", "4"], "4 replicas cannot be divided into 9"),
        (["replace", "--wire", "int4"], "--wire 'int4': write one of float32, bfloat16, int8"),
        (["replace", "--broadcast", "half"], "--broadcast 'half': write whole or parts"),
        (["replace", "--groups", "0"], "--groups 0: use 1 or more"),
        (["replace", "--bandwidth", "1Gbit"], "bytes a second like 125MB, which are 1 Gbit/s"),
        (["replace", "--latency", "soon"], "--latency: duration 'soon': write it like 500ms"),
        (["replace", "--lr", "1"], "--lr needs --train"),
        (["replace", "--k", "1epoch"], "give --samples of the training set, or --train"),
        (["replace", "--train", "convex", "--machines", "9999"], "cannot be divided among"),
    ],
)
def test_mistakes_are_told_in_one_line(cli: Cli, words: list[str], message: str) -> None:
    result = cli("group", "simulate", *words)
    assert result.code == 2 and message in result.error
