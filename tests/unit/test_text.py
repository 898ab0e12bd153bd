"""The sentence classifier, measuring it, and its result directory."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.nn import functional  # noqa: E402

from gadei_ps.classifier import inference  # noqa: E402
from gadei_ps.classifier.dataset import UNSEEN_LABEL  # noqa: E402
from gadei_ps.classifier.inference import Classifier, Sizes  # noqa: E402
from gadei_ps.classifier.model_directory import (  # noqa: E402
    FILES_OF_CNN,
    ModelDirectoryError,
    check_result_directory,
    load_result,
    save_result,
)
from gadei_ps.classifier.network import SentenceClassifier, evaluate  # noqa: E402
from gadei_ps.classifier.words import Encoded, Vocabulary, encode  # noqa: E402
from gadei_ps.storage import files  # noqa: E402


def small(classes: int = 3, **options: Any) -> SentenceClassifier:
    options = {"embedding": 8, "maps": 4, "dropout": 0.0, **options}
    return SentenceClassifier(30, classes, **options)


def in_numpy(model: SentenceClassifier) -> Classifier:
    tensors = {name: one.numpy() for name, one in model.state_dict().items()}
    return Classifier(Sizes(**model.sizes), tensors)


def sentences(count: int, width: int, seed: int = 0) -> Any:
    """int32 (count, width): rows of 1 to `width` word numbers, then padding."""
    random = np.random.default_rng(seed)
    tokens = random.integers(1, 30, (count, width), dtype=np.int32)
    lengths = random.integers(1, width + 1, count)
    return tokens * (np.arange(width) < lengths[:, None])


def encoded(tokens: Any) -> Encoded:
    """The same without padding."""
    return Encoded(tokens[tokens > 0], (tokens > 0).sum(axis=1).astype(np.int32))


def backward(loss: Any) -> None:
    loss.backward()


def plain_logits(model: SentenceClassifier, tokens: Any) -> Any:
    """Kim's network, a sentence and a filter width at a time, with one `conv1d` each."""
    rows = []
    widths, maps = model.sizes["widths"], model.sizes["maps"]
    for sentence in tokens:
        # One position of padding more than a filter reaches: every filter also sees padding only.
        words = sentence[sentence != 0]
        embedded = model.embedding[words].T.unsqueeze(0)
        features = []
        for index, width in enumerate(widths):
            taps: list[Any] = []
            start = 0
            for tap, count in enumerate(model.tap_features):
                if tap < width:
                    at = start + index * maps
                    # The tap that is shifted furthest meets the first word of its window.
                    taps.insert(0, model.filters[at : at + maps])
                start += count
            padded = functional.pad(embedded, (width, width))
            bias = model.filter_bias[index * maps : (index + 1) * maps]
            convolved = functional.conv1d(padded, torch.stack(taps, dim=2), bias)
            features.append(functional.relu(convolved).amax(dim=2)[0])
        hidden = torch.cat(features)
        rows.append(model.output_weight @ hidden + model.output_bias)
    return torch.stack(rows)


# The model


@pytest.mark.parametrize("widths", [(3, 4, 5), (1, 2), (4,), (2, 2, 7)])
@pytest.mark.parametrize(("count", "width"), [(1, 1), (2, 6), (32, 13)])
def test_logits_and_gradients_are_those_of_plain_convolutions(
    widths: tuple[int, ...], count: int, width: int
) -> None:
    model = small(widths=widths, seed=4)
    with torch.no_grad():
        model.filter_bias.uniform_(-0.1, 0.1, generator=torch.Generator().manual_seed(1))
    tokens = torch.from_numpy(sentences(count, width))
    labels = torch.arange(count) % 3
    grads = []
    for logits in (model(tokens), plain_logits(model, tokens)):
        backward(functional.cross_entropy(logits, labels))
        grads.append([parameter.grad for parameter in model.parameters()])
        model.zero_grad()
    torch.testing.assert_close(model(tokens), plain_logits(model, tokens))
    for ours, plain in zip(*grads, strict=True):
        torch.testing.assert_close(ours, plain, atol=1e-6, rtol=1e-4)


def test_padding_changes_neither_logits_nor_gradients() -> None:
    tokens = torch.from_numpy(sentences(4, 9))
    results = []
    for padding in (0, 1, 20):
        model = small()
        logits = model(functional.pad(tokens, (0, padding)))
        backward(logits.square().sum())
        results.append((logits, *(parameter.grad for parameter in model.parameters())))
    for result in results[1:]:
        torch.testing.assert_close(result, results[0])


def test_padding_alone_is_a_window_of_every_filter() -> None:
    model = small()
    with torch.no_grad():
        model.embedding.abs_()
        model.filters.abs_().neg_()
        model.filter_bias.fill_(1.0)
    for length in (1, 5, 9):
        # Every window with a word in it is below the one with none, whose feature is the bias.
        tokens = torch.full((1, length), 7)
        expected = model.output_weight.sum(dim=1) + model.output_bias
        torch.testing.assert_close(model(tokens)[0], expected)


def test_the_padding_row_stays_zero() -> None:
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    backward(model(torch.from_numpy(sentences(8, 12))).square().sum())
    optimizer.step()
    assert not model.embedding[0].any()
    assert model.embedding[1:].any()


def test_sizes_are_kims() -> None:
    model = SentenceClassifier(1000, 6)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert shapes == Sizes(1000, 6).shapes
    assert shapes == {
        "embedding": (1000, 300),
        "filters": (1200, 300),
        "filter_bias": (300,),
        "output_weight": (6, 300),
        "output_bias": (6,),
    }
    assert model.dropout == 0.5
    assert 0.04 < model.embedding[1:].abs().max() <= 0.05
    assert 0.2 < small(embedding_range=0.25).embedding.abs().max() <= 0.25
    # Column blocks are taps; the first 100 columns of a block belong to the width 5.
    for block in (model.filters[:100], model.filters[-100:]):
        assert 0.9 * 1500**-0.5 < block.abs().max() <= 1500**-0.5
    assert 0.9 * 900**-0.5 < model.filters[200:300].abs().max() <= 900**-0.5


def test_the_initial_weights_depend_on_the_seed_alone() -> None:
    before = torch.random.get_rng_state()
    first = small(seed=1).state_dict()
    assert torch.equal(torch.random.get_rng_state(), before), "the global generator is left alone"
    torch.rand(3)
    assert all(torch.equal(t, first[name]) for name, t in small(seed=1).state_dict().items())
    assert not torch.equal(small(seed=2).embedding, first["embedding"])


def test_dropout_is_applied_in_training_only() -> None:
    model = small(dropout=0.5)
    tokens = torch.from_numpy(sentences(4, 9))
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


def test_a_sparse_gradient_equals_the_dense_one() -> None:
    tokens = torch.from_numpy(sentences(4, 9))
    dense, sparse = small(), small(sparse=True)
    for model in (dense, sparse):
        backward(model(tokens).square().sum())
    expected, grad = dense.embedding.grad, sparse.embedding.grad
    assert expected is not None
    assert grad is not None
    assert grad.is_sparse
    assert not expected.is_sparse
    torch.testing.assert_close(grad.to_dense(), expected)


@pytest.mark.parametrize(
    "options",
    [{"classes": 0}, {"maps": -1}, {"widths": ()}, {"embedding": 2.5}, {"dropout": 1.0}],
)
def test_impossible_sizes_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be"):
        small(**options)


def test_it_learns_a_word_that_decides() -> None:
    tokens = sentences(64, 8) % 20
    tokens[:, 0] = 3
    labels = (np.arange(64) % 2).astype(np.int64)
    tokens[labels == 1, 1] = 25
    model = small(classes=2)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.01)
    _, before = evaluate(model, encoded(tokens), labels)
    for _ in range(5):
        for start in range(0, 64, 2):
            batch = torch.from_numpy(tokens[start : start + 2])
            loss = functional.cross_entropy(
                model(batch), torch.from_numpy(labels[start : start + 2])
            )
            optimizer.zero_grad()
            backward(loss)
            optimizer.step()
    accuracy, after = evaluate(model, encoded(tokens), labels)
    assert accuracy == 1.0
    assert after < before / 2


# Measuring


@pytest.mark.parametrize("slice_size", [1, 5, 64])
def test_evaluate_is_accuracy_and_mean_loss(
    slice_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inference, "SLICE", slice_size)
    model = small(dropout=0.5).train()
    tokens = sentences(23, 9)
    labels = np.arange(23) % 3
    accuracy, loss = evaluate(model, encoded(tokens), labels)
    logits = plain_logits(model, torch.from_numpy(tokens)).detach()
    assert accuracy == np.mean(logits.argmax(1).numpy() == labels)
    assert loss == pytest.approx(float(functional.cross_entropy(logits, torch.from_numpy(labels))))


def test_unseen_labels_count_as_wrong_and_have_no_loss() -> None:
    model = small()
    tokens = encoded(sentences(8, 9))
    right = in_numpy(model).parts(tokens)[0].argmax(axis=1)
    labels = np.where(np.arange(8) < 6, right, UNSEEN_LABEL)
    accuracy, loss = evaluate(model, tokens, labels)
    assert accuracy == 0.75
    assert loss == pytest.approx(evaluate(model, tokens.only(np.arange(8) < 6), right[:6])[1])
    accuracy, loss = evaluate(model, tokens, np.full(8, UNSEEN_LABEL))
    assert accuracy == 0
    assert math.isnan(loss)


def test_there_must_be_something_to_evaluate() -> None:
    with pytest.raises(ValueError, match="0 sentences"):
        evaluate(small(), encoded(sentences(3, 5)[:0]), np.zeros(0, np.int64))
    with pytest.raises(ValueError, match="2 labels"):
        evaluate(small(), encoded(sentences(3, 5)), np.zeros(2, np.int64))


def test_predict_gives_probabilities_in_the_order_of_the_rows() -> None:
    model = small()
    tokens = sentences(23, 9)
    probabilities = np.exp(in_numpy(model).parts(encoded(tokens))[0])
    assert probabilities.dtype == np.float32
    assert probabilities.sum(axis=1) == pytest.approx(1, abs=1e-5)
    expected = plain_logits(model, torch.from_numpy(tokens)).softmax(1).detach().numpy()
    np.testing.assert_allclose(probabilities, expected, rtol=1e-4)
    assert in_numpy(model).parts(encoded(tokens[:0])).shape == (1, 0, 3)


# The result directory

VOCABULARY = Vocabulary(tuple(f"w\u00e4{i}" for i in range(28)))
LABELS = ("ja", "nein", "vielleicht")


def save(directory: Path, **changes: Any) -> None:
    parts: dict[str, Any] = {
        "model": small(),
        "vocabulary": VOCABULARY,
        "label_names": LABELS,
        "config": {"learning_rate": 0.01},
        "metrics": {"accuracy": 0.5},
    }
    given = {**parts, **changes}
    save_result(directory, **given | {"model": in_numpy(given["model"])})


def test_a_result_is_read_back_whole(tmp_path: Path) -> None:
    directory = tmp_path / "new" / "result"
    model = small(seed=9, widths=(2, 5), dropout=0.25)
    save(directory, model=model, metrics={"loss": [math.nan, 1.5, {"a": math.inf}]})
    assert sorted(p.name for p in directory.iterdir()) == sorted(FILES_OF_CNN)
    result = load_result(directory)
    texts = encode(["w\u00e41 w\u00e42 never", "w\u00e43"], result.vocabulary)
    expected = model.eval()(torch.from_numpy(texts.padded())).detach().numpy()
    assert isinstance(result.model, Classifier)
    np.testing.assert_allclose(result.model.parts(texts, logits=True)[0], expected, atol=1e-5)
    assert asdict(result.model.sizes) == model.sizes
    assert result.vocabulary == VOCABULARY
    assert result.label_names == LABELS
    assert result.config["training"] == {"learning_rate": 0.01}
    assert result.metrics == {"loss": [None, 1.5, {"a": None}]}


@pytest.mark.parametrize("call", ["renameat2", "none"])
def test_an_earlier_result_or_an_empty_directory_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Check it even if the system has no call that exchanges names."""
    monkeypatch.setattr(files, "_EXCHANGE", call)
    directory = tmp_path / "result"
    directory.mkdir()
    for accuracy in (0.25, 0.75):
        save(directory, metrics={"accuracy": accuracy})
        assert load_result(directory).metrics == {"accuracy": accuracy}
    assert [p.name for p in tmp_path.iterdir()] == ["result"], "nothing is left beside it"


def test_a_link_to_a_result_is_followed(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "result")
    save(tmp_path / "link")
    save(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert load_result(tmp_path / "result").label_names == LABELS


def refused(directory: Path) -> str:
    messages = []
    for action in (check_result_directory, save):
        with pytest.raises(ModelDirectoryError) as caught:
            action(directory)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
    assert "\n" not in messages[0]
    return messages[0]


def test_other_files_are_never_overwritten(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "notes.txt").write_text("mine")
    assert "holds other files" in refused(other)
    (other / "config.json").write_text("{}")
    assert "holds other files" in refused(other)
    assert sorted(p.name for p in other.iterdir()) == ["config.json", "notes.txt"]
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "labels.json").write_text("{}")
    assert "holds other files" in refused(foreign)
    file = other / "notes.txt"
    assert "Not a directory" in refused(file)
    assert "Not a directory" in refused(file / "below")
    assert file.read_text() == "mine"


def test_a_parent_that_cannot_be_written_is_told_before_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)
    assert f"{tmp_path} is not a writable directory" in refused(tmp_path / "a" / "b")
    (tmp_path / "a").mkdir()
    assert f"{tmp_path} is not writable" in refused(tmp_path / "a")


@pytest.mark.parametrize("earlier", [False, True])
@pytest.mark.parametrize("step", ["fsync", "rename"])
def test_a_failed_write_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, earlier: bool, step: str
) -> None:
    directory = tmp_path / "result"
    if earlier:
        save(directory, metrics={"accuracy": 0.125})

    def fail(*_: object) -> Any:
        raise OSError(28, "No space left on device")

    rename = Path.rename

    def fail_at_the_new(self: Path, target: Path) -> Any:
        return fail() if self.suffix == ".new" else rename(self, target)

    with monkeypatch.context() as patched:
        if step == "fsync":
            patched.setattr("os.fsync", fail)
        else:
            patched.setattr(Path, "rename", fail_at_the_new)
            patched.setattr(files, "_exchange", fail)
        with pytest.raises(ModelDirectoryError, match="No space left on device"):
            save(directory)
    assert [p.name for p in tmp_path.iterdir()] == ["result"] * earlier
    if earlier:
        assert load_result(directory).metrics == {"accuracy": 0.125}


def unreadable(directory: Path) -> str:
    with pytest.raises(ModelDirectoryError) as caught:
        load_result(directory)
    message = str(caught.value)
    assert "\n" not in message
    assert "; " in message
    return message


@pytest.mark.parametrize("name", FILES_OF_CNN)
def test_each_missing_or_damaged_file_is_named(tmp_path: Path, name: str) -> None:
    directory = tmp_path / "result"
    save(directory)
    whole = (directory / name).read_bytes()
    for damage in (whole[: len(whole) // 2], b"", b"\xff\0" * 50, b"[" * 99_999, b"[]"):
        (directory / name).write_bytes(damage)
        assert f"{directory / name}: missing or damaged" in unreadable(directory)
    (directory / name).unlink()
    assert f"{directory / name}: missing or damaged (No such file" in unreadable(directory)


def test_files_that_do_not_fit_together_are_named(tmp_path: Path) -> None:
    directory = tmp_path / "result"
    config = directory / "config.json"
    for change, file in (
        ({"maps": 5}, "weights.safetensors"),
        ({"embedding": 10**9}, "weights.safetensors"),
        ({"maps": -1}, "config.json"),
        ({"surprise": 1}, "config.json"),
        ({"vocabulary_size": 31}, "vocabulary.json"),
        ({"classes": 2}, "labels.json"),
    ):
        save(directory)
        content = json.loads(config.read_text())
        content["model"].update(change)
        config.write_text(json.dumps(content))
        assert unreadable(directory).startswith(f"{directory / file}: ")
    save(directory)
    content = json.loads(config.read_text())
    config.write_text(json.dumps({**content, "format": 9}))
    assert "has format 9, not 2" in unreadable(directory)
    config.write_text(json.dumps({"format": 2}))
    assert "sizes of the model are missing" in unreadable(directory)
    save(directory)
    (directory / "labels.json").write_text('{"labels": [1, 2, 3]}')
    assert "list of strings" in unreadable(directory)


def test_a_result_directory_that_is_none_is_named(tmp_path: Path) -> None:
    assert "there is no such directory" in unreadable(tmp_path / "none")
    (tmp_path / "file").write_text("")
    assert "is not a directory" in unreadable(tmp_path / "file")


def test_importing_starts_nothing() -> None:
    """Nor does it load PyTorch, which takes longer than all the rest.

    Learners are forked from such a process, which must have no other threads.
    """
    program = (
        "import os, sys, multiprocessing as m, gadei_ps.classifier.learner;"
        "assert len(os.listdir('/proc/self/task')) == 1 and not m.active_children();"
        "assert not {'torch', 'numba'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
