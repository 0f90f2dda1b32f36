"""Card of a calibration set: source of the data, licence, and the file of each split.

    calibration/prose-en/card.yaml + calib.txt, tune.txt, eval.txt

Passes see `calib`; only `tune` may guide a choice; `eval` is for scoring only. A file is read only if its bytes have
the
length and the sha256 of the card. A set of kind `random` has no files: its tokens are drawn from the model's
vocabulary.
A user's own file has no card: its last 10 % are for `eval`, the 5 % before for `tune`.
"""

from __future__ import annotations

import datetime
import hashlib
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, PrivateAttr, field_validator, model_validator

from quantkit import errors, limits
from quantkit.content import Closed, read_yaml, validated
from quantkit.errors import InputError, absent, did_you_mean
from quantkit.model.source.packaged import Preprocess

if TYPE_CHECKING:
    import numpy as np

Split = Literal["calib", "tune", "eval"]
# shares at which `tune` and `eval` begin in a set without splits
_TUNE, _EVAL = 0.85, 0.90


class DataSource(Closed):
    """Source of the data. `retrieved` is a date; `cut` says which part was used, and how it was split."""

    title: str = Field(min_length=1)
    retrieved: datetime.date | str
    author: str | None = None
    url: str | None = None
    cut: str | None = None


class SplitFile(Closed):
    """One file of one split; `path` is inside of the card's folder."""

    split: Split
    path: str
    bytes: int = Field(gt=0)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")

    @field_validator("path")
    @classmethod
    def _inside(cls, value: str) -> str:
        path = PurePosixPath(value)
        if not value or path.is_absolute() or ".." in path.parts or "\\" in value or "\0" in value:
            raise ValueError("a path inside the card's folder, without `..`")
        return value


class SetSampling(Closed):
    """Conversion of documents to sequences: joined, cut into equal lengths, the remainder dropped, shuffled.

    Args:
        special_tokens: True to put the tokenizer's own tokens around every document; else only a sequence begins with
            them (`calibrate.sets`).
        shuffle: True to draw sequences from the whole text, not from its beginning.
        seed: seed of the draw; for `calib` combined with the recipe's seed.
    """

    pack: Literal["concatenate"] = "concatenate"
    drop_remainder: Literal[True] = True
    special_tokens: bool = False
    shuffle: bool = True
    seed: int = Field(default=0, ge=0)

    def generator(self, split: Split, seed: int) -> np.random.Generator | None:
        """Return the generator of a split's samples; None to take them in order.

        The recipe's `seed` only affects `calib`; `tune` and `eval` stay the same, so that runs can be compared.
        """
        import numpy as np

        return np.random.default_rng([self.seed, seed if split == "calib" else 0]) if self.shuffle else None


class Card(Closed):
    """A calibration set's card.

    `alike` is, for image files, a regular expression for the part of a name that identifies the photograph or scene.
    Images
    of one photograph are not independent: intervals count it once. A .npz has an array `clusters` instead.
    """

    schema_: Annotated[Literal[1], Field(alias="schema")]
    summary: str = Field(min_length=1)
    kind: Literal["text", "tokens", "images", "pairs", "random"]
    source: DataSource
    licence: str = Field(min_length=1)
    files: list[SplitFile] = Field(default=[])
    sampling: SetSampling = SetSampling()
    preprocess: Preprocess | None = None
    alike: str | None = None
    _folder: Path = PrivateAttr(default=Path())

    @field_validator("alike")
    @classmethod
    def _pattern(cls, value: str | None) -> str | None:
        try:
            re.compile(value or "")
        except re.error as error:
            raise ValueError(f"a regular expression: {error}") from None
        return value

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        if (self.kind == "random") == bool(self.files):
            raise ValueError("a set has `files`, unless it is of kind random")
        if self.alike is not None and self.kind != "images":
            raise ValueError("`alike` is about image files; this set is of another kind")
        paths = [file.path for file in self.files]
        hashes = [file.sha256 for file in self.files]
        if len(set(paths)) < len(paths) or len(set(hashes)) < len(hashes):
            raise ValueError("the same file is in `files` twice; splits are disjoint")
        return self

    @classmethod
    def load(cls, path: Path) -> Card:
        """Read and validate `card.yaml`, or the one in a folder.

        Raises:
            InputError: `card-invalid` with a did-you-mean, `yaml-invalid`, `file-unreadable`.
        """
        if path.is_dir():
            path = path / "card.yaml"
        rule = "a card is a YAML mapping"
        card = validated(cls, read_yaml(path), where=str(path), code="card-invalid", rule=rule)
        card._folder = path.parent
        return card

    @classmethod
    def at(cls, path: Path) -> Card | None:
        """Return the card at a calibration set's path; None for a user's own file or folder."""
        there = path.name == "card.yaml" or (path.is_dir() and (path / "card.yaml").is_file())
        return cls.load(path) if there else None

    def demand_kind(self, *kinds: str, rule: str) -> None:
        """Refuse a set of another kind; `rule` says what the model needs. Raises InputError `calibration-kind`."""
        if self.kind not in kinds:
            remedy = "use another set; see `quantkit list calibrations`"
            raise InputError("calibration-kind", self.where, f"the set is of kind {self.kind}", rule, remedy)

    @property
    def where(self) -> str:
        """Path of its file, for errors."""
        return str(self._folder / "card.yaml")

    @property
    def name(self) -> str:
        """Name of the card's folder."""
        return self._folder.resolve().name

    def read(self, split: Split) -> list[tuple[Path, bytes]]:
        """Return the files of a split with their bytes, in the card's order, each checked against the card.

        Raises:
            InputError: `calibration-split` for a missing split, `calibration-checksum`, `file-missing`,
                `file-unreadable`.
        """
        files = [file for file in self.files if file.split == split]
        if not files:
            rule = f"the card has {', '.join(sorted({file.split for file in self.files}))}"
            remedy = "add one, or use another set"
            raise InputError("calibration-split", self.where, f"no file for the split {split!r}", rule, remedy)
        return [self._read(file) for file in files]

    def _read(self, file: SplitFile) -> tuple[Path, bytes]:
        path = self._folder / file.path
        if not path.resolve().is_relative_to(self._folder.resolve()):
            raise InputError("card-invalid", where=str(path), value="a link that leads out of the card's folder")
        data = read_bytes(path)
        digest = hashlib.sha256(data).hexdigest()
        if len(data) != file.bytes or digest != file.sha256:
            where, rule = str(path), f"the card says {file.bytes} bytes, sha256 {file.sha256[:12]}…"
            remedy = "restore the file, or write the new figures into the card"
            raise InputError("calibration-checksum", where, f"{len(data)} bytes, sha256 {digest[:12]}…", rule, remedy)
        return path, data


def read_bytes(path: Path) -> bytes:
    """Return the bytes of a file. Raises InputError (`file-missing`, `file-unreadable`)."""
    try:
        return limits.read(path, limits.DATA)
    except FileNotFoundError:
        near = did_you_mean(path.name, [entry.name for entry in path.parent.iterdir()]) if path.parent.is_dir() else ""
        raise absent(path, near or "check the path") from None
    except OSError as error:
        reason = error.strerror or str(error)
        raise InputError("file-unreadable", where=str(path), value=reason, remedy="check the file") from None


def bounds(split: Split, count: int, place: Callable[[float], int] | None = None) -> tuple[int, int]:
    """Return the first sample of a split of a set without splits, and the end.

    Args:
        count: number of all samples.
        place: function from a share to the first sample at or after it; by default a share of the count.
    """
    tune, evaluation = (place(share) if place else int(count * share) for share in (_TUNE, _EVAL))
    return {"calib": (0, tune), "tune": (tune, evaluation), "eval": (evaluation, count)}[split]


def short(where: str, value: str, of: str) -> InputError:
    """Make the error for an empty split; `of` names the samples, in the plural."""
    rule = f"without splits, the last 10 % of {of} are for eval and the 5 % before for tune"
    remedy = f"more {of}, or a folder with a card.yaml that states the splits"
    return InputError("calibration-short", where, value, rule, remedy)


def decoded(data: bytes, where: str, what: str = "text") -> str:
    """Decode UTF-8. Raises InputError `calibration-not-text`."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise not_text(where, f"byte 0x{data[error.start]:02x} at {error.start} is not UTF-8", what) from None


def not_text(where: str, value: str, what: str = "text") -> InputError:
    """Make the error for other data than text."""
    rule = f"{what} in UTF-8"
    return InputError("calibration-not-text", where, value, rule, "convert the file")


def empty(where: str, value: str, rule: str = "") -> InputError:
    """Make the error for an empty file."""
    return InputError("calibration-empty", where, value, rule, "give another one")


def suffix(where: str, ending: str, rule: str) -> InputError:
    """Make the error for a file type that is not supported."""
    value = f"cannot read {ending or 'a file without a suffix'}"
    return InputError("calibration-suffix", where, value, rule, "convert it")


def unreadable(where: str, problem: Exception | str) -> InputError:
    """Make the error for a file that cannot be read."""
    reason = str(problem).split("\n", 1)[0][:200] or type(problem).__name__
    return InputError("calibration-unreadable", where=where, value=reason, remedy="check the file, or write it anew")


@contextmanager
def reading(where: str) -> Iterator[None]:
    """Raise `unreadable` for any error of a library on a damaged file."""
    with errors.reading(lambda reason: unreadable(where, reason)):
        yield
