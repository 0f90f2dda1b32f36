"""Copy the files that quantization does not change: tokenizer, chat template, licence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit import limits
from quantkit.errors import InputError
from quantkit.model.source import pretrained
from quantkit.model.source.files import files_of_modules
from quantkit.model.source.weights import INDEX, checked_file, strict_json, write_atomic, write_json

if TYPE_CHECKING:
    from quantkit.model.source.open import Source

# weights in other forms, code, and files that describe the source instead of the result
_LEFT_BEHIND = {
    *(".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".h5", ".msgpack", ".ot", ".onnx", ".xml"),
    *(".gguf", ".tflite", ".npz", ".npy", ".mlmodel", ".tar", ".gz", ".zip", ".py", ".pyc", ".so"),
    # files that our own commands write into the current folder
    *(".html", ".dat", ".log"),
}
_TEMPLATES = "additional_chat_templates"
_REPLACED = {"config.json", "README.md", INDEX}


def carry(source: Source, folder: Path, config: Mapping[str, Any] | None = None) -> None:
    """Write config.json and copy the unchanged files.

    Args:
        config: content of config.json; None: the source's, without its storage of weights.

    Raises Stopped: `disk-full`.
    """
    if config is None:
        config = {key: value for key, value in source.config.items() if key != "quantization_config"}
    trusted = source.trust_remote_code
    write_json(folder / "config.json", pretrained.settled(dict(config), source.path, trusted=trusted))
    for path, name in list(carried(source.path, code=trusted)):  # the result may be below the source
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        data = limits.read(path, limits.DATA)
        if name in pretrained.NAMING and b'"auto_map"' in data:
            stated = strict_json(data, name, "config-invalid")
            write_json(folder / name, pretrained.settled(stated, source.path, trusted=trusted))
        else:
            write_atomic(folder / name, [data])


def carried(folder: Path, *, code: bool = False) -> Iterator[tuple[Path, str]]:
    """List (file, name in the new folder) of files to copy: tokenizer, generation config, template, licence.

    Links that lead out of the folder, hidden files, code and other weights are skipped. So is every folder that no
    library reads as a part of the model: our results, checkpoints of a training, environments. Folders in
    `modules.json` are part of the model, with their weights.

    Args:
        code: whether to copy the model's own code, because the user trusts it.
    """
    if code:
        yield from ((path, path.name) for path in pretrained.code_files(folder))
    modules = {name: path for path, name in files_of_modules(folder)}
    templates = folder / _TEMPLATES
    for place in [folder] if templates.is_symlink() else [folder, templates]:
        for path in sorted(path for path in place.glob("*") if path.is_file()):
            name, relative = path.name, path.relative_to(folder).as_posix()
            # `model.onnx_data` and the like: weights of an ONNX file
            weights = name.endswith(".index.json") or ".onnx" in name.lower() or path.suffix.lower() in _LEFT_BEHIND
            if not (weights or relative in {*_REPLACED, *modules} or name.startswith(".")):
                with suppress(InputError):
                    yield checked_file(path.parent, name), relative
    yield from ((path, name) for name, path in modules.items())
