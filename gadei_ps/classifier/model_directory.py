"""The model directory: what `gadei-ps train` writes and `gadei-ps predict` reads."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors
import safetensors.numpy
from numpy.typing import NDArray

from gadei_ps.classifier import words
from gadei_ps.classifier.calibration import Calibration
from gadei_ps.classifier.features import Features, Rows
from gadei_ps.classifier.inference import (
    Classifier,
    EnsembleClassifier,
    EnsembleSizes,
    Floats,
    Sizes,
)
from gadei_ps.classifier.words import WORDS, Encoded, Vocabulary
from gadei_ps.errors import GadeiError
from gadei_ps.machine import user_files
from gadei_ps.show.counts import counted
from gadei_ps.show.strict_json import finite
from gadei_ps.storage import files

FORMAT = 2
"""Format of a CNN whose texts are cut into words."""
FORMAT_OF_CUTS = 3
"""Format of a CNN whose texts are not cut into words. Releases without it refuse the model."""
FORMAT_OF_ENSEMBLES = 4
_ELSEWHERE = "name another directory"
WEIGHTS, VOCABULARY, LABELS, CONFIG, METRICS = FILES_OF_CNN = (
    "weights.safetensors",
    "vocabulary.json",
    "labels.json",
    "config.json",
    "metrics.json",
)
FEATURES = "features.safetensors"
CONFUSION, PICTURE = "confusion.json", "confusion.svg"
RESULT_FILES = (*FILES_OF_CNN, FEATURES, CONFUSION, PICTURE)
"""All files that a model directory may have."""


class ModelDirectoryError(GadeiError):
    """A model directory cannot be written or read. The message is one line with the remedy."""


class ModelDirectoryMistake(ModelDirectoryError):
    """Another try would fail as well: the directory must change, or another one be named."""

    exit_code = 2


class Result(NamedTuple):
    """Content of a model directory. vocabulary: Features of an ensemble."""

    model: Classifier | EnsembleClassifier
    vocabulary: Vocabulary | Features
    label_names: tuple[str, ...]
    config: dict[str, Any]
    metrics: dict[str, Any]
    calibration: Calibration

    def probabilities(self, texts: Sequence[str]) -> tuple[Floats, NDArray[np.int64]]:
        """Return probabilities (n, classes), and how many words of each text the model knows."""
        encoded: Rows | Encoded
        if isinstance(self.vocabulary, Features):
            encoded = self.vocabulary.encode(texts)
            tokens, starts = encoded.words, encoded.word_starts
        else:
            encoded = words.encode(texts, self.vocabulary)
            tokens, starts = encoded.tokens, encoded.starts
        parts = self.model.parts(encoded, self.calibration.multi_label)  # type: ignore[arg-type]
        known = np.diff(np.concatenate(([0], np.cumsum(tokens > words.UNKNOWN)))[starts])
        return self.calibration.probabilities(parts), known


def load_result(directory: str | os.PathLike[str]) -> Result:
    """Read what `save_result` wrote, in this release or an earlier one.

    Raises ModelDirectoryError if a file is missing or damaged.
    """
    path = resolved(directory)
    if not path.is_dir():
        what = "is not a directory" if path.exists() else "there is no such directory"
        raise failure(path, what, "give a directory that gadei-ps train has written")
    config = _read_object(path / CONFIG)
    formats = (FORMAT, FORMAT_OF_CUTS, FORMAT_OF_ENSEMBLES)
    if config.get("format") not in formats:
        what = f"has format {config.get('format')!r}, not {formats[0]} to {formats[-1]}"
        raise failure(path / CONFIG, what, "load it with the version that wrote it")
    is_ensemble = config["format"] == FORMAT_OF_ENSEMBLES
    metrics = _read_object(path / METRICS)
    labels = _read_object(path / LABELS).get("labels")
    if not isinstance(labels, list) or not all(isinstance(name, str) for name in labels):
        raise _damaged(path / LABELS, "labels must be a list of strings")
    vocabulary: Vocabulary | Features
    if is_ensemble:
        vocabulary = _load_features(path, config)
        counts = [("features", FEATURES, len(vocabulary.grams))]
        counts += [("vocabulary_size", FEATURES, vocabulary.vocabulary_size)]
    else:
        vocabulary = _load_vocabulary(path)
        counts = [("vocabulary_size", VOCABULARY, len(vocabulary))]
    sizes = config.get("model")
    if not isinstance(sizes, dict):
        raise _damaged(path / CONFIG, "the sizes of the model are missing")
    for name, file, number in (*counts, ("classes", LABELS, len(labels))):
        if sizes.get(name) != number:
            entries = counted(number, "entry", "entries")
            raise _damaged(path / file, f"{entries}, but config.json has {sizes.get(name)!r}")
    model = _load_model(path, sizes, EnsembleSizes if is_ensemble else Sizes)
    calibration = Calibration()
    if is_ensemble or "calibration" in config:
        try:
            calibration = Calibration.from_dict(
                config.get("calibration", {}), 3 if is_ensemble else 1
            )
        except ValueError as error:
            raise _damaged(path / CONFIG, str(error)) from None
    return Result(model, vocabulary, tuple(labels), config, metrics, calibration)


def _load_vocabulary(path: Path) -> Vocabulary:
    try:
        return Vocabulary.from_json(_read(path / VOCABULARY).decode())
    except ValueError as error:
        raise _damaged(path / VOCABULARY, str(error)) from None


def _load_features(path: Path, config: Mapping[str, Any]) -> Features:
    # Earlier models lack the number; their predictions used so many.
    characters = config.get("characters", words.MAX_CHARACTERS)
    if not isinstance(characters, int) or characters < 1:
        raise _damaged(path / CONFIG, f"characters must be above 0, not {characters!r}")
    arrays = _load_arrays(path / FEATURES)
    types = {"grams": np.uint32, "idf": np.float32, "words": np.uint32}
    if {name: one.dtype for name, one in arrays.items()} != types or any(
        one.ndim != 1 for one in arrays.values()
    ):
        raise _damaged(path / FEATURES, f"the arrays are not {', '.join(types)}")
    if len(arrays["grams"]) != len(arrays["idf"]):
        raise _damaged(path / FEATURES, "n-grams and their idf differ in number")
    return Features(**arrays, characters=characters)


def _load_arrays(path: Path) -> dict[str, NDArray[Any]]:
    try:
        return safetensors.numpy.load(_read(path))  # type: ignore[no-any-return]
    except (safetensors.SafetensorError, ValueError, KeyError) as error:
        raise _damaged(path, str(error)) from None


def _load_model(
    path: Path, sizes: dict[str, Any], kind: type[Sizes] | type[EnsembleSizes]
) -> Classifier | EnsembleClassifier:
    tensors = _load_arrays(path / WEIGHTS)
    try:
        known = kind(**sizes)
    except (TypeError, ValueError) as error:
        raise _damaged(path / CONFIG, str(error)) from None
    found = {name: one.shape for name, one in tensors.items()}
    if found != known.shapes or any(one.dtype != np.float32 for one in tensors.values()):
        raise _damaged(path / WEIGHTS, "the tensors are not those that config.json describes")
    if isinstance(known, EnsembleSizes):
        return EnsembleClassifier(known, tensors)
    return Classifier(known, tensors)


def resolved(directory: str | os.PathLike[str]) -> Path:
    """The path without links."""
    return Path(os.path.realpath(directory))


def _read(path: Path) -> bytes:
    try:
        with user_files.open_file(path) as file:
            return file.read()
    except OSError as error:
        raise _damaged(path, str(error.strerror)) from None


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise _damaged(path, "not a JSON object")
    return value


def _damaged(path: Path, what: str) -> ModelDirectoryMistake:
    return failure(path, f"missing or damaged ({what})", "restore the directory or train again")


def failure(path: Path, what: str, remedy: str) -> ModelDirectoryMistake:
    """The error for this path, in one line."""
    return ModelDirectoryMistake(" ".join(f"{path}: {what}; {remedy}".split()))


# Writing


def check_result_directory(directory: str | os.PathLike[str]) -> None:
    """Raise ModelDirectoryError if `save_result` would refuse `directory`.

    The directory may be missing, empty, or an earlier result. Call this before a long training.
    """
    path = resolved(directory)
    try:
        names = {entry.name for entry in path.iterdir()}
    except FileNotFoundError:
        parent = next(p for p in path.parents if p.exists())
        if not (parent.is_dir() and os.access(parent, os.W_OK | os.X_OK)):
            raise failure(path, f"{parent} is not a writable directory", _ELSEWHERE) from None
        try:  # for root, access() is not reliable
            Path(tempfile.mkdtemp(prefix=".gadei-ps-", dir=parent)).rmdir()
        except OSError as error:
            raise failure(path, f"cannot be made ({error.strerror})", _ELSEWHERE) from None
        return
    except OSError as error:
        raise failure(path, f"cannot be used ({error.strerror})", _ELSEWHERE) from None
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise failure(path, f"{path.parent} is not writable", _ELSEWHERE)
    if names and not (names <= set(RESULT_FILES) and CONFIG in names):
        raise failure(path, "holds other files than an earlier result", "empty it or name another")


def save_result(
    directory: str | os.PathLike[str],
    model: Classifier | EnsembleClassifier,
    vocabulary: Vocabulary | Features,
    label_names: Sequence[str],
    config: Mapping[str, Any],
    metrics: Mapping[str, Any],
    calibration: Calibration | None = None,
    more: Mapping[str, bytes] | None = None,
) -> None:
    """Write the model directory whole or not at all, replacing an earlier one.

    vocabulary: Features of an ensemble. config: the training settings, written as "training" in
    config.json. metrics: any JSON values; NaN and infinities are written as null. more: further
    files of RESULT_FILES. The files are written beside `directory`, in a directory that then
    changes names with an earlier one by one call; that is deleted last. Where the file system
    cannot exchange names, a kill may leave the earlier one whole as `.<name>.<hex>.new.old`. Raises
    ModelDirectoryError if `check_result_directory` does or if a write fails; then nothing has
    changed.
    """
    check_result_directory(directory)
    path = resolved(directory)
    sizes = asdict(model.sizes)
    settings = {"format": _format(vocabulary), "model": sizes, "training": dict(config)}
    if calibration is not None:
        settings["calibration"] = calibration.as_dict()
    contents = {WEIGHTS: safetensors.numpy.save(dict(model.tensors))}
    if isinstance(vocabulary, Features):
        settings["characters"] = vocabulary.characters
        contents[FEATURES] = safetensors.numpy.save(vocabulary.arrays)
    else:
        contents[VOCABULARY] = vocabulary.to_json().encode()
    contents |= {
        LABELS: _json({"labels": list(label_names)}),
        CONFIG: _json(settings),
        METRICS: _json(dict(metrics)),
        **(more or {}),
    }
    mark = secrets.token_hex(4)
    fresh = path.with_name(f".{path.name}.{mark}.new")
    try:
        files.make_directory(path.parent)
        fresh.mkdir()
        for name, data in contents.items():
            files.write(fresh / name, [data])
        files.replace_directory(fresh, path)
    except OSError as error:
        what = f"cannot be written ({error.strerror})"
        raise ModelDirectoryError(f"{path}: {what}; {_ELSEWHERE}") from None
    finally:
        shutil.rmtree(fresh, ignore_errors=True)  # what could not be written, or the earlier one


def _format(vocabulary: Vocabulary | Features) -> int:
    if isinstance(vocabulary, Features):
        return FORMAT_OF_ENSEMBLES
    return FORMAT if vocabulary.cut == WORDS else FORMAT_OF_CUTS


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(finite(value), ensure_ascii=False, allow_nan=False, indent=2).encode()
