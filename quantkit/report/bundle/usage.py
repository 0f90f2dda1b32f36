"""Commands to check, run, measure and rebuild a bundle, for page, terminal and card."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Any

import yaml

from quantkit import plugins
from quantkit.bundle import CodeEntry, Manifest
from quantkit.content import near
from quantkit.errors import InputError, install
from quantkit.exporters import LayerSpec, load_exporter
from quantkit.model import layouts
from quantkit.model.layouts import VLLM_ALONE, Layout
from quantkit.model.source.files import remembered
from quantkit.planning.assigned import EXPERTS, EXPERTS_KEPT, LEFT_OUT
from quantkit.report.kit.tree import Code
from quantkit.scheme import ActivationScheme, WeightScheme

PROMPT = "The capital of France is"
_CLASSES = {"decoder": "AutoModelForCausalLM", "encoder": "AutoModel", "network": "AutoModelForImageClassification"}
# prefixes of references; a bundle keeps only the name behind them
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
class Files:
    """Places of the user's own files, as typed; None: the current folder, under the names in the bundle.

    Attributes:
        known: True if the cache knows the model's place, so that `measure` needs no `--baseline`.
    """

    model: str | None = None
    calibration: str | None = None
    known: bool = False


_AS_NAMED = Files()


def here(manifest: Manifest, model: str | None = None, calibration: str | None = None) -> Files:
    """Return the places on this machine: those typed, else what the cache knows of the model."""
    source = manifest.model.source
    place = next(iter(remembered(source.base or source.sha256)), None)
    return Files(model or (near(place) if place else None), calibration, place is not None)


def has(manifest: Manifest, place: str) -> bool:
    """Tell if the bundle has a file, or a folder with files (`onnx/`)."""
    folder = place.endswith("/")
    return any(entry.path == place or (folder and entry.path.startswith(place)) for entry in manifest.files)


def packed(manifest: Manifest) -> bool:
    """Tell if the bundle holds a packed checkpoint."""
    return layout(manifest) is not None


def layout(manifest: Manifest) -> Layout | None:
    """Return the layout of the bundle's packed checkpoint; None without one."""
    steps: list[tuple[str, Any]] = [pair for step in manifest.recipe.get("export", []) for pair in step.items()]
    stored = (options for name, options in steps if plugins.EXPORTERS.load(name).stores == "tensors")
    name = next((str((options or {}).get("layout", "pack-quantized")) for options in stored), "")
    if not (manifest.layers and has(manifest, "model/")) or name not in layouts.names():
        return None
    return layouts.load(name)


def libraries(manifest: Manifest) -> list[str]:
    """List the pip packages required by transformers for the checkpoint."""
    stored = layout(manifest)
    return [name.replace("_", "-") for name in stored.libraries] if stored is not None else []


def commands(manifest: Manifest) -> list[Code]:
    """List the commands for the bundle, to run in its folder."""
    decodes = manifest.model.kind == "decoder"
    listed = [Code("Check all files, and load the model again", "quantkit verify .")]
    if has(manifest, "model/"):
        auto, needs = auto_class(manifest), " ".join(["transformers", *libraries(manifest)])
        text = any(entry.role == "tokenizer" for entry in manifest.files)
        lines = [f"# pip install {needs}", f"from transformers import {auto}{', AutoTokenizer' if text else ''}", ""]
        lines.append(f'model = {auto}.from_pretrained("./model")')
        lines += ['tokenizer = AutoTokenizer.from_pretrained("./model")'] if text else []
        if not any(decision.code == VLLM_ALONE for decision in manifest.decisions):
            listed.append(Code("transformers", "\n".join(lines), "python"))
    if has(manifest, "onnx/"):
        lines = [f"# {install('onnx')}", *generate(manifest, ".", "onnxruntime")]
        listed.append(Code("ONNX Runtime", "\n".join([*lines, *measure(manifest)])))
    if (runtime := file_runtime(manifest)) is not None:
        lines = [f"# {install('gguf')}", *generate(manifest, ".", runtime), _measured(manifest, ".", runtime)]
        lines += ["llama-cli -m gguf/model.gguf", "llama-server -m gguf/model.gguf"]
        listed.append(Code("llama.cpp", "\n".join(lines)))
    if has(manifest, "engine/"):
        lines = [f"# {install('tensorrt')}; on the GPU that it was built for"]
        lines += generate(manifest, ".", engine_runtime(manifest)) if decodes else _measure_engine(manifest, ".")
        listed.append(Code("TensorRT", "\n".join(lines)))
    if has(manifest, "onnx/genai_config.json") and manifest.writes:
        listed.append(Code("onnxruntime-genai", _GENAI, "python"))
    if lines := serve(manifest):
        listed.append(Code("vLLM", "\n".join(lines)))
    return listed


def serve(manifest: Manifest, place: str = ".") -> list[str]:
    """Return the command to serve the checkpoint; nothing if vLLM has no kernel for a layer in its layout."""
    stored, schemes = layout(manifest), (WeightScheme.model_validate(layer.scheme) for layer in manifest.layers)
    if manifest.model.kind != "decoder" or stored is None or not all(map(stored.served, schemes)):
        return []
    return [*([f"# {stored.serving}"] if stored.serving else []), f"vllm serve {place}/model"]


def on_target(manifest: Manifest, place: str = ".") -> list[str]:
    """Return the command to serve the checkpoint on its target; nothing for a target without vLLM."""
    return serve(manifest, place) if "vllm" in (manifest.target or {}).get("runtimes", []) else []


def recommend(manifest: Manifest, files: Files = _AS_NAMED) -> str:
    """Return the command to rank recipes for the model; "" for a graph or GGUF file, which `recommend` cannot read."""
    kind, _, name = manifest.model.source.ref.partition(":")
    target = (manifest.target or {}).get("name")
    if manifest.model.kind == "network" or kind == _MODULE or name.lower().endswith((".onnx", ".gguf")) or not target:
        return ""
    model = {"alias": name, _PATH: files.model or f"./{name}"}.get(kind, manifest.model.source.ref)
    return f"quantkit recommend {shlex.quote(model)} --target {shlex.quote(target)}"


def measure(manifest: Manifest, place: str = ".", files: Files = _AS_NAMED) -> list[str]:
    """Return the commands to measure and judge the speed; nothing if no runtime of the target can be timed.

    An engine is timed on its GPU: a decoder's by quantkit, others by the library's own tool.

    Args:
        place: the bundle, quoted for a shell.
        files: places of the model and the calibration set; a bundle keeps only their names.
    """
    export = []
    if not has(manifest, "onnx/"):
        if has(manifest, "engine/"):
            return ["# on the GPU that the engine is for", *_measure_engine(manifest, place, files)]
        if (runtime := file_runtime(manifest)) is not None:
            return [_measured(manifest, place, runtime, files)]
        if not _exportable(manifest):
            return []
        export = [f"quantkit export {place} --to onnx"]
    return [*export, _measured(manifest, place, "onnxruntime", files)]


def _exportable(manifest: Manifest) -> bool:
    """Tell whether an ONNX graph can be made from the checkpoint, for a runtime of the target."""
    graphs, read = map(load_exporter, plugins.exporters_that_store("graph")), (manifest.target or {}).get("runtimes")
    exporter = next(one for one in graphs if "onnxruntime" in one.runtimes)
    if manifest.sees or experts(manifest) or not packed(manifest) or (read and not set(exporter.runtimes) & set(read)):
        return False
    if any(taken.code == LEFT_OUT and taken.where == exporter.name for taken in manifest.decisions):
        return False
    schemes = {layer.name: WeightScheme.model_validate(layer.scheme) for layer in manifest.layers}
    inputs = {layer.name: layer.activations for layer in manifest.layers if layer.activations is not None}
    activations = {name: ActivationScheme.model_validate(scheme) for name, scheme in inputs.items()}
    try:
        exporter.holds(exporter.Options(), exporter.runtimes[0], LayerSpec(schemes, activations=activations))
    except InputError:
        return False
    return True


def experts(manifest: Manifest) -> list[str]:
    """List the expert layers of a bundle, which only some tokens pass through."""
    stacked = [decision.where for decision in manifest.decisions if decision.code in (EXPERTS, EXPERTS_KEPT)]
    return stacked + [layer.name for layer in manifest.layers if ".experts." in layer.name]


def _measured(manifest: Manifest, place: str, runtime: str, files: Files = _AS_NAMED) -> str:
    return " ".join([f"quantkit measure {place} --runtime {runtime}", *against(manifest, files)])


def against(manifest: Manifest, files: Files = _AS_NAMED) -> list[str]:
    """Return the options of `measure` for files outside the bundle: the model, and the scoring set of a graph."""
    kind, _, name = manifest.model.source.ref.partition(":")
    adapters = manifest.model.source.adapters
    gone = kind == _PATH and not files.known and not adapters
    baseline = [f"--baseline {shlex.quote(files.model or f'./{name}')}"] if gone else []
    graph = manifest.model.kind == "network" or kind == _MODULE or name.lower().endswith(".onnx")
    return [*baseline, *(_calibration(manifest, files) if graph else [])]


def _calibration(manifest: Manifest, files: Files) -> list[str]:
    """Return the option for a calibration set in the user's own file."""
    kind, _, name = str((manifest.recipe.get("calibration") or {}).get("set", "")).partition(":")
    return [f"--calibration {shlex.quote(files.calibration or f'./{name}')}"] if kind == _PATH else []


def _measure_engine(manifest: Manifest, place: str, files: Files = _AS_NAMED) -> list[str]:
    runs = engine_runtime(manifest)
    built = [entry.path for entry in manifest.files if entry.path.endswith(".engine")]
    export = [] if built else [f"quantkit export {place} --to tensorrt"]
    if manifest.model.kind == "decoder":
        return [*export, _measured(manifest, place, runs, files)]
    path = built[0] if built else "engine/smNN.engine"
    tool = {"tensorrt": "trtexec"}.get(runs, runs)
    return [*export, f"{tool} --loadEngine={path if place == '.' else f'{place}/{path}'}"]


def engine_runtime(manifest: Manifest) -> str:
    """Name the runtime of the bundle's engines."""
    steps: list[dict[str, Any]] = manifest.recipe.get("export", [])
    engines = (step[name] for name in plugins.exporters_that_store("engine") for step in steps if name in step)
    return str((next(engines, None) or {}).get("library", "tensorrt_rtx"))


def file_runtime(manifest: Manifest) -> str | None:
    """Name the runtime of a single-file bundle; None for any other."""
    exporters = map(load_exporter, plugins.exporters_that_store("file"))
    return next((exporter.runtimes[0] for exporter in exporters if has(manifest, f"{exporter.place}/")), None)


def generate(manifest: Manifest, place: str, runtime: str | None = None) -> list[str]:
    """Return the command to continue a prompt, or to write down a recording; nothing without a tokenizer."""
    asked = "--audio recording.wav" if manifest.hears else f'--prompt "{PROMPT}"'
    command = f"quantkit generate {place}{f' --runtime {runtime}' if runtime else ''} {asked}"
    return [command] if manifest.writes else []


def auto_class(manifest: Manifest) -> str:
    """Name the class of transformers that loads such a model."""
    if manifest.hears:
        return "AutoModelForSpeechSeq2Seq"
    return "AutoModelForImageTextToText" if manifest.sees else _CLASSES[manifest.model.kind]


def again(manifest: Manifest) -> Code:
    """Return the command to compile the bundle again; files, folders and modules are named without their places."""
    kind, _, rest = manifest.model.source.ref.partition(":")
    files, code = _calibration(manifest, _AS_NAMED), bool(_files_of_code(manifest))
    adapters = (adapter.ref for adapter in manifest.model.source.adapters)
    files += [f"--adapter {shlex.quote(ref.replace(f'{_PATH}:', './', 1))}" for ref in adapters]
    if kind == _MODULE:
        calibration = "".join(f", calibration={file.partition(' ')[2]!r}" for file in files)
        lines = ["import quantkit", "", f"module = ...  # a {rest}, and what it is called with: [n, ...] each"]
        more = f"{calibration}{', allow_code=True' if code else ''}"
        call = f'quantkit.compile(module, "./recipe.yaml", example_inputs=...{more})'
        return Code("in Python", "\n".join([*lines, call]), "python")
    model = {"alias": rest, _PATH: f"./{rest}"}.get(kind, manifest.model.source.ref)
    files += ["--allow-code"] if code else []
    return Code("the command", " ".join(["quantkit compile", shlex.quote(model), "--recipe ./recipe.yaml", *files]))


def recipe(manifest: Manifest) -> str:
    """Write the recipe as a file, with comments on the code files that must be beside it."""
    beside = [f"# {entry.path} lies beside this file; its sha256: {entry.sha256}" for entry in _files_of_code(manifest)]
    return "\n".join([*beside, as_yaml({key: value for key, value in manifest.recipe.items() if key != "name"})])


def _files_of_code(manifest: Manifest) -> list[CodeEntry]:
    return [entry for entry in manifest.code if entry.path is not None]


def as_yaml(data: Any) -> str:
    """Write YAML in the order of the keys, without a final newline."""
    text: str = yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=1000)
    return text.rstrip("\n")
