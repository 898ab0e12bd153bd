"""The sentence classifier on scripts that put no spaces between words."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.nn import functional  # noqa: E402

from gadei_ps.classifier.inference import Classifier, Sizes  # noqa: E402
from gadei_ps.classifier.model_directory import load_result, save_result  # noqa: E402
from gadei_ps.classifier.network import SentenceClassifier, evaluate  # noqa: E402
from gadei_ps.classifier.words import Vocabulary, encode  # noqa: E402


def japanese() -> tuple[list[str], Any]:
    """Return sentences without spaces, each only once, of which one word decides the label."""
    words = (
        ("昨日の", "あの", "友達の", "東京の"),
        ("映画", "料理", "部屋", "音楽", "先生"),
        ("素晴らしい", "最高の", "ひどい", "最悪の"),
        ("でした。", "だった。"),
    )
    found = [
        (f"{one}{thing}は{how}もの{end}", int(how in words[2][2:]))
        for one, thing, how, end in itertools.product(*words)
    ]
    order = np.random.default_rng(3).permutation(len(found))
    return [found[i][0] for i in order], np.array([found[i][1] for i in order])


@pytest.mark.parametrize(("cut", "learns"), [("characters", True), ("words", False)])
def test_a_language_without_spaces(cut: str, learns: bool, tmp_path: Path) -> None:
    """Encode it as one word, like older models made of a sentence: it predicts nothing."""
    texts, labels = japanese()
    train = 130
    built = Vocabulary.build(texts[:train])
    assert built.cut == "characters"
    vocabulary = built if learns else Vocabulary(tuple(texts[:train]), "words")
    sizes = {"embedding": 32, "maps": 16, "dropout": 0.0, "seed": 1}
    model = SentenceClassifier(len(vocabulary), 2, **sizes)
    encoded = encode(texts, vocabulary)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for begin in range(0, 4 * train, 10):
        rows = np.arange(begin, begin + 10) % train
        optimizer.zero_grad()
        loss = functional.cross_entropy(
            model(torch.from_numpy(encoded.batch(rows))), torch.from_numpy(labels[rows])
        )
        loss.backward()
        optimizer.step()
    accuracy, _ = evaluate(model, encoded.only(np.arange(len(texts)) >= train), labels[train:])
    assert (accuracy > 0.9) == learns, accuracy
    tensors = {name: one.numpy() for name, one in model.state_dict().items()}
    trained = Classifier(Sizes(**model.sizes), tensors)
    save_result(tmp_path / "model", trained, vocabulary, ["good", "bad"], {}, {})
    assert load_result(tmp_path / "model").vocabulary == vocabulary
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["format"] == (3 if learns else 2), "releases that only know words refuse it"
