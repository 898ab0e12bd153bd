"""Exchange between members of a group: parts, sums, formats and rules, by properties."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support import group_reference as reference

from gadei_ps.groups import compress, parts, reading
from gadei_ps.groups.compress import Feedback, Wire
from gadei_ps.groups.outer import Outer
from gadei_ps.groups.parts import Floats
from gadei_ps.groups.rules import Mix, Replace, Rule
from gadei_ps.memory.layout import CHUNK
from gadei_ps.simulate import groups_traffic as traffic
from gadei_ps.sync.parameters import SpecError

quick = settings(max_examples=40, deadline=None)
RULES = ("replace", "mix:0.5", "mix:0", "outer:0.7:0.9", "outer:0.7:0.9:3", "outer:1:0")
seeds = st.integers(0, 2**32 - 1)


def models(count: int, values: int) -> st.SearchStrategy[list[Floats]]:
    """Return models by a seed: normal values, and some that are 0 or equal in all models."""

    def made(seed: int) -> list[Floats]:
        chance = np.random.default_rng(seed)
        found = chance.normal(size=(count, values)).astype(np.float32) * np.float32(10)
        found[:, chance.random(values) < 0.1] = 1.25
        found[chance.random(found.shape) < 0.1] = 0
        return list(found)

    return seeds.map(made)


# -- parts ----------------------------------------------------------------------------------------


@quick
@given(st.integers(0, 5000), st.integers(1, 40))
def test_parts_cover_a_model_once_and_equally(values: int, members: int) -> None:
    found = parts.cut(values, members)
    assert len(found) == members and found[0].start == 0 and found[-1].stop == values
    assert all(one.stop == next_.start for one, next_ in itertools.pairwise(found))
    assert all(one.start % CHUNK == 0 for one in found if one.stop > one.start)
    sizes = [one.stop - one.start for one in found]
    assert max(sizes) - min(sizes) <= CHUNK


@quick
@given(st.lists(st.integers(0, 1000), min_size=1, max_size=9))
def test_shares_are_those_of_the_samples(samples: list[int]) -> None:
    found = parts.shares(samples)
    assert abs(float(found.sum(dtype=np.float64)) - 1) < 1e-6
    for count, share in zip(samples, found, strict=True):
        assert share == pytest.approx(count / sum(samples) if sum(samples) else 1 / len(samples))


@quick
@given(st.data(), st.integers(1, 5), st.integers(0, 200))
def test_the_sum_is_that_of_the_reference_and_of_its_parts(
    data: st.DataObject, members: int, values: int
) -> None:
    all_ = data.draw(models(members, values))
    weights = parts.shares(
        data.draw(st.lists(st.integers(0, 9), min_size=members, max_size=members))
    )
    whole = np.empty(values, np.float32)
    parts.aggregate(all_, weights, whole)
    assert whole.tobytes() == np.array(reference.aggregate(all_, weights), np.float32).tobytes()
    for part in parts.cut(values, members):
        piece = np.empty(part.stop - part.start, np.float32)
        parts.aggregate([model[part] for model in all_], weights, piece)
        assert piece.tobytes() == whole[part].tobytes()
    parts.aggregate(all_, weights, all_[0])  # in place
    assert all_[0].tobytes() == whole.tobytes()


@quick
@given(st.permutations(range(4)), st.data())
def test_the_order_of_members_does_not_change_who_counts_how_much(
    order: list[int], data: st.DataObject
) -> None:
    samples = [5, 0, 3, 2]
    all_ = data.draw(models(4, 70))
    sums = []
    for one in (range(4), order):
        out = np.empty(70, np.float32)
        parts.aggregate([all_[k] for k in one], parts.shares([samples[k] for k in one]), out)
        sums.append(out)
    np.testing.assert_allclose(*sums, atol=1e-4)


def test_a_long_model_is_summed_in_blocks() -> None:
    chance = np.random.default_rng(0)
    all_ = [chance.normal(size=2 * parts.BLOCK + 7).astype(np.float32) for _ in range(3)]
    weights = parts.shares([1, 2, 3])
    out = np.empty_like(all_[0])
    parts.aggregate(all_, weights, out)
    first, *rest = all_
    plain = first + (rest[0] - first) * weights[1] + (rest[1] - first) * weights[2]
    assert out.tobytes() == plain.tobytes()


@quick
@given(st.lists(st.integers(0, 2**40), min_size=1, max_size=8), st.integers(1, 3))
@example([5, 1, 1, 1, 1, 1], 3)
def test_what_is_equal_in_all_stays_as_it_is(samples: list[int], arrived: int) -> None:
    """However weights are rounded, and whatever the values are: a -0 is one, too."""
    most = np.finfo(np.float32).max
    values = np.array([most, -most, 1 / 3, -2.7e-40, 0, -0.0, np.pi], np.float32)
    out = np.empty_like(values)
    parts.aggregate([values] * len(samples), parts.shares(samples), out)
    assert out.tobytes() == values.tobytes()
    for text in RULES:
        found = run(reading.parse(text), values, [[values, *[values] * arrived]])
        assert found.tobytes() == values.tobytes(), text


# -- formats --------------------------------------------------------------------------------------


def _wild(seed: int) -> Floats:
    """Any numbers up to 1e38 by their bits, subnormal ones too; in some chunks small ones only."""
    chance = np.random.default_rng(seed)
    bits = chance.integers(0, 2**32, chance.integers(0, 200), dtype=np.uint32)
    bits[64:128] &= np.uint32(chance.choice([0xFFFFFFFF, 0x80FFFFFF, 0x8000000F, 0]))
    values = bits.view(np.float32)
    values[~(np.abs(values) <= 1e38)] = 0
    return values


long_enough = seeds.map(_wild)


def sent(values: Floats, wire: Wire) -> Floats:
    data = np.empty(compress.size(len(values), wire), np.uint8)
    compress.encode(values, wire, data)
    out = np.empty_like(values)
    compress.decode(data, wire, out)
    return out


@quick
@given(long_enough)
def test_bfloat16_is_the_nearest(values: Floats) -> None:
    data = np.empty(2 * len(values), np.uint8)
    compress.encode(values, Wire.BFLOAT16, data)
    assert data.view(np.uint16).tolist() == [reference.to_bfloat16(float(one)) for one in values]
    out = sent(values, Wire.BFLOAT16)
    assert (np.abs(out.astype(float) - values) <= np.abs(values) / 256 + 1e-38).all()
    assert sent(values, Wire.FLOAT32).tobytes() == values.tobytes()


def test_bfloat16_keeps_what_is_not_finite() -> None:
    odd = np.array([np.nan, np.inf, -np.inf, -0.0], np.float32)
    odd[:1].view(np.uint32)[:] = 0x7FFFFFFF  # rounding up would make it a negative number
    out = sent(odd, Wire.BFLOAT16)
    assert np.isnan(out[0]) and out[1:].tobytes() == odd[1:].tobytes()


@quick
@given(long_enough)
def test_eight_bits_are_within_half_a_step(values: Floats) -> None:
    data = np.empty(compress.size(len(values), Wire.INT8), np.uint8)
    compress.encode(values, Wire.INT8, data)
    scales, steps = reference.int8(values)
    cut = 4 * len(scales)
    assert data[:cut].view(np.float32).tolist() == scales
    assert data[cut:].view(np.int8).tolist() == steps
    out = sent(values, Wire.INT8)
    for begin in range(0, len(values), CHUNK):
        here = slice(begin, begin + CHUNK)
        bound = np.abs(values[here]).max() / 254 * (1 + 1e-4) + 1e-42
        assert (np.abs(out[here].astype(float) - values[here]) <= bound).all()


def test_eight_bits_refuse_what_is_not_finite() -> None:
    for odd in (np.nan, np.inf):
        with pytest.raises(ValueError, match="not finite"):
            sent(np.array([1, odd], np.float32), Wire.INT8)
    with pytest.raises(ValueError, match="take 8 bytes"):
        compress.decode(np.empty(7, np.uint8), Wire.FLOAT32, np.empty(2, np.float32))


@pytest.mark.parametrize("wire", [Wire.BFLOAT16, Wire.INT8])
def test_error_feedback_outlives_the_greatest_values(wire: Wire) -> None:
    """None of them becomes an infinity, which would stay in what is left out for ever."""
    feedback, data = Feedback(100, wire), np.empty(compress.size(100, wire), np.uint8)
    for value in (*[np.finfo(np.float32).max] * 2, *[1.0] * 10):
        received = feedback.encode(np.full(100, value, np.float32), data)
        assert np.isfinite(received).all() and np.isfinite(feedback.residual).all()
    np.testing.assert_allclose(received, 1, rtol=1e-6)


@quick
@given(st.sampled_from(list(Wire)), models(6, 70))
def test_error_feedback_leaves_one_rounding_in_all(wire: Wire, rounds: list[Floats]) -> None:
    sender = Feedback(70, wire)
    data = np.empty(compress.size(70, wire), np.uint8)
    received = np.zeros(70)
    greatest = 0.0
    for values in rounds:
        greatest = max(greatest, float(np.abs(sender.residual + values).max()))
        got = sender.encode(values, data)
        again = np.empty_like(got)
        compress.decode(data, wire, again)
        assert again.tobytes() == got.tobytes()
        received += got
    wanted = np.sum(rounds, axis=0, dtype=float)
    np.testing.assert_allclose(received + sender.residual, wanted, atol=1e-3)
    assert np.abs(sender.residual).max() <= greatest / 250 + 1e-6
    if wire is Wire.FLOAT32:
        assert not sender.residual.any()


# -- rules ----------------------------------------------------------------------------------------


def run(rule: Rule, weights: Floats, rounds: Sequence[Sequence[Floats]]) -> Floats:
    rule.begin(weights)
    own = weights.copy()
    for aggregate, *arrived in rounds:
        own = aggregate.copy()
        rule.end_round(own, arrived)
    return own


@pytest.mark.parametrize("text", RULES)
@quick
@given(all_=models(7, 150))
def test_parts_and_the_whole_have_the_same_bits(text: str, all_: list[Floats]) -> None:
    values, members = 150, 3
    weights, *all_ = all_
    rounds = [all_[:3], all_[3:4], all_[4:]]
    arrived = [one.copy() for one in all_]
    whole = run(reading.parse(text), weights, rounds)
    for part in parts.cut(values, members):
        piece = run(reading.parse(text), weights[part], [[m[part] for m in one] for one in rounds])
        assert piece.tobytes() == whole[part].tobytes()
    assert all(a.tobytes() == b.tobytes() for a, b in zip(all_, arrived, strict=True))


@quick
@given(models(3, 5))
def test_replace_takes_the_newest_or_keeps_its_own(all_: list[Floats]) -> None:
    own, older, newer = all_
    assert run(Replace(), own, [[own, older, newer]]).tobytes() == newer.tobytes()
    assert run(Replace(), own, [[own]]).tobytes() == own.tobytes()


@quick
@given(st.floats(0, 1), models(4, 66))
def test_mixing_among_all_keeps_the_mean(weight: float, all_: list[Floats]) -> None:
    mixed = []
    for place, own in enumerate(all_):
        others = [one for k, one in enumerate(all_) if k != place]
        mixed.append(run(Mix(weight), own, [[own, *others]]))
        wanted = np.array(reference.mix(own, others, weight), np.float32)
        assert mixed[-1].tobytes() == wanted.tobytes()
    np.testing.assert_allclose(np.mean(mixed, 0), np.mean(all_, 0), atol=1e-4)


def test_a_model_that_does_not_count_changes_no_bit() -> None:
    """However great its values are beside those of the one that counts."""
    most = np.finfo(np.float32).max
    own = np.array([1e8, most, -0.0, 1e-45, 3], np.float32)
    other = np.array([1, -most, 5, 1e8, -0.0], np.float32)
    for weight, wanted in ((0, own), (1, other)):
        assert run(Mix(weight), own, [[own, other]]).tobytes() == wanted.tobytes()


@quick
@given(models(8, 66), st.sampled_from([0, 1, 3]))
def test_an_outer_step_of_one_without_momentum_is_the_mean(all_: list[Floats], delay: int) -> None:
    """The mean of the members' models; and among all groups, the mean of what they have trained."""
    weights, trained = all_[:4], all_[4:]
    found = run(Outer(1, 0, delay), weights[0], [trained[:1]])
    np.testing.assert_allclose(found, trained[0], atol=1e-4)
    ends = []
    for place, own in enumerate(trained):
        others = [one for k, one in enumerate(weights) if k != place]
        ends.append(run(Outer(1, 0, delay), weights[place], [[own, *others]]))
    np.testing.assert_allclose(np.mean(ends, 0), np.mean(trained, 0), atol=1e-4)


@quick
@given(st.sampled_from([0, 1, 3, 7]), st.floats(0, 1), st.floats(0, 0.99), models(8, 3))
def test_outer_steps_are_those_of_the_reference(
    delay: int, rate: float, momentum: float, all_: list[Floats]
) -> None:
    weights, *rest = all_
    rounds = [rest[:1], rest[1:3], rest[3:6], rest[6:]]
    plain = reference.Outer(weights, rate, momentum, delay)
    wanted = [plain.end_round(aggregate, arrived) for aggregate, *arrived in rounds][-1]
    np.testing.assert_allclose(run(Outer(rate, momentum, delay), weights, rounds), wanted, atol=0.1)


def test_outer_is_nesterov_of_torch() -> None:
    """torch.optim.SGD with nesterov=True, by its formulas: importing torch takes too long here."""
    chance = np.random.default_rng(1)
    start = chance.normal(size=10).astype(np.float32)
    weights, speed = start.astype(float), np.zeros(10)
    rule = Outer(0.7, 0.9)
    rule.begin(start)
    for _ in range(5):
        own = chance.normal(size=10).astype(np.float32)
        gradient = weights - own
        speed = 0.9 * speed + gradient
        weights = weights - 0.7 * (gradient + 0.9 * speed)
        rule.end_round(own, [])
        np.testing.assert_allclose(own, weights, atol=1e-5)


def test_late_differences_move_the_momentum_only_every_so_often() -> None:
    rule = Outer(0.5, 0.9, delay=3)
    rule.begin(np.zeros(1, np.float32))
    own = np.array([-1], np.float32)
    rule.end_round(own, [])
    assert own == [-0.5] and not rule.momentum_values.any() and rule.differences == 1
    rule.end_round(own := np.array([-1.5], np.float32), [np.array([0.5], np.float32)])
    # Differences 1, then 1 and -1: their mean is 1/3.
    assert rule.momentum_values == pytest.approx(1 / 3) and rule.differences == 0
    assert own == pytest.approx(-0.5 - 0.5 * (1 + 0.9 / 3) + 1 / 2)


def test_late_differences_are_not_in_the_momentum() -> None:
    rule = Outer(0.5, 0.9)
    rule.begin(np.zeros(1, np.float32))
    rule.end_round(np.zeros(1, np.float32), [np.ones(1, np.float32)])
    assert rule.common == [0.5] and not rule.momentum_values.any()


@pytest.mark.parametrize("text", RULES)
def test_a_rule_continues_from_its_state(text: str) -> None:
    chance = np.random.default_rng(2)
    all_ = [chance.normal(size=9).astype(np.float32) for _ in range(6)]
    rule, other = reading.parse(text), reading.parse(text)
    run(rule, all_[0], [all_[1:3], all_[3:4]])
    kept, counts = rule.state()
    kept = {name: values.copy() for name, values in kept.items()}
    assert all(len(values) == 9 for values in kept.values())
    other.restore(kept, counts)
    ends = [all_[4].copy(), all_[4].copy()]
    rule.end_round(ends[0], all_[5:])
    other.end_round(ends[1], all_[5:])
    assert ends[0].tobytes() == ends[1].tobytes()
    with pytest.raises(ValueError, match="another rule"):
        rule.restore({"w": all_[0]}, {})


def test_rules_are_read_from_text() -> None:
    for text in RULES:
        rule = reading.parse(text)
        assert str(reading.parse(str(rule))) == str(rule)
    rule = reading.parse("outer:rate=0.5,delay=4")
    assert isinstance(rule, Outer)
    assert (rule.rate, rule.momentum, rule.delay) == (0.5, 0.9, 4)
    # A value without its key, after one that has it, keeps its place.
    assert str(reading.parse("outer:rate=1:0.125")) == "outer:1:0.125"
    assert str(reading.parse("outer:1:0")) == "outer:1:0"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("swap", "unknown rule 'swap'; write one of replace, mix:0.5, outer:0.7:0.9"),
        ("mix", "mix: weight is missing; allowed: mix:0.5 or mix:weight=0.5"),
        ("mix:2", "mix: weight must be a number from 0 to 1, not '2'"),
        ("mix:nan", "mix: weight must be a number from 0 to 1, not 'nan'"),
        ("replace:1", "replace: cannot read '1'; allowed: replace"),
        ("outer:0.7:", "outer: cannot read ''"),
        ("outer:rate=1,rate=1", "outer: rate is given twice"),
        ("outer:speed=1", "outer: unknown parameter 'speed'"),
        ("outer:9", "outer: rate must be a number from 0 to 2, not '9'"),
        ("outer:1:0:x", "outer: delay must be a whole number"),
    ],
)
def test_what_is_no_rule_is_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(SpecError) as raised:
        reading.parse(text)
    assert message in str(raised.value) and "\n" not in str(raised.value)


# -- traffic --------------------------------------------------------------------------------------


@quick
@given(st.integers(2, 20), st.integers(1, 400), st.sampled_from(list(Wire)))
def test_an_aggregation_sends_what_the_paper_says(members: int, chunks: int, wire: Wire) -> None:
    values = chunks * CHUNK
    sent_ = traffic.aggregation(values, members, wire)
    model = compress.size(values, wire)
    # All parts go m - 1 times, and then m - 1 times the sums.
    assert sum(sent_) == 2 * (members - 1) * model
    if chunks % members == 0:
        assert set(sent_) == {2 * (members - 1) * model // members}
    assert traffic.broadcast(values, members, members, wire, whole=True) == [model] * members
    assert sum(traffic.broadcast(values, members, 3, wire, whole=True)) == 3 * model
    assert sum(traffic.broadcast(values, members, 3, wire, whole=False)) == model


def test_a_member_alone_sends_nothing() -> None:
    assert traffic.aggregation(1000, 1) == [0]
