"""The default classifier of `train`: features, networks, calibration, report, model directory."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

from gadei_ps.classifier import calibration, ensemble, features
from gadei_ps.classifier import gradients as closed_form
from gadei_ps.classifier.calibration import Calibration
from gadei_ps.classifier.corpus import Corpus
from gadei_ps.classifier.dataset import (
    NO_LABEL,
    UNSEEN_LABEL,
    DatasetError,
    Table,
    read_test,
    read_training,
    split_labels,
)
from gadei_ps.classifier.features import Features, Rows, hashed
from gadei_ps.classifier.gradients import (
    Gradient,
    Product,
    first_weights,
    frequencies,
    gradients,
)
from gadei_ps.classifier.hold_out import findings, split
from gadei_ps.classifier.inference import EnsembleClassifier, EnsembleSizes
from gadei_ps.classifier.model_directory import (
    CONFIG,
    FEATURES,
    ModelDirectoryError,
    load_result,
    save_result,
)
from gadei_ps.classifier.predict import Prediction, compare
from gadei_ps.classifier.report import Confusion, lines
from gadei_ps.classifier.training_plan import Plan
from gadei_ps.classifier.training_settings import Settings
from gadei_ps.classifier.words import MAX_CHARACTERS
from gadei_ps.errors import UsageError
from gadei_ps.learners.gradients import Rows as GradientRows

TEXTS = ("The cat's mat.", "the CAT sat", "a dog, a dog", "", "\u65e5\u672c x", "it\u2019s the cat")


def words_of(text: str) -> list[str]:
    """Return the words of these texts, found in another way."""
    spaced = text.lower().replace("\u2019", "'")
    for mark in ".,\u65e5\u672c":
        spaced = spaced.replace(mark, f" {mark} ")
    return spaced.replace("'", " '").split()


def grams_of(text: str) -> tuple[Counter[tuple[str, ...]], Counter[str]]:
    words = words_of(text)
    of_words = Counter(
        tuple(words[at : at + n]) for n in (1, 2) for at in range(len(words) - n + 1)
    )
    padded = [f" {word} " for word in text.lower().replace("\u2019", "'").split()]
    characters = Counter(
        one[at : at + n] for one in padded for n in (2, 3, 4, 5) for at in range(len(one) - n + 1)
    )
    return of_words, characters


def test_values_are_tf_idf_of_two_blocks() -> None:
    texts = hashed(TEXTS)
    known = Features.learn(texts, 10)
    rows = known.rows(texts)
    every = [grams_of(text) for text in TEXTS]
    for at in range(len(TEXTS)):
        expected: list[float] = []
        for block, least in ((0, 1), (1, 2)):
            frequency = Counter(gram for one in every for gram in one[block])
            values = [
                (1 + math.log(count)) * (math.log((1 + len(TEXTS)) / (1 + frequency[gram])) + 1)
                for gram, count in every[at][block].items()
                if frequency[gram] >= least
            ]
            expected += [value / math.hypot(*values) for value in values]
        found = rows.values[rows.starts[at] : rows.starts[at + 1]]
        np.testing.assert_allclose(np.sort(found), np.sort(expected), rtol=1e-5)


def test_words_keep_their_order_and_unknown_ones_are_1() -> None:
    known = Features.learn(hashed(TEXTS[:2]), 10)
    rows = known.rows(hashed(["the cat dog", "CAT", ""]))
    tokens, starts = rows.packed(np.array([1, 2, 0]), 2)
    assert starts.tolist() == [0, 3, 5, 10]
    assert tokens[5] > 1
    assert tokens[0] == tokens[6] > 1
    assert tokens[7] == 1
    assert not tokens[[1, 2, 3, 4, 8, 9]].any()


def test_hashes_do_not_depend_on_the_other_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    together = hashed(TEXTS)
    monkeypatch.setattr(features, "CHUNK", 2)
    for one, other in zip(vars(hashed(TEXTS)).values(), vars(together).values(), strict=True):
        np.testing.assert_array_equal(one, other)
    alone = hashed(TEXTS[1:2])
    part = slice(*together.starts[1:3])
    np.testing.assert_array_equal(together.grams[part], alone.grams)
    assert len(hashed([])) == 0
    hashed(["\ud800 lone surrogate"])


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "MOST_CHARACTERS", 1000)
    texts = hashed(["word " * 1000, "short"], features.characters_of(2))
    assert texts.cut == 1
    assert len(texts.words) <= 1000 / 5 / 2 + 1
    monkeypatch.setattr(features, "MOST_WEIGHTS", 60)
    known = Features.learn(hashed(TEXTS), 10)
    assert len(known.grams) == 6, "the most frequent ones"
    assert known.rows(hashed(["the cat"])).starts[-1] >= 2


def sizes() -> tuple[Features, Rows, EnsembleSizes]:
    texts = hashed(TEXTS)
    known = Features.learn(texts, 10)
    return known, known.rows(texts), EnsembleSizes(len(known.grams), known.vocabulary_size, 3)


def moved(model: ensemble.Ensemble) -> ensemble.Ensemble:
    """The same with all weights at random."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)
        model.cnn.embedding[0] = 0
    return model


def in_numpy(model: ensemble.Ensemble) -> EnsembleClassifier:
    tensors = {name: one.numpy() for name, one in model.state_dict().items()}
    return EnsembleClassifier(model.sizes, tensors)


def test_networks_without_torch_are_the_same(tmp_path: Path) -> None:
    known, rows, of = sizes()
    model = moved(ensemble.Ensemble(of)).eval()
    parts = torch.stack(model(rows, np.arange(len(rows))))
    expected = parts.log_softmax(dim=2).detach().numpy()
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == of.shapes
    calibrated = Calibration((0.5, 0.25, 1.0), 0.4)
    save_result(tmp_path / "m", in_numpy(model), known, "abc", {}, {}, calibrated)
    result = load_result(tmp_path / "m")
    assert isinstance(result.model, EnsembleClassifier)
    np.testing.assert_allclose(result.model.parts(rows), expected, atol=1e-5)
    probabilities, words = result.probabilities(TEXTS)
    mixed = np.tensordot([0.5, 0.25, 1.0], expected, axes=1)
    np.testing.assert_allclose(probabilities, calibration.softmax(mixed), atol=1e-5)
    assert words.tolist() == [len(words_of(text)) for text in TEXTS]
    (tmp_path / "m" / FEATURES).write_bytes(b"")
    with pytest.raises(ModelDirectoryError, match=r"features.safetensors: missing or damaged"):
        load_result(tmp_path / "m")


def test_packed_sentences_have_the_logits_and_gradients_of_padded_ones() -> None:
    _, rows, of = sizes()
    model = moved(ensemble.Ensemble(of)).cnn.eval()
    some = np.array([3, 0, 4, 2])  # the first has no word, the last one a word pair twice
    tokens, starts = rows.packed(some, model.widest - 1)
    of_tokens = torch.from_numpy(np.repeat(np.arange(4), np.diff(starts)))
    found = model.packed(torch.from_numpy(tokens), of_tokens, 4)
    padded = np.zeros((4, np.diff(starts).max()), np.int32)
    for to, begin, end in zip(padded, starts[:-1], starts[1:], strict=True):
        to[: end - begin] = tokens[begin:end]
    expected = model(torch.from_numpy(padded))
    torch.testing.assert_close(found, expected)
    gradients = [
        torch.autograd.grad(logits.square().sum(), list(model.parameters()))
        for logits in (found, expected)
    ]
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours.to_dense(), theirs.to_dense())


def test_a_calibration_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    known, _, of = sizes()
    model = in_numpy(ensemble.Ensemble(of))
    save_result(tmp_path / "m", model, known, "abc", {}, {}, Calibration())
    with pytest.raises(ModelDirectoryError, match="shares"):
        load_result(tmp_path / "m")


def test_predict_uses_as_much_of_each_text_as_training_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that the number of texts in a call does not change what is used of each."""
    monkeypatch.setattr(features, "MOST_CHARACTERS", 20_000)
    file = tmp_path / "rows.csv"
    rows = "".join(f"{at} {'word ' * 40} end {at % 7},{at % 2}\n" for at in range(100))
    file.write_text("text,label\n" + rows)
    plan = Plan.read(Settings(file))
    second = plan.second()
    assert second is not None
    for one in (plan, second):
        texts = plan.corpus.held_out.texts
        encoded = plan.corpus.held_out_encoded
        if one is second:
            texts, encoded = second.corpus.train.texts, second.corpus.encoded
        assert isinstance(encoded, Rows)
        known = one.corpus.vocabulary
        assert isinstance(known, Features)
        assert isinstance(one.sizes, EnsembleSizes)
        model = in_numpy(moved(ensemble.Ensemble(one.sizes)))
        directory = tmp_path / f"model-{one is second}"
        save_result(directory, model, known, "01", {}, {}, Calibration((1.0, 1.0, 1.0)))
        expected = calibration.softmax(model.parts(encoded).sum(axis=0))
        found, _ = load_result(directory).probabilities(texts)
        np.testing.assert_allclose(found, expected, atol=2e-3)  # values for learners are float16
    assert load_config(directory)["characters"] == 200


def load_config(directory: Path, **changes: Any) -> dict[str, Any]:
    """Return config.json after changes of it; None removes a key."""
    found = json.loads((directory / CONFIG).read_text()) | changes
    found = {key: value for key, value in found.items() if value is not None}
    (directory / CONFIG).write_text(json.dumps(found))
    return found


def test_models_without_the_number_of_characters_are_read(tmp_path: Path) -> None:
    known, _, of = sizes()
    model = in_numpy(ensemble.Ensemble(of))
    save_result(tmp_path / "m", model, known, "abc", {}, {}, Calibration((1.0, 1.0, 1.0)))
    load_config(tmp_path / "m", characters=None)
    found = load_result(tmp_path / "m").vocabulary
    assert isinstance(found, Features)
    assert found.characters == MAX_CHARACTERS
    load_config(tmp_path / "m", characters=0)
    with pytest.raises(ModelDirectoryError, match=r"config.json: .*characters must be above 0"):
        load_result(tmp_path / "m")


def test_the_reported_loss_is_that_of_the_prediction() -> None:
    """Check that the losses of learners and of held-out rows can be compared."""
    logits = torch.tensor([[[2.0, 0.0, 0.0]], [[0.0, 0.0, 2.0]], [[0.0, 2.0, 0.0]]])
    losses = ensemble.losses(tuple(logits), torch.tensor([1]))  # type: ignore[arg-type]
    assert losses.reported.item() == pytest.approx(math.log(3)), "the parts have equal shares"
    hinge = 2**2 + 1 + 1  # of logits 2, 0, 0, of which the second should be the largest
    expected = hinge + 2 * math.log(2 + math.e**2) - 2
    assert losses.minimized.item() == pytest.approx(expected)
    equal = tuple(logits[:1].expand(3, 1, 3))
    prediction = Calibration((calibration.PRIOR / 3,) * 3).probabilities(torch.stack(equal).numpy())
    found = ensemble.losses(equal, torch.tensor([0])).reported  # type: ignore[arg-type]
    assert found.item() == pytest.approx(-math.log(prediction[0, 0]))
    truth = torch.tensor([[1.0, 0.0, 0.0]])
    several = ensemble.multi_label_losses(equal, truth)  # type: ignore[arg-type]
    _, loss = calibration.multi_label_scores(
        Calibration((calibration.PRIOR / 3,) * 3, multi_label=True).probabilities(
            torch.stack(equal).numpy()
        ),
        truth.numpy(),
        0.5,
    )
    assert several.reported.item() == pytest.approx(loss, rel=1e-5)


def whole(gradient: Gradient, shape: tuple[int, ...]) -> np.ndarray:
    """Return a gradient as the server adds it up."""
    if isinstance(gradient, Product):
        return gradient.factors.T @ gradient.vectors
    if isinstance(gradient, np.ndarray):
        return gradient
    found = np.zeros(shape, np.float32)
    np.add.at(found, gradient.indices, gradient.values)
    return found


@pytest.mark.parametrize("slice_size", [16, 2])
@pytest.mark.parametrize("multi_label", [False, True])
def test_gradients_are_those_of_autograd(
    multi_label: bool, slice_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare a wave of mini-batches of 4 and 3 rows, one text twice and one without words."""
    monkeypatch.setattr(closed_form, "SLICE", slice_size)
    _, rows, of = sizes()
    batch, labels = np.array([1, 2, 1, 3, 0, 4, 5]), np.array([0, 2, 1, 1, 0, 2, 2])
    truth = np.eye(3, dtype=np.float32)[labels]
    if multi_label:
        truth[2] = [1, 0, 1]
    model = moved(ensemble.Ensemble(of)).eval()
    frequency = frequencies(rows, of.features)
    reported = []
    for part in (slice(0, 4), slice(4, 7)):
        parts = model(rows, batch[part])
        if multi_label:
            losses = ensemble.multi_label_losses(parts, torch.from_numpy(truth[part]))
            minimized = losses.minimized
        else:
            losses = ensemble.losses(parts, torch.from_numpy(labels[part]))
            minimized = losses.minimized + model.penalty(rows, batch[part], frequency)
        minimized.backward()  # type: ignore[no-untyped-call]
        reported.append(losses.reported.item())
    loss, found = gradients(
        in_numpy(model),
        rows,
        batch,
        truth,
        4,
        multi_label=multi_label,
        frequency=None if multi_label else frequency,
    )
    assert loss == pytest.approx(np.mean(reported), rel=1e-5)
    assert found.keys() == of.shapes.keys()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        expected = parameter.grad.to_dense().numpy()
        ours = whole(found[name], of.shapes[name])
        np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-6, err_msg=name)


def test_all_texts_pay_once_for_each_weight() -> None:
    """Check that an epoch of mini-batches draws `wide` to zero as a linear SVM of C = 1 does."""
    _, rows, of = sizes()
    model = in_numpy(moved(ensemble.Ensemble(of)))
    every, truth = np.arange(len(rows)), np.eye(3, dtype=np.float32)[[0, 1, 2, 0, 1, 2]]
    frequency = frequencies(rows, of.features)
    assert frequency.tolist() == np.bincount(rows.features, minlength=of.features).tolist()
    with_it, without = (
        whole(gradients(model, rows, every, truth, 2, frequency=one)[1]["wide"], of.shapes["wide"])
        for one in (frequency, None)
    )
    # The SVM minimizes the sum of the losses and half of the squared weights, whose margin is 1.
    expected = model.tensors["wide"] / closed_form.MARGIN**2
    batch_size = 2
    np.testing.assert_allclose((with_it - without) * batch_size, expected, rtol=1e-3, atol=1e-5)


def test_a_batch_has_gradients_of_its_own_rows_alone() -> None:
    _, rows, of = sizes()
    batch = np.array([1, 2, 1])
    model = in_numpy(moved(ensemble.Ensemble(of)))
    _, found = gradients(model, rows, batch, np.eye(3, dtype=np.float32), 16)
    for name in ("wide", "bag"):
        gradient = found[name]
        assert isinstance(gradient, GradientRows)
        assert set(gradient.indices) == set(rows.bag(batch)[0])
        assert len(gradient.indices) == len(set(gradient.indices))


def test_gradients_with_dropout_are_the_derivatives_of_the_loss() -> None:
    _, rows, of = sizes()
    batch, labels = np.arange(6), np.array([0, 1, 2, 0, 1, 2])
    truth = np.eye(3, dtype=np.float32)[labels]
    model = in_numpy(moved(ensemble.Ensemble(of)))
    _, found = gradients(model, rows, batch, truth, 6, rng=np.random.default_rng(1))
    _, others = gradients(model, rows, batch, truth, 6)
    exact = {name: one.astype(np.float64) for name, one in model.tensors.items()}

    def minimized(name: str, step: np.ndarray) -> float:
        changed: Any = exact | {name: exact[name] + step}
        forward = EnsembleClassifier(of, changed).forward(rows, batch, np.random.default_rng(1))
        parts: Any = torch.from_numpy(forward.logits)
        return ensemble.losses(tuple(parts), torch.from_numpy(labels)).minimized.item()

    for name, shape in of.shapes.items():
        gradient = whole(found[name], shape)
        if name not in ("wide", "wide_bias", "output_bias", "cnn.output_bias"):
            assert not np.allclose(gradient, whole(others[name], shape)), "there is dropout"
        step = np.random.default_rng(2).normal(size=shape) * 1e-6
        if name == "cnn.embedding":
            step[0] = 0
        change = minimized(name, step) - minimized(name, -step)
        assert change == pytest.approx(2 * (gradient * step).sum(), rel=1e-3), name


def test_the_first_weights_depend_on_the_seed_alone() -> None:
    of = EnsembleSizes(1000, 500, 3)
    first = first_weights(of, 1)
    assert {name: one.shape for name, one in first.items()} == of.shapes
    for name, again in first_weights(of, 1).items():
        np.testing.assert_array_equal(first[name], again)
    assert not np.array_equal(first["bag"], first_weights(of, 2)["bag"])
    np.testing.assert_allclose(first["wide_bias"], 2 * (1 / 3 - 2 / 3), err_msg="of 3 labels")
    for name in ("wide", "bag_bias", "cnn.filter_bias"):
        assert not first[name].any()
    assert not first["cnn.embedding"][0].any()
    bounds = {"bag": 1 / 64, "output_weight": 1 / 8, "cnn.embedding": 0.05}
    for name, bound in bounds.items():
        assert np.abs(first[name]).max() == pytest.approx(bound, rel=0.02)
    assert np.abs(first["cnn.filters"][:64]).max() == pytest.approx(1 / 16, rel=0.02)  # of width 4
    assert np.abs(first["cnn.filters"][128:192]).max() == pytest.approx(128**-0.5, rel=0.02)


def test_shares_and_temperature_are_found() -> None:
    """Combine parts of which one is right and too sure, and one is noise."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(4000, 5)) * 1.5
    labels = np.array([rng.choice(5, p=p) for p in calibration.softmax(logits)])
    parts = calibration.log_softmax(np.stack([3 * logits, rng.normal(size=(4000, 5))]))
    found = calibration.fit(parts.astype(np.float32), labels)
    assert found.shares[0] == pytest.approx(1 / 3, rel=0.1)
    assert found.shares[1] < 0.1
    probabilities = found.probabilities(parts.astype(np.float32))
    assert calibration.calibration_error(probabilities, labels) < 0.04
    assert (probabilities.max(axis=1) < found.threshold).mean() == pytest.approx(0.05, abs=0.001)


def test_easy_texts_do_not_set_a_threshold_near_1() -> None:
    labels = np.arange(60) % 3
    parts = np.full((1, 60, 3), -9, np.float32)
    parts[0, np.arange(60), labels] = 0
    found = calibration.fit(parts, labels)
    assert found.probabilities(parts).max(axis=1).min() > 0.99
    assert found.threshold == pytest.approx(2 / 3)


def test_a_perfect_part_does_not_break_the_fit() -> None:
    labels = np.arange(6) % 3
    parts = np.full((1, 6, 3), -40, np.float32)
    parts[0, np.arange(6), labels] = 0
    found = calibration.fit(parts, labels)
    assert 0 < found.shares[0] < 10


def test_a_fit_of_values_that_are_not_finite_ends() -> None:
    parts = np.full((2, 6, 3), -1, np.float32)
    parts[0, 3] = np.nan
    assert len(calibration.fit(parts, np.arange(6) % 3).shares) == 2


def test_shares_and_threshold_of_texts_with_several_labels() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(3000, 4)) * 2 - 1
    truth = (rng.random(logits.shape) < calibration.sigmoid(logits)).astype(np.float32)
    parts = np.stack([2 * logits, rng.normal(size=logits.shape)]).astype(np.float32)
    found = calibration.fit_multi_label(parts, truth)
    assert found.multi_label
    assert found.shares[0] == pytest.approx(1 / 2, rel=0.1)
    assert found.shares[1] < 0.1
    assert 0.3 <= found.threshold <= 0.5
    assert Calibration.from_dict(found.as_dict(), 2) == found
    sure = np.where(truth, 9, -9)[None].repeat(2, axis=0).astype(np.float32)
    assert calibration.fit_multi_label(sure, truth).threshold == 0.5
    probabilities = found.probabilities(parts)
    assert calibration.multi_label_scores(truth, truth, 0.5) == (1.0, pytest.approx(0, abs=1e-5))
    assert 0.2 < calibration.multi_label_scores(probabilities, truth, found.threshold)[0] < 0.6
    assert calibration.micro_f1(truth > 0, truth) == 1


def test_labels_of_rows_are_split(tmp_path: Path) -> None:
    assert split_labels("a; b;;a", ";") == ["a", "b"]
    assert split_labels('["a;b", 1]', ";") == ["a;b", "1"]
    assert split_labels("a;b", None) == ["a;b"]
    file = tmp_path / "rows.csv"
    file.write_text("text,label\n" + "".join(f"t{at} x,a;{'bc'[at % 2]}\n" for at in range(20)))
    whole = read_training(file, separator=";")
    assert whole.label_names == ("a", "b", "c")
    assert whole.sets is not None
    assert whole.sets.matrix(np.array([1, 0]), 3).tolist() == [[1, 0, 1], [1, 1, 0]]
    some = whole.sets.only(np.arange(20) % 2 == 1)
    assert some.matrix(np.arange(10), 3).tolist() == [[1, 0, 1]] * 10
    test = tmp_path / "test.csv"
    test.write_text("text,label\nt,b;new\nt,new\n")
    unseen = read_test(test, whole.label_names, separator=";")
    assert unseen.sets is not None
    assert unseen.sets.matrix(np.arange(2), 3).tolist() == [[0, 1, 0], [0, 0, 0]]
    assert unseen.labels.tolist() == [UNSEEN_LABEL] * 2
    truth = unseen.sets.matrix(np.arange(2), 3)
    scored = calibration.multi_label_scores(truth, truth, 0.5, unseen.labels == UNSEEN_LABEL)
    assert scored[0] == 0, "a label that is never predicted makes a row wrong"
    with pytest.raises(UsageError, match="--label-separator needs a separator, and the ensemble"):
        Settings(file, model="cnn", label_separator=";").check()


def rows_of(path: Path, labels: Sequence[object]) -> Path:
    """Write a row for each of these contents of the column of labels, as JSON lines."""
    lines = [json.dumps({"text": f"text {at}", "label": one}) for at, one in enumerate(labels)]
    path.write_text("\n".join(lines))
    return path


def test_rows_without_labels(tmp_path: Path) -> None:
    """Check that an empty list is a text without any label, and an empty cell is left out."""
    file = rows_of(tmp_path / "rows.jsonl", ["a;b", "a", "[]", "", " ; ", '[""]'] * 5)
    whole = read_training(file, separator=";")
    assert len(whole) == 25
    assert whole.warnings == (
        f"{file}:4: 5 rows without a text or a label, from here on: left out",
    )
    assert whole.labels.tolist() == [0, 0, NO_LABEL, NO_LABEL, NO_LABEL] * 5
    assert whole.sets is not None
    assert whole.sets.matrix(np.arange(4), 2).tolist() == [[1, 1], [1, 0], [0, 0], [0, 0]]
    plan = Plan.read(Settings(file, label_separator=";"))
    assert plan.second() is not None
    assert set(split(whole, 0.2, 0)[1].labels) == {0, NO_LABEL}
    one = read_training(rows_of(file, ["a", "[]"] * 5), separator=";")
    assert (one.label_names, one.labels.tolist()) == (("a",), [0, NO_LABEL] * 5)


def test_labels_of_rows_that_are_not_first_are_trained_on(tmp_path: Path) -> None:
    file = rows_of(tmp_path / "rows.jsonl", ["a;b"] * 20 + ["a;c"])
    whole = read_training(file, separator=";")
    for seed in range(30):
        rest, _ = split(whole, 0.4, seed)
        assert rest.sets is not None
        assert set(rest.sets.labels) == {0, 1, 2}
    found = findings(whole, np.arange(len(whole)))
    assert found == ["1 label with a single text ('c'): it is trained on, but not measured"]


def test_mistakes_of_labels_are_named(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    for labels, expected in (
        (["a;b", '["c;d", "a"]'], ":2: label 'c;d' would be split by ';' or as a list; give"),
        (["a;b", '[["c"], "a"]'], """:2: label '["c"]' would be split by ';' or as a list; give"""),
        (["a;b", '["b", "a"]'], ": every row has the labels 'a', 'b'; give rows of at least two"),
        (["[]"], ": no row has a label; give rows of at least two labels"),
        (["a", "['a', 'b']"], """:2: the labels "['a', 'b']" are not a JSON list; write them"""),
    ):
        rows_of(file, labels * 10)
        with pytest.raises(DatasetError) as caught:
            read_training(file, separator=";")
        assert str(caught.value).startswith(f"{file}{expected}")


@pytest.mark.parametrize(
    ("labels", "separator", "expected"),
    [
        (["a", "b"], ";", "no row has several labels, separated by ';' or as a list"),
        (
            ['["a"]', "b"],
            None,
            "10 rows with a list for a label ('[\"a\"]'): each list is one label",
        ),
        (["a b", "A  b", "c"], None, "1 label with several spellings ('A  b', 'a b'): each"),
        (["\u00e9", "e\u0301"], None, "1 label with several spellings ('e\\u0301', '\\xe9'): each"),
        (["x\u200b", "x"], None, "1 label with several spellings ('x', 'x\\u200b'): each"),
        (["a\tb", "c"], None, "1 label with a tab or a line break ('a\\tb'): read the output"),
        ([" a ", "a", "b"], None, None),
        ([1, "1", True, "b"], None, None),
    ],
)
def test_odd_labels_are_named(
    tmp_path: Path, labels: list[object], separator: str | None, expected: str | None
) -> None:
    file = rows_of(tmp_path / "rows.jsonl", labels * 10)
    warnings = read_training(file, separator=separator).warnings
    assert [one.startswith(f"{file}: {expected}") for one in warnings] == [True] * bool(expected)


def test_the_accuracy_of_predictions_counts_rows_without_labels() -> None:
    table = Table(("text", "label"), [["x", "a;b"], ["y", "[]"], ["z", ""], ["w", "[]"]], [])
    found = [Prediction("", label, 1.0, 1) for label in ("b;a", "", "", "a")]
    compared = compare(table, found, "ab", ";")
    assert compared == (pytest.approx(2 / 3), "'label'", 3)


def test_scores() -> None:
    probabilities = np.array([[0.5, 0.5], [0.1, 0.9]], np.float32)
    assert calibration.scores(probabilities, [0, -1]) == (0.5, pytest.approx(math.log(2)))
    assert math.isnan(calibration.scores(probabilities, [-1, -1])[1])


def test_report_names_the_worst_labels() -> None:
    truth = np.array([0, 0, 0, 1, 1, 2, -1])
    confusion = Confusion(truth, np.array([0, 0, 1, 1, 1, 0, 2]), ["<a>", "b", "c", "d"])
    found = confusion.labels(np.array([0, 0, 1, 2, 3]))
    assert [one.label for one in found] == ["c", "<a>", "b"], "d was not measured"
    assert (found[1].precision, found[1].recall) == (pytest.approx(2 / 3), pytest.approx(2 / 3))
    assert lines(found)[0] == (
        "label 'c': precision none, recall 0% on 1 held-out rows, 1 to train on"
    )
    assert json.loads(confusion.to_json())["counts"] == [[0, 0, 2], [0, 1, 1], [1, 1, 2], [2, 0, 1]]
    assert "&lt;a&gt; → b: 1" in confusion.to_svg().decode()
    ElementTree.fromstring(confusion.to_svg())


def rows_file(path: Path, rows: int, labels: int) -> Path:
    data = "".join(f"text number {at} of {at % labels},{at % labels}\n" for at in range(rows))
    path.write_text("text,label\n" + data)
    return path


def test_few_rows_are_trained_on_twice(tmp_path: Path) -> None:
    few = Plan.read(Settings(rows_file(tmp_path / "few.csv", 100, 2)))
    assert (few.epochs, few.batch_size, few.batches) == (16, 16, 6)
    second = few.second()
    assert second is not None
    assert (len(few.corpus.train), len(second.corpus.train), second.batches) == (90, 100, 7)
    assert not second.measures
    assert len(second.corpus.encoded.starts) == 101  # type: ignore[union-attr]
    many = Plan.read(Settings(rows_file(tmp_path / "many.csv", 5000, 2)))
    assert (many.epochs, many.second()) == (9, None)


def test_gradients_of_a_barrier_are_one_step_of_the_schedule(tmp_path: Path) -> None:
    file = rows_file(tmp_path / "few.csv", 100, 2)
    for sync, steps in (("asp", 96), ("bsp", 24), ("ssp:2", 96)):
        optimizer = Plan.read(Settings(file, sync=sync, learners=4)).optimizer()
        assert optimizer["schedule"]["total_steps"] == steps


def test_copies_and_held_out_rows(tmp_path: Path) -> None:
    """Check that texts with the same words are on one side, and that none is in both."""
    file = tmp_path / "rows.csv"
    file.write_text(
        "text,label\n" + "".join(f"T{at} x,{at % 2}\nt{at}  X,{at % 2}\n" for at in range(30))
    )
    corpus = Corpus.read(Settings(file))
    held = {text.lower().split()[0] for text in corpus.held_out.texts}
    assert held
    assert held.isdisjoint(text.lower().split()[0] for text in corpus.train.texts)


def test_each_text_is_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second run on all rows takes the same hashes."""
    hashed_texts: list[str] = []
    normal = features._normal

    def counting(text: str) -> str:
        hashed_texts.append(text)
        return normal(text)

    monkeypatch.setattr(features, "_normal", counting)
    plan = Plan.read(Settings(rows_file(tmp_path / "few.csv", 100, 2)))
    assert plan.second() is not None
    assert len(hashed_texts) == 100


def test_groups_train_the_cnn(tmp_path: Path) -> None:
    assert Settings(Path("x.csv"), groups=Path("g.toml")).model == "cnn"
    with pytest.raises(UsageError, match="--groups trains the CNN"):
        Settings(Path("x.csv"), model="ensemble", groups=Path("g.toml")).check()
