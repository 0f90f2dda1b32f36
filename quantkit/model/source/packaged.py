"""What a package's file becomes: a folder to open, with a `provenance.json` that hashes every file of it.

    a network    its description, its weights as safetensors and the same as a float ONNX graph, normalised images
                 [batch, channels, size, size] in and logits out
    a folder     a Hugging Face folder, copied

(A GGUF becomes a Hugging Face folder too; see gguf.py.) A package's code is never run: of a network only its weights
are taken, and they are put into a network of our own description. Both list their tensors in the order of their layers,
so the first of one is the first of the other, and so on; that each two agree in shape and in what they are (`weight`,
`running_mean`, …) is checked here, that both networks compute the same by a test against the package's own code.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.errors import InputError, MissingDependency
from quantkit.lazy import torch
from quantkit.model.source.gguf import PROVENANCE
from quantkit.model.source.hashes import file_sha256
from quantkit.model.source.weights import write_json

if TYPE_CHECKING:
    from torch import Tensor

    from quantkit.model.cnn import Cnn
    from quantkit.model.preprocess import Preprocess

NETWORKS = Path(__file__).parents[1] / "networks"
GRAPH = "model.onnx"
INPUT, OUTPUT = "images", "logits"
# what a sentence encoder's folder holds beside its weights
_COPIED = (
    "config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.txt",
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
    "1_Pooling/config.json",
)


def convert_network(source: Path, folder: Path, *, network: str, licence: str, preprocess: Preprocess) -> None:
    """Writes `config.json`, `model.safetensors`, `model.onnx` and `provenance.json` into an existing folder.

    Args:
        source: a state dict written by torch.save (`.pth`; only tensors are read), or `model.safetensors`.
        network: of `networks/`, whose description it is.
        preprocess: what becomes of images before them; for the reader of `provenance.json`.

    Raises:
        InputError: `weights-pickle` (more than tensors in it), `weights-names`, `weights-shape`; MissingDependency.
    """
    try:
        from quantkit.model import cnn
        from quantkit.model.to_onnx import write_onnx
    except ImportError:
        raise MissingDependency("torch", extra="compile", purpose="building the network") from None
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
    """Copies the Hugging Face folder that `source` (its `model.safetensors`) lies in, with a `provenance.json`.

    Raises:
        InputError: `alias-damaged`, a file that is not there.
    """
    for name in _COPIED:
        if not (source.parent / name).is_file():
            raise InputError(
                "alias-damaged", where=source.name, value=f"no {name} beside it", remedy="install the package again"
            )
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(source.parent / name, folder / name)
    _finish(source, folder, licence=licence)


def _finish(source: Path, folder: Path, *, licence: str, **more: Any) -> None:
    files = {
        path.relative_to(folder).as_posix(): file_sha256(path) for path in sorted(folder.rglob("*")) if path.is_file()
    }
    origin = {"file": source.name, "sha256": file_sha256(source)}
    about = {"schema": 1, "source": origin, "licence": licence, "was": None, **more, "files": files}
    write_json(folder / PROVENANCE, about, indent=1)


def _state_dict(source: Path) -> dict[str, Tensor]:
    try:
        found = torch.load(source, map_location="cpu", weights_only=True)
    except Exception as error:  # what a damaged or a malicious file makes it raise
        reason = str(error).split("\n", 1)[0][:200]
        raise InputError(
            "weights-pickle",
            where=source.name,
            value=reason,
            rule="nothing but tensors is read from a file of torch.save",
            remedy="install the package again",
        ) from None
    return {name: value for name, value in found.items() if not name.endswith("num_batches_tracked")}


def _in_order(values: Mapping[str, Tensor], network: Cnn, where: str) -> dict[str, Tensor]:
    """The tensors under the network's own names."""
    from quantkit.model import cnn

    wanted = cnn.tensors(network)
    if len(values) != len(wanted):
        raise InputError(
            "weights-names",
            where=where,
            value=f"{len(values)} tensors",
            rule=f"the network has {len(wanted)}",
            remedy="install the version of the package that is asked for",
        )
    for theirs, ours in zip(values, wanted, strict=True):
        if theirs.rpartition(".")[2] != ours.rpartition(".")[2]:
            raise InputError(
                "weights-names",
                where=where,
                value=f"{theirs} where {ours} should be",
                rule="both list their tensors in the order of their layers",
                remedy="install the version of the package that is asked for",
            )
    return dict(zip(wanted, values.values(), strict=True))
