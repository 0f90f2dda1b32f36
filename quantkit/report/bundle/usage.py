"""What to type: how a bundle is checked, run, measured, and made again. Page, terminal and card share it."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Any

import yaml

from quantkit import plugins
from quantkit.bundle import CodeEntry, Manifest
from quantkit.exporters import load_exporter
from quantkit.model import layouts
from quantkit.model.layouts import Layout
from quantkit.model.sizes.assigned import EXPERTS, EXPERTS_KEPT
from quantkit.scheme import WeightScheme

PROMPT = "The capital of France is"
_CLASSES = {"decoder": "AutoModelForCausalLM", "encoder": "AutoModel", "network": "AutoModelForImageClassification"}
# how references begin of which a bundle holds the name alone
_PATH, _MODULE = "path", "module"
_GENAI = f"""# pip install onnxruntime-genai
import onnxruntime_genai as og

model = og.Model("./onnx")
tokenizer = og.Tokenizer(model)
settings = og.GeneratorParams(model)
settings.set_search_options(max_length=64)
generator = og.Generator(model, settings)
generator.append_tokens(tokenizer.encode("{PROMPT}"))
while not generator.is_done():
    generator.generate_next_token()
print(tokenizer.decode(generator.get_sequence(0)))"""


@dataclass(frozen=True)
class Command:
    """What to type, and what for.

    Args:
        label: what it does, or in what.
        text: to be copied, one or several lines.
        language: of the text: `bash` or `python`.
    """

    label: str
    text: str
    language: str = "bash"


@dataclass(frozen=True)
class Files:
    """Where files of the user's own lie, as typed; None: in this folder, under the names that a bundle has."""

    model: str | None = None
    calibration: str | None = None


_AS_NAMED = Files()


def has(manifest: Manifest, place: str) -> bool:
    """Whether there is such a file, or a file in such a folder (`onnx/`)."""
    return any(
        entry.path == place or (place.endswith("/") and entry.path.startswith(place)) for entry in manifest.files
    )


def packed(manifest: Manifest) -> bool:
    """Whether it holds a checkpoint of codes."""
    return layout(manifest) is not None


def layout(manifest: Manifest) -> Layout | None:
    """How its checkpoint stores codes; None: it holds none."""
    name = _layout(manifest)
    if not (manifest.layers and has(manifest, "model/")) or name not in layouts.names():
        return None
    return layouts.load(name)


def libraries(manifest: Manifest) -> list[str]:
    """What transformers loads the checkpoint with, as pip calls it."""
    found = layout(manifest)
    return [name.replace("_", "-") for name in found.libraries] if found is not None else []


def commands(manifest: Manifest) -> list[Command]:
    """All that can be done with it, to be typed in its folder."""
    found = [Command("Check every byte, and load it again", "quantkit verify .")]
    if has(manifest, "model/"):
        found.append(Command("transformers", load(manifest), "python"))
    if has(manifest, "onnx/"):
        lines = ["# pip install 'quantkit[onnx]'"]
        lines += [generate(".", "onnxruntime")] if manifest.model.kind == "decoder" else []
        found.append(Command("ONNX Runtime", "\n".join([*lines, *measure(manifest)])))
    if (runtime := file_runtime(manifest)) is not None:
        lines = ["# pip install 'quantkit[gguf]'", generate(".", runtime), _measured(manifest, ".", runtime)]
        found.append(Command("llama.cpp", "\n".join([*lines, "llama-cli -m gguf/model.gguf"])))
    if has(manifest, "engine/"):
        lines = ["# pip install 'quantkit[tensorrt]'; on the GPU that it was built for"]
        decodes = manifest.model.kind == "decoder"
        lines += [generate(".", engine_runtime(manifest))] if decodes else _measure_engine(manifest, ".")
        found.append(Command("TensorRT", "\n".join(lines)))
    if has(manifest, "onnx/genai_config.json"):
        found.append(Command("onnxruntime-genai", _GENAI, "python"))
    stored = layout(manifest)
    if stored is not None and _served(manifest, stored) and manifest.model.kind == "decoder":
        said = [f"# {stored.serving}"] if stored.serving else []
        found.append(Command("vLLM", "\n".join([*said, "vllm serve ./model"])))
    return found


def measure(manifest: Manifest, place: str = ".", files: Files = _AS_NAMED) -> list[str]:
    """What measures its speed and judges it; `place` is the bundle, as a shell reads it.

    An engine is timed on its GPU: a decoder's by us, any other by its library's own tool.

    Args:
        files: where the model and the calibration set lie, for those that a bundle holds the name of alone.
    """
    if has(manifest, "engine/") and not has(manifest, "onnx/"):
        return ["# on the GPU that the engine is for", *_measure_engine(manifest, place, files)]
    if not has(manifest, "onnx/") and (runtime := file_runtime(manifest)) is not None:
        return [_measured(manifest, place, runtime, files)]
    if not has(manifest, "onnx/") and experts(manifest):
        return []  # no one graph is traced of experts, and so none is timed
    export = [] if has(manifest, "onnx/") else [f"quantkit export {place} --to onnx"]
    return [*export, _measured(manifest, place, "onnxruntime", files)]


def experts(manifest: Manifest) -> list[str]:
    """The experts of a bundle: a token's way through it depends on the token."""
    stacked = [each.where for each in manifest.decisions if each.code in (EXPERTS, EXPERTS_KEPT)]
    return stacked + [layer.name for layer in manifest.layers if ".experts." in layer.name]


def _measured(manifest: Manifest, place: str, runtime: str, files: Files = _AS_NAMED) -> str:
    return " ".join([f"quantkit measure {place} --runtime {runtime}", *against(manifest, files)])


def against(manifest: Manifest, files: Files = _AS_NAMED) -> list[str]:
    """What `measure` asks for where a bundle does not say where it lies: the model, and what a graph is scored on."""
    kind, _, name = manifest.model.source.ref.partition(":")
    found = [f"--baseline {shlex.quote(files.model or f'./{name}')}"] if kind == _PATH else []
    graph = manifest.model.kind == "network" or kind == _MODULE or name.lower().endswith(".onnx")
    return [*found, *(_calibration(manifest, files) if graph else [])]


def _calibration(manifest: Manifest, files: Files) -> list[str]:
    """The set that a recipe cannot name, since it is a file of somebody's own."""
    kind, _, name = str((manifest.recipe.get("calibration") or {}).get("set", "")).partition(":")
    return [f"--calibration {shlex.quote(files.calibration or f'./{name}')}"] if kind == _PATH else []


def _measure_engine(manifest: Manifest, place: str, files: Files = _AS_NAMED) -> list[str]:
    runs = engine_runtime(manifest)
    built = [entry.path for entry in manifest.files if entry.path.endswith(".engine")]
    found = [] if built else [f"quantkit export {place} --to tensorrt"]
    if manifest.model.kind == "decoder":
        return [*found, " ".join([f"quantkit measure {place} --runtime {runs}", *against(manifest, files)])]
    tool = {"tensorrt": "trtexec"}.get(runs, runs)
    path = built[0] if built else "engine/smNN.engine"
    return [*found, f"{tool} --loadEngine={path if place == '.' else f'{place}/{path}'}"]


def engine_runtime(manifest: Manifest) -> str:
    """That builds and runs its engines."""
    steps: list[dict[str, Any]] = manifest.recipe.get("export", [])
    engines = (step[name] for name in plugins.exporters_that_store("engine") for step in steps if name in step)
    return str((next(engines, None) or {}).get("library", "tensorrt_rtx"))


def file_runtime(manifest: Manifest) -> str | None:
    """That reads the one file that it holds everything in; None: it has no such file."""
    for name in plugins.exporters_that_store("file"):
        exporter = load_exporter(name)
        if has(manifest, f"{exporter.place}/"):
            return exporter.runtimes[0]
    return None


def generate(place: str, runtime: str | None = None) -> str:
    """What lets it go on from a prompt."""
    return f'quantkit generate {place}{f" --runtime {runtime}" if runtime else ""} --prompt "{PROMPT}"'


def load(manifest: Manifest) -> str:
    """Python that loads the checkpoint and its tokenizer."""
    auto = auto_class(manifest)
    needs = " ".join(["transformers", *libraries(manifest)])
    lines = [f"# pip install {needs}", f"from transformers import {auto}, AutoTokenizer", ""]
    lines += [f'model = {auto}.from_pretrained("./model")', 'tokenizer = AutoTokenizer.from_pretrained("./model")']
    return "\n".join(lines)


def auto_class(manifest: Manifest) -> str:
    """The class of transformers that loads such a model."""
    return _CLASSES[manifest.model.kind]


def again(manifest: Manifest) -> Command:
    """How to make it again; a file or folder is named as it was, wherever it stood, and a module by its class."""
    kind, _, rest = manifest.model.source.ref.partition(":")
    files = _calibration(manifest, _AS_NAMED)
    if kind == _MODULE:
        calibration = "".join(f", calibration={file.partition(' ')[2]!r}" for file in files)
        lines = ["import quantkit", "", f"module = ...  # a {rest}, and what it is called with: [n, ...] each"]
        allowed = ", allow_code=True" if _files_of_code(manifest) else ""
        call = f'quantkit.compile(module, "./recipe.yaml", example_inputs=...{calibration}{allowed})'
        return Command("in Python", "\n".join([*lines, call]), "python")
    model = {"alias": rest, _PATH: f"./{rest}"}.get(kind, manifest.model.source.ref)
    files += ["--allow-code"] if _files_of_code(manifest) else []
    return Command("the command", " ".join(["quantkit compile", shlex.quote(model), "--recipe ./recipe.yaml", *files]))


def recipe(manifest: Manifest) -> str:
    """The recipe as its file; above it, what of code has to lie beside it."""
    beside = [f"# {entry.path} lies beside this file; its sha256: {entry.sha256}" for entry in _files_of_code(manifest)]
    return "\n".join([*beside, as_yaml({key: value for key, value in manifest.recipe.items() if key != "name"})])


def _files_of_code(manifest: Manifest) -> list[CodeEntry]:
    return [entry for entry in manifest.code if entry.path is not None]


def as_yaml(data: Any) -> str:
    """YAML in the order of the keys, without the last newline."""
    text: str = yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=1000)
    return text.rstrip("\n")


def _served(manifest: Manifest, stored: Layout) -> bool:
    """Whether vLLM has a kernel for all its layers in this layout."""
    return all(stored.served(WeightScheme.model_validate(layer.scheme)) for layer in manifest.layers)


def _layout(manifest: Manifest) -> str:
    for step in manifest.recipe.get("export", []):
        for name, options in step.items():
            if plugins.EXPORTERS.load(name).stores == "tensors":
                return str((options or {}).get("layout", "pack-quantized"))
    return ""
