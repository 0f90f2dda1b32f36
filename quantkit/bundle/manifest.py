r"""`manifest.json`: what a bundle is, how it was made, and the hash of every file in it.

    content_sha256 = sha256 of the lines "<sha256>  <path>\n" of the deterministic files, sorted by path

These are the lines that `sha256sum` prints, hashed once more: anyone can check the hash without this package.
"""

from __future__ import annotations

import hashlib
import html
import json
import os
import stat
from collections.abc import Callable, Iterable
from pathlib import Path, PurePosixPath
from typing import Any, Literal, Self

from pydantic import (
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    field_validator,
    model_serializer,
    model_validator,
)

from quantkit import limits, machine
from quantkit.bundle.disk import sha256, walk
from quantkit.content import Bounded
from quantkit.errors import InputError, from_validation, one
from quantkit.kinds import Said
from quantkit.plugins import EXPORTERS

MANIFEST = "manifest.json"
MEASUREMENTS = "measurements.jsonl"
# files that the manifest cannot list: itself, its seal and the signatures
SEAL, SIGNED_BY_KEY, SIGNED_BY_LIBRARY = "seal.json", "seal.json.sig", "model.sig"
UNLISTED = frozenset({MANIFEST, SEAL, SIGNED_BY_KEY, SIGNED_BY_LIBRARY})
SCHEMA = 1


class _Closed(Bounded):
    """Base of the manifest's classes: no unknown keys, frozen values, finite numbers (null, never NaN)."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class AdapterEntry(_Closed):
    """An adapter that was merged into the model.

    Args:
        ref: the adapter as the user named it: `hf:org/name`, a path.
        sha256: hash of its config and weights.
        kind: `LoRA`, `rsLoRA` or `DoRA`.
        ranks: ranks of its products.
        alpha: alpha of its config.
        weights: number of weights that a product was added to.
        replaced: number of tensors that it replaced.
    """

    ref: str
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    kind: str
    ranks: list[int]
    alpha: float | None
    weights: int = Field(ge=0)
    replaced: int = Field(ge=0)


class SourceEntry(_Closed):
    """Origin of the model.

    Args:
        ref: the model as the user named it: `alias:smollm2-135m`, `hf:org/name`, a path.
        sha256: hash of the source's weights; with adapters, of the base and of each of them.
        dtype: type of the source's weights.
        was: original format, when the source is itself a conversion: `gguf Q4_1`.
        base: hash of the source's weights before the adapters.
        adapters: adapters that were merged, in their order.
    """

    ref: str
    sha256: str
    dtype: str
    was: str | None = None
    base: str | None = None
    adapters: list[AdapterEntry] = Field(default=[])

    @model_serializer(mode="wrap")
    def _without_what_is_not_there(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out empty fields: readers of schema 1 know four keys."""
        data: dict[str, Any] = handler(self)
        return {key: value for key, value in data.items() if self.adapters or key not in ("base", "adapters")}


class ModelEntry(_Closed):
    """Identity of the model."""

    name: str
    kind: Said
    source: SourceEntry


class CalibrationEntry(_Closed):
    """Calibration data of the passes; `ids_sha256` is the hash of the token ids as used.

    `begins`: special tokens at the start of every sequence, as text: `<bos>`.
    `generated`: number of samples that the model wrote itself; they are the last ones.
    `images`: set of the images that every second sequence begins with, for a vision-language model.
    """

    set: str
    split: str
    ids_sha256: str
    samples: int
    tokens: int
    begins: str | None = None
    generated: int | None = None
    images: str | None = None

    @model_serializer(mode="wrap")
    def _without_what_is_not_there(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out empty fields: readers of schema 1 know five keys."""
        data: dict[str, Any] = handler(self)
        return {key: value for key, value in data.items() if value is not None}


class LayerEntry(_Closed):
    """One quantized layer: shape [N, K], scheme, stored bits per weight, quantization of its input and its fixed scale.

    `error`: relative squared error of the weights, ‖W − Ŵ‖² / ‖W‖² in Frobenius norms. 0.01 is an error of a tenth of
    the weights' root mean square.

    `routed`: calibration tokens that were routed to the expert of this layer.
    """

    name: str
    shape: list[int]
    scheme: dict[str, Any]
    bits_per_weight: float
    error: float | None = None
    activations: dict[str, Any] | None = None
    input_scale: float | None = None
    routed: int | None = None

    @model_serializer(mode="wrap")
    def _without_what_is_not_there(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out empty fields: readers of schema 1 know five keys."""
        data: dict[str, Any] = handler(self)
        return {key: value for key, value in data.items() if value is not None or key == "error"}


class FileEntry(_Closed):
    """One file of the bundle.

    Args:
        path: path inside the bundle, with forward slashes.
        bytes: size.
        sha256: hash of the content.
        role: weights, config, tokenizer, onnx, openvino, engine, gguf, measurements, kernels, report, card, other.
        deterministic: whether equal inputs give equal content; only these files enter `content_sha256`.
        for: device and runtime version that the file needs (an engine); null for a file that runs anywhere.
    """

    path: str
    bytes: int = Field(ge=0)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    role: str
    deterministic: bool
    for_: str | dict[str, Any] | None = Field(default=None, alias="for")

    @field_validator("path")
    @classmethod
    def _inside(cls, value: str) -> str:
        value.encode()  # a lone surrogate cannot be a file name
        parts = PurePosixPath(value).parts
        plain = str(PurePosixPath(*parts)) == value and "\\" not in value and "\0" not in value
        if not parts or not plain or value.startswith("/") or ".." in parts or value in UNLISTED:
            raise ValueError("must be a plain relative path inside the bundle, and not the manifest or its seal")
        return value


# place of the note on the weights of a vision-language model beside its text stack
SEES = "tower of images"
# the same of a decoder whose encoder hears recordings
HEARS = "encoder of speech"


class Decision(_Closed):
    """Something that was not done as asked, with the reason."""

    pass_: str = Field(alias="pass")
    code: str
    where: str
    from_: Any = Field(default=None, alias="from")
    to: Any = None
    reason: str

    def as_dict(self) -> dict[str, Any]:
        """Return the form in the manifest."""
        return self.model_dump(mode="json", by_alias=True)


def decision(name: str, code: str, where: str, reason: str, before: object = None, after: object = None) -> Decision:
    """Record a decision of a pass, an exporter or the pipeline."""
    return Decision.model_validate(
        {"pass": name, "code": code, "where": where, "from": before, "to": after, "reason": reason}
    )


class WeightsEntry(_Closed):
    """Fate of tensors of the source, grouped by reason.

    `state`: `quantized`, `carried` (copied unchanged) or `unused` (copied too, but no parameter of the class holds it).
    `linear`: they multiply activations as a matrix. `asked`: the recipe keeps them, or they cannot be quantized.
    """

    state: Literal["quantized", "carried", "unused"]
    reason: str
    linear: bool
    asked: bool
    tensors: int
    elements: int
    example: str


class CodeEntry(_Closed):
    """A plug-in from outside that the recipe uses: a file, or a package with its version.

    Args:
        kind: pass, exporter or format.
        path: file name, relative to the recipe.
        sha256: hash of the code that ran: of the file, or of the names and hashes of all Python files of the package.
    """

    kind: str
    name: str
    path: str | None = None
    sha256: str | None = Field(default=None, pattern="^[0-9a-f]{64}$")
    package: str | None = None
    version: str | None = None

    @model_serializer(mode="wrap")
    def _without_what_is_not_there(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out empty fields: a file has no package, a package no path."""
        data: dict[str, Any] = handler(self)
        return {key: value for key, value in data.items() if value is not None}


class Check(_Closed):
    """One check: a value compared with its limit.

    `where` names the files or layers that failed; it is for the reader, and is not stored.
    """

    name: str
    value: float | None
    limit: float | None
    ok: bool
    where: str = Field(default="", exclude=True)

    @property
    def rule(self) -> str:
        """Limit of a failed check in words; a value below its limit had to be at least that."""
        least = self.value is not None and self.limit is not None and self.value < self.limit
        return f"{'at least' if least else 'at most'} {self.limit}"


class PromptVerdict(_Closed):
    """Verdict on prefill: the measured prompt lengths, in tokens, by result; ascending.

    `open`: lengths at which noise hides a difference, or there is none.
    """

    faster: list[int] = Field(default_factory=list)
    slower: list[int] = Field(default_factory=list)
    open: list[int] = Field(default_factory=list)


class Verdict(_Closed):
    """Answer whether quantizing was worth it on the target; decode steps decide for a decoder, not `prompts`.

    `instead`: what to use where quantizing gains nothing; empty if it gains everywhere, or if nothing better is known.
    """

    answer: str
    batch: int | None = None
    format: str | None = None
    because: list[str] = Field(default_factory=list)
    forecast: bool = False
    prompts: PromptVerdict | None = None
    instead: str = ""

    def _repr_html_(self) -> str:
        """Show the answer and its reasons in a notebook."""
        about = "".join(f", {name} {value}" for name in ("batch", "format") if (value := getattr(self, name)))
        answer = html.escape(f"{'forecast: ' if self.forecast else ''}{self.answer.replace('_', ' ')}{about}")
        return f"<b>{answer}</b><ul>{''.join(f'<li>{html.escape(reason)}</li>' for reason in self.because)}</ul>"


class Manifest(_Closed):
    """The document `manifest.json`, schema 1."""

    schema_: Literal[1] = Field(default=1, alias="schema")
    quantkit: str
    content_sha256: str = Field(pattern="^[0-9a-f]{64}$")
    state: Literal["complete", "gate_failed"]
    model: ModelEntry
    recipe: dict[str, Any]
    target: dict[str, Any] | None
    calibration: CalibrationEntry | None
    seed: int
    threads: int
    isa: str
    device: dict[str, Any]
    versions: dict[str, str]
    created: str
    layers: list[LayerEntry]
    files: list[FileEntry]
    decisions: list[Decision]
    checks: list[Check]
    weights: list[WeightsEntry] = Field(default=[])
    code: list[CodeEntry] = Field(default=[])
    verdict: Verdict | None

    @model_serializer(mode="wrap")
    def _without_what_is_not_there(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out empty fields: without code from outside, the keys are those of schema 1."""
        data: dict[str, Any] = handler(self)
        return {key: value for key, value in data.items() if key != "code" or value}

    @model_validator(mode="after")
    def _unique_paths(self) -> Self:
        paths = [entry.path for entry in self.files]
        if len(set(paths)) != len(paths):
            twice = next(path for path in paths if paths.count(path) > 1)
            raise ValueError(f"{twice!r} is listed twice")
        return self

    @property
    def sees(self) -> bool:
        """True if the model takes images too."""
        return any(taken.where == SEES for taken in self.decisions)

    @property
    def hears(self) -> bool:
        """True if the model writes down recordings."""
        return any(taken.where == HEARS for taken in self.decisions)

    @property
    def writes(self) -> bool:
        """True if the model continues text: a decoder with its tokenizer, which a GGUF file holds within."""
        files = (entry.role == "tokenizer" or entry.path.endswith((".gguf", "/tokenizer.json")) for entry in self.files)
        return self.model.kind == "decoder" and any(files)

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """Parse a `manifest.json`.

        Raises:
            InputError: `manifest-invalid` (not JSON, unknown key, wrong value), `manifest-schema` (a later one).
        """
        try:
            data = json.loads(limits.read(path))
        except (OSError, ValueError, RecursionError) as error:
            rule, remedy = "a manifest is a JSON object", "make the bundle again"
            raise InputError("manifest-invalid", str(path), str(error), rule, remedy) from None
        if not isinstance(data, dict):
            raise InputError("manifest-invalid", str(path), one(type(data).__name__), "a manifest is an object")
        if data.get("schema") != SCHEMA:
            value, rule = f"schema {data.get('schema')!r}", f"this quantkit reads schema {SCHEMA}"
            remedy = "use the version of quantkit that wrote it"
            raise InputError("manifest-schema", str(path), value, rule, remedy)
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            raise from_validation(error, where=str(path), code="manifest-invalid") from None

    def as_dict(self) -> dict[str, Any]:
        """Return the document `manifest.json`."""
        return self.model_dump(mode="json", by_alias=True)

    def as_bytes(self) -> bytes:
        """Return the content of the file."""
        return (json.dumps(self.as_dict(), indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()


def content_sha256(files: Iterable[FileEntry]) -> str:
    """Hash the hashes and paths of the deterministic files: the identity of a bundle."""
    lines = sorted((entry.path, entry.sha256) for entry in files if entry.deterministic)
    return hashlib.sha256("".join(f"{digest}  {path}\n" for path, digest in lines).encode()).hexdigest()


def role_of(path: str) -> tuple[str, bool]:
    """Return (role, deterministic) of a file by its place in a bundle.

    >>> role_of("model/model-00001-of-00002.safetensors")
    ('weights', True)
    >>> role_of("onnx/tokenizer.json")
    ('tokenizer', True)
    >>> role_of("measurements.jsonl")
    ('measurements', False)
    """
    place, name = PurePosixPath(path).parts[0], PurePosixPath(path).name
    if place == "engine" and name.endswith((".onnx", ".onnx.data")):
        return "onnx", True  # the source of the engine
    weights = {"model": (".safetensors",), "onnx": (".onnx", ".onnx.data"), "openvino": (".xml", ".bin")}
    if place in weights:
        if name.endswith(weights[place]):
            return ("weights" if place == "model" else place), True
        tokenizer = name.startswith(("tokenizer", "vocab", "merges", "special_tokens", "added_tokens", "chat_template"))
        return ("tokenizer" if tokenizer or name.endswith(".model") else "config"), True
    roles = {
        "gguf": ("gguf", True),
        "engine": ("engine" if name.endswith(".engine") else "other", False),
        MEASUREMENTS: ("measurements", False),
        "report.html": ("report", False),
        "kernels.json": ("kernels", False),
        "README.md": ("card", False),
    }
    if place not in roles and place != path and (suffixes := _weights(place)):
        return ("weights" if name.endswith(suffixes) else "config"), True
    return roles.get(place, ("other", False))


def _weights(place: str) -> tuple[str, ...]:
    """List the suffixes of weight files in a folder, as its exporter declares them; none without an exporter."""
    loaded = (EXPORTERS.load(name) for name in EXPORTERS.shipped())
    return next((tuple(exporter.weights) for exporter in loaded if exporter.place == place), ())


def inventory(folder: Path, hashed: Callable[[Path], str] = sha256) -> list[FileEntry]:
    """List all files of a bundle except its manifest, with their hashes, sorted by path.

    Args:
        hashed: function that hashes a file; `Hashes` reads unchanged ones once.

    Raises:
        InputError: `bundle-link`, something that is not a plain file.
    """
    sizes: dict[Path, int] = {}
    for path in walk(folder):
        name = path.relative_to(folder).as_posix()
        if name in UNLISTED:
            continue
        status = os.lstat(path)
        if not stat.S_ISREG(status.st_mode):
            raise InputError("bundle-link", name, "a link or device", "a bundle holds plain files")
        sizes[path] = status.st_size
    entries = []
    for path, digest in zip(sizes, machine.in_order(hashed, list(sizes)), strict=True):
        name = path.relative_to(folder).as_posix()
        role, deterministic = role_of(name)
        entries.append(FileEntry(path=name, bytes=sizes[path], sha256=digest, role=role, deterministic=deterministic))
    return sorted(entries, key=lambda entry: entry.path)
