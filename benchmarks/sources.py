"""Quantized sources: every weight is opened to what its library makes of it, bit for bit; then it is quantized again.

    python benchmarks/sources.py --work DIR                         all layouts, both models, equality alone
    ... --recipes awq-int4 int8-dynamic                             and the harm of two recipes on each source

The models are copied in bfloat16 first, as people bring them. quantkit writes the layouts of compressed-tensors, GPTQ
and bitsandbytes by round to nearest; the script writes `fp8` in blocks of 128 x 128 and AWQ, which quantkit does not.
Opened weights are held against plain transformers (`from_pretrained(dtype="auto")`, dequantized by the library), and
where it needs a GPU or a library that is not here, against the references of the tests: `Fp8Dequantize`'s product with
the last blocks cut off (SmolLM2's 576 rows), GPTQModel's and AutoAWQ's unpacking word by word. A bundle's KL is against
the source as it runs, in nats per token of the default text; plain transformers then finds its KL from the floats. The
layout `bfloat16` is those floats: the difference is the harm of having been quantized before.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.process import compiled, environment, scored
from harness.record import parsing, record, show, verdicts

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

MODELS = ("smollm2-135m", "qwen2.5-coder-0.5b")
_CHANNEL, _GROUP64 = {"granularity": "channel"}, {"granularity": "group", "group": 64}
# layout -> its name, scheme of the weights, kind of the rounded inputs
WRITTEN: dict[str, tuple[str, dict[str, Any], str]] = {
    "int4": ("pack-quantized", {"format": "int4", "symmetric": False, "scale": "bfloat16", **_GROUP64}, ""),
    "int8": ("int-quantized", {"format": "int8", "scale": "bfloat16", **_CHANNEL}, "int"),
    "fp8": ("float-quantized", {"format": "fp8_e4m3", "scale": "bfloat16", **_CHANNEL}, "float"),
    "nvfp4": ("nvfp4-pack-quantized", {"format": "nvfp4"}, ""),
    "mxfp4": ("mxfp4-pack-quantized", {"format": "mxfp4"}, ""),
    "nf4": ("bitsandbytes", {"format": "nf4", "scale": "double"}, ""),
    "gptq": ("gptq", {"format": "int4", **_GROUP64}, ""),
    "gptq-v2": ("gptq-v2", {"format": "int4", "symmetric": False, **_GROUP64}, ""),
}
INPUTS = {"num_bits": 8, "symmetric": True, "strategy": "token", "dynamic": True}
FLOATS, LAYOUTS = "bfloat16", (*WRITTEN, "fp8-block", "awq")
GROUP, BLOCK = 64, 128


def in_bfloat16(model: str, folder: Path) -> Path:
    """Copy a model in bfloat16."""
    from safetensors.torch import save_file

    from quantkit.model.source.open import open_model

    source = open_model(model)
    shutil.copytree(source.path, folder, ignore=shutil.ignore_patterns("*.safetensors*", "provenance.json"))
    tensors = {name: source.weights.read(name).bfloat16() for name in source.weights.entries}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _restate(folder, dtype="bfloat16")
    return folder


def _restate(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def source(model: Path, layout: str, folder: Path) -> Path:
    """Write a model in a layout."""
    if layout in WRITTEN:
        from exported import export

        from quantkit.scheme import WeightScheme

        name, fields, inputs = WRITTEN[layout]
        written = export(model, folder, WeightScheme(**fields), norms=1.0, layout=name).model
        if inputs:
            stated = json.loads((written / "config.json").read_text())["quantization_config"]
            for group in stated["config_groups"].values():
                group["input_activations"] = {**INPUTS, "type": inputs}
            _restate(written, quantization_config=stated)
        return written
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, folder)
    change, stated = {"fp8-block": (_in_blocks, FP8), "awq": (_in_words, AWQ)}[layout]
    tensors: dict[str, Any] = {}
    for name, value in load_file(model / "model.safetensors").items():
        tensors |= change(name, value) if name.endswith("_proj.weight") else {name: value}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _restate(folder, quantization_config=stated)
    return folder


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}


def _in_blocks(name: str, value: Any) -> dict[str, Any]:
    import torch

    rows, columns = value.shape
    wide = torch.nn.functional.pad(value.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    parts = wide.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    scale = parts.abs().amax(dim=(1, 3)) / 448
    codes = (parts / scale[:, None, :, None]).flatten(2).flatten(0, 1)[:rows, :columns]
    return {name: codes.to(torch.float8_e4m3fn).contiguous(), f"{name}_scale_inv": scale}


def _in_words(name: str, value: Any) -> dict[str, Any]:
    from reference import plain_awq

    parts = value.float().T.unflatten(0, (-1, GROUP))  # [G, group, N]
    low, high = parts.amin(1).clamp(max=0), parts.amax(1).clamp(min=0)
    scales = ((high - low) / 15).half()
    zeros = (-low / scales.float()).round().clamp(0, 15)
    codes = ((parts / scales.float()[:, None]).round() + zeros[:, None]).clamp(0, 15).flatten(0, 1)
    prefix = name.removesuffix(".weight")
    stored = {"qweight": plain_awq.packed(codes.int()), "qzeros": plain_awq.packed(zeros.int()), "scales": scales}
    return {f"{prefix}.{part}": tensor.contiguous() for part, tensor in stored.items()}


def expected(layout: str, folder: Path) -> tuple[str, Callable[[str], Any]]:
    """Return who says what the weights are, and a function from a tensor's name to it."""
    import torch
    from safetensors.torch import load_file

    stored = load_file(folder / "model.safetensors")

    def of_gptq(name: str) -> Any:
        from reference import plain_gptq

        parts = (
            stored[name.removesuffix("weight") + part].numpy() for part in ("qweight", "qzeros", "scales", "g_idx")
        )
        version = 1 if layout == "gptq" else 2
        return torch.from_numpy(plain_gptq.weight(*parts, bits=4, version=version)).T

    def of_awq(name: str) -> Any:
        from reference import plain_awq

        words, zeros, scales = (stored[name.removesuffix("weight") + part] for part in ("qweight", "qzeros", "scales"))
        return plain_awq.weight(words, zeros, scales, GROUP).T

    def of_blocks(name: str) -> Any:
        from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight

        return _dequantize_fp8_weight(stored[name], stored[f"{name}_scale_inv"], [BLOCK, BLOCK], torch.float32)

    coded = [stored[name.removesuffix("_scale_inv")] for name in stored if name.endswith("_scale_inv")]
    ragged = any(size % BLOCK for codes in coded for size in codes.shape)
    if layout.startswith("gptq"):
        return "GPTQModel's unpacking", of_gptq
    if layout == "awq":
        return "AutoAWQ's unpacking", of_awq
    if layout == "fp8-block" and ragged:
        return "transformers' product, cut off", of_blocks
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    if hasattr(model, "ct_decompress_hook"):
        model.hf_quantizer.compressor.decompress_model(model)
    if layout == "nf4":
        model.dequantize()
    parameters = {name: value.detach() for name, value in model.named_parameters()}
    return "transformers", parameters.__getitem__


def held(layout: str, folder: Path) -> dict[str, Any]:
    """Compare every opened weight of a source."""
    import torch

    from quantkit.model.source.open import open_model

    opened = open_model(str(folder))
    assert opened.quantization is not None
    who, value = expected(layout, folder)
    names = list(opened.quantization.opened)
    dtype = getattr(torch, opened.dtype)
    equal = sum(torch.equal(opened.weights.read(name), value(name).to(dtype)) for name in names)
    about = {"was": opened.was, "bytes": opened.bytes, "floats": opened.weights.total_bytes(), "against": who}
    return {**about, "tensors": len(names), "equal": equal}


def rows(models: list[str], layouts: list[str], recipes: list[str], place: Path) -> list[dict[str, Any]]:
    """Write, open and quantize again; figures in `place` are not taken again."""
    file = place / "rows.json"
    taken: dict[str, dict[str, Any]] = json.loads(file.read_text()) if file.exists() else {}
    for model in models:
        floats = place / f"{model}-{FLOATS}"
        if not floats.exists():
            in_bfloat16(model, floats)
        for layout in layouts:
            folder = place / f"{model}-{layout}"
            written = folder / "model" if layout in WRITTEN else folder
            if not (written / "config.json").exists():
                written = source(floats, layout, folder)
            row = taken.setdefault(f"{model} {layout}", {"model": model, "layout": layout})
            if "equal" not in row and layout != FLOATS:
                row |= held(layout, written)
            for recipe in (one for one in recipes if one not in row):
                again = place / f"{model}-{layout}--{recipe}"
                shutil.rmtree(again, ignore_errors=True)
                # on one thread: on several, sums end in another bit, and rounded inputs in another code
                changes = ("--set=export=[{checkpoint: {}}]", "--no-speed", "--no-vllm", "--resume")
                result, done = compiled(written, recipe, again, *changes, env=environment(1))
                kl = next(one for one in result["measurements"] if one["name"] == "accuracy.kl")
                row |= {recipe: kl["value"], f"{recipe} ci95": kl["ci95"], f"{recipe} seconds": done.wall}
                (far,) = scored(str(floats), {recipe: str(again / "model")}, {"prose-en": {"set": "prose-en"}})
                row |= {f"{recipe} from floats": far["kl"], f"{recipe} from floats se": far["kl_se"]}
                shutil.rmtree(again, ignore_errors=True)
                file.write_text(json.dumps(taken))
            file.write_text(json.dumps(taken))
            print(json.dumps(row), flush=True)
    return list(taken.values())


def main() -> int:
    parser = parsing(__doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=(FLOATS, *LAYOUTS))
    parser.add_argument("--recipes", nargs="*", default=[], help="quantize each source again")
    parser.add_argument("--work", type=Path, required=True, help="sources and figures; a later run goes on there")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    found = rows(arguments.models, arguments.layouts, arguments.recipes, arguments.work)
    claim = "a quantized source is opened to what its library makes of it, bit for bit, and quantized again"
    columns = {"model": "model", "layout": "layout", "was": "source", "bytes": "bytes:,", "against": "held against"}
    columns |= {
        "tensors": "tensors:d",
        "equal": "equal:d",
        **{recipe: f"{recipe}, KL:.4f" for recipe in arguments.recipes},
        **{f"{recipe} from floats": "from the floats:.4f" for recipe in arguments.recipes},
    }
    show(claim, found, columns)
    record("sources", claim, found, {"dtype": "bfloat16", "recipes": arguments.recipes})
    opened = [row for row in found if row["layout"] != FLOATS]
    return verdicts({"every opened weight is equal": all(row["equal"] == row["tensors"] > 0 for row in opened)})


if __name__ == "__main__":
    raise SystemExit(main())
