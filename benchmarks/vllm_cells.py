"""Which layouts and architectures vLLM takes from quantkit, and whether it computes what the checkpoint says.

    quantkit runtime add vllm --install
    python benchmarks/vllm_cells.py [--only llama/int4-g32 ...] [--place FOLDER, which a later run goes on from]
    python benchmarks/vllm_cells.py --mixtures      the mixtures of experts alone, with a record of their own
    python benchmarks/vllm_cells.py --vision        models with images alone, too: text in, under the names of the hub

Tiny random models are compiled, and a checkpoint's logits in vLLM are compared with the stream of the same checkpoint
in torch, in float32: the mean KL divergence over all positions. vLLM computes in bfloat16, which alone makes a
difference. Its floor is the larger of two: the float model in both, and the same checkpoint in transformers in both
dtypes. A cell is `right` if its KL is at most 3 times the floor, and `theirs` if a defect of vLLM explains more
(`THEIRS`). Two cells with a planted error, a doubled scale and exchanged groups, must be `wrong`.

A layout without a kernel has vLLM's own reason; a target whose runtime is vLLM must refuse it before work. Experts that
it refuses are loaded all the same, by its own loader and without a forward, and every expert's weight is compared with
ours (`harness/loaded_experts.py`): names, packing, the order of gate and up. With two experts exchanged, they differ.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import yaml
from harness import loaded_experts
from harness.process import helper
from harness.record import parsing, record, show, verdicts
from safetensors.torch import load_file, save_file

import quantkit
from quantkit.errors import GateError, InputError
from quantkit.planning import support
from quantkit.recipe import Recipe
from quantkit.runtimes import apart
from quantkit.runtimes.torch import RUNTIME as TORCH
from quantkit.runtimes.torch.reloaded import unread
from quantkit.runtimes.vllm import EAGER, OWN, environment
from quantkit.target import Target

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

FLOORS, TARGET, SAMPLES, TOKENS = 3.0, "cpu-x86-vnni", 6, 48
_SIZES = {"vocab_size": 260, "bos_token_id": 256, "eos_token_id": 257, "hidden_size": 256, "intermediate_size": 256}
_SIZES |= {"head_dim": 64, "max_position_embeddings": 128, "pad_token_id": 0}
_EXPERTS = {"moe_intermediate_size": 128}
# vLLM has kernels for these sizes; without the last two it expects DeepSeek-V2's router
_DEEPSEEK: dict[str, Any] = {"qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "kv_lora_rank": 512}
_DEEPSEEK |= {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
# name -> class and its changes
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "llama-float32": ("LlamaForCausalLM", {}),
    "llama-tied": ("LlamaForCausalLM", {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", {}),
    "gemma2": ("Gemma2ForCausalLM", {"query_pre_attn_scalar": 64}),
    "gemma3": ("Gemma3ForCausalLM", {"query_pre_attn_scalar": 64}),
    "phi3": ("Phi3ForCausalLM", {}),
    "mistral": ("MistralForCausalLM", {}),
    "olmo2": ("Olmo2ForCausalLM", {}),
    "granite": ("GraniteForCausalLM", {}),
    "mixtral": ("MixtralForCausalLM", {}),
    "qwen3-moe": ("Qwen3MoeForCausalLM", _EXPERTS),
    "gpt-oss": ("GptOssForCausalLM", {}),
    "granite4": ("GraniteMoeHybridForCausalLM", {"mamba_n_heads": 32, "mamba_d_head": 16}),  # rows in thirty-twos
    "llama4": ("Llama4ForCausalLM", {"attention_chunk_size": 128, "num_experts_per_tok": 1}),
    "deepseek-v3": ("DeepseekV3ForCausalLM", _EXPERTS | _DEEPSEEK),
    "llava": ("LlavaForConditionalGeneration", {}),
    "gemma3-vl": ("Gemma3ForConditionalGeneration", {"query_pre_attn_scalar": 64}),
    "qwen2.5-vl": (
        "Qwen2_5_VLForConditionalGeneration",
        {"rope_parameters": {"rope_type": "default", "mrope_section": [8, 12, 12], "rope_theta": 1e6}},
    ),
    "mistral3": ("Mistral3ForConditionalGeneration", {}),
}
_VISION = ("llava", "gemma3-vl", "qwen2.5-vl", "mistral3")


def _int4(group: int, symmetric: bool = True) -> dict[str, Any]:
    parts = {"granularity": "group", "group": group} if group else {"granularity": "channel"}
    return {"weights": {"format": "int4", **parts, "symmetric": symmetric}}


def _eight(form: str, weights: str, inputs: str = "", **more: Any) -> dict[str, Any]:
    block = {"group": 128} if weights == "block" else {}
    scheme: dict[str, Any] = {"weights": {"format": form, "granularity": weights, "scale": "float32", **block}}
    if inputs:
        fed = {"group": 128} if inputs == "group" else {}
        scheme["activations"] = {"format": form, "granularity": inputs, **fed, **more}
    return scheme


_STATIC, _KV = {"dynamic": False}, {"kv_cache": {"format": "fp8_e4m3", "granularity": "tensor"}}
# name -> layout and scheme
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"int4-g{group}": ("pack-quantized", _int4(group)) for group in (32, 64, 128)},
    "int4-channel": ("pack-quantized", _int4(0)),
    **{f"int4-g{group}-zeros": ("pack-quantized", _int4(group, symmetric=False)) for group in (32, 64, 128)},
    "int4-channel-zeros": ("pack-quantized", _int4(0, symmetric=False)),
    "gptq-g128": ("gptq", _int4(128)),
    "gptq-v2-g128": ("gptq-v2", _int4(128)),
    "gptq-v2-g128-zeros": ("gptq-v2", _int4(128, symmetric=False)),
    "gptq-int8": ("gptq", {"weights": {"format": "int8"}}),
    "int8-dynamic": ("int-quantized", _eight("int8", "channel", "token")),
    "int8-dynamic-zeros": ("int-quantized", _eight("int8", "channel", "token", symmetric=False)),
    "int8-static": ("int-quantized", _eight("int8", "channel", "tensor", **_STATIC)),
    "int8-static-zeros": ("int-quantized", _eight("int8", "channel", "tensor", symmetric=False, **_STATIC)),
    "int8-tensor-static": ("int-quantized", _eight("int8", "tensor", "tensor", **_STATIC)),
    "int8-weights": ("pack-quantized", _eight("int8", "channel")),
    "fp8-tensor-static": ("float-quantized", _eight("fp8_e4m3", "tensor", "tensor", **_STATIC)),
    "fp8-tensor-token": ("float-quantized", _eight("fp8_e4m3", "tensor", "token")),
    "fp8-channel-token": ("float-quantized", _eight("fp8_e4m3", "channel", "token")),
    "fp8-channel-static": ("float-quantized", _eight("fp8_e4m3", "channel", "tensor", **_STATIC)),
    "fp8-block": ("float-quantized", _eight("fp8_e4m3", "block", "group")),
    "fp8-weights": ("float-quantized", _eight("fp8_e4m3", "channel")),
    "kv-fp8": ("dense", _KV),
    "int4-g32-kv-fp8": ("pack-quantized", {**_int4(32), **_KV}),
    "int4-dense": ("dense", _int4(32)),
    "int3": ("pack-quantized", {"weights": {**_int4(64)["weights"], "format": "int3"}}),
    "int2": ("pack-quantized", {"weights": {**_int4(64)["weights"], "format": "int2"}}),
    "nf4": ("bitsandbytes", {"weights": {"format": "nf4"}}),
    "nvfp4": ("nvfp4-pack-quantized", {"weights": {"format": "nvfp4"}}),
    "mxfp4": ("mxfp4-pack-quantized", {"weights": {"format": "mxfp4"}}),
    "experts-mxfp4": ("mxfp4", {"weights": {"format": "mxfp4"}}),
}
# why vLLM is further away than its floor
_CUT = "its CPU kernel cuts keys and values to FP8 toward zero instead of rounding them: every normal value, compared"
THEIRS = {"llama/kv-fp8": _CUT, "llama/int4-g32-kv-fp8": _CUT}
_OF_ALL = ("int4-g32", "int8-dynamic")
# packed experts want AMX there (`CPUExpertsInt4`); their values do not
_MIXTURES = ("mixtral", "qwen3-moe", "llama4", "deepseek-v3", "granite4")
_PACKED = ("int4-g32", "int8-dynamic", "fp8-channel-token")
_PLANTED = "llama/int4-g32"


def cells() -> Iterator[tuple[str, str]]:
    """(model, layout), the float model first."""
    for model in MODELS:
        every = [name for name in LAYOUTS if name != "experts-mxfp4"]
        layouts = {"llama": every, "gpt-oss": ["int4-dense", "experts-mxfp4"]}.get(model, _OF_ALL)
        layouts = ["int4-dense", *_PACKED] if model in _MIXTURES else layouts
        yield from ((model, layout) for layout in ("float", *layouts))


def recipe(layout: str, model: str = "") -> dict[str, Any]:
    """Rounded to nearest: nothing but the layout matters here."""
    stored, scheme = LAYOUTS[layout]
    calibration = {"set": "prose-en", "samples": 4, "tokens": 32}
    text: dict[str, Any] = {"schema": 1, "summary": layout, "models": ["decoder"], "calibration": calibration}
    text |= {"scheme": scheme, "passes": [{"rtn": {}}] if "weights" in scheme else []}
    if layout == "experts-mxfp4":
        text["keep"] = ["embeddings", "lm_head", "*.self_attn.*"]
    readers = {"readers": "vllm"} if model in _MIXTURES and stored != "dense" else {}
    return {**text, "export": [{"checkpoint": {"layout": stored, **readers}}]}


def asked(layout: str) -> str:
    """The code with which a target refuses it whose only runtime is vLLM."""
    target = Target.load(TARGET)
    try:
        support.ask(
            Recipe.from_dict(recipe(layout), name=layout), target.model_copy(update={"runtimes": ["vllm"]}), "decoder"
        )
    except InputError as problem:
        return problem.code
    return ""


def source(model: str, place: Path) -> Path:
    """Write the tiny model where it is missing."""
    from zoo import shrink

    if not (folder := place / model / "float" / "model").exists():
        cls, changes = MODELS[model]
        dtype = torch.float32 if model == "llama-float32" else torch.bfloat16
        whole = shrink.config_of(shrink.named(cls)).to_dict()
        known = whole["text_config"] if model in _VISION else whole
        layers = {} if known.get("layer_types") else {"num_hidden_layers": 2}
        settings = {**{key: value for key, value in _SIZES.items() if key in known}, **layers, **changes}
        if model in _VISION:
            settings = {"text_config": {**known, **settings}}
            if "out_hidden_size" in whole["vision_config"]:
                settings["vision_config"] = {**whole["vision_config"], "out_hidden_size": _SIZES["hidden_size"]}
        shrink.tiny(cls, folder, dtype=dtype, **settings)
        if model in ("llava", "gemma3-vl"):  # as the hub's files have it, and vLLM reads it
            stored = load_file(folder / "model.safetensors")
            named = {name.replace("vision_tower.", "vision_tower.vision_model."): one for name, one in stored.items()}
            save_file(named, folder / "model.safetensors", metadata={"format": "pt"})
        shrink.tokenizer_of_bytes("<s> $A", (("t", "h"), ("th", "e"))).save_pretrained(folder)
    return folder


def compiled(model: str, layout: str, place: Path) -> dict[str, Any]:
    """Compile where it is missing; a refusal is an answer too."""
    bundle = place / model / layout
    path = place / model / f"{layout}.yaml"
    if not bundle.exists():
        path.write_text(yaml.safe_dump(recipe(layout, model)))
        shutil.rmtree(bundle.with_name(f"{layout}.partial"), ignore_errors=True)
        try:
            with patch("quantkit.pipeline.blocks.tokens.SCORED", 250):
                quantkit.compile(str(source(model, place)), path, out=bundle, speed=False, vllm=False)
        except InputError as problem:
            return {"result": "refused by us", "code": problem.code, "reason": problem.line()}
        except GateError as problem:
            return {"result": "wrong", "code": problem.code, "reason": problem.line()}
    return {}


def planted(place: Path) -> Iterator[tuple[str, Path]]:
    """The checkpoint with one scale doubled, and with two neighbouring groups' scales of a linear exchanged."""
    for name in ("doubled", "exchanged"):
        copy = place / "planted" / name
        shutil.copytree(place / _PLANTED / "model", copy, dirs_exist_ok=True)
        tensors = load_file(copy / "model.safetensors")
        key = next(key for key in sorted(tensors) if key.endswith("down_proj.weight_scale"))
        if name == "doubled":
            tensors[key][0, 0] *= 2
        else:
            tensors[key][:, :2] = tensors[key][:, :2].flip(1)
        save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
        yield name, copy


def kl(left: torch.Tensor, right: torch.Tensor) -> float:
    """Mean KL divergence from the left logits to the right ones."""
    ours, theirs = (one.double().log_softmax(-1) for one in (left, right))
    return float((ours.exp() * (ours - theirs)).sum(-1).mean())


def is_for_vllm(folder: Path) -> bool:
    """Whether a checkpoint has experts that transformers would not load."""
    return "quantization_config" in json.loads((folder / "config.json").read_text()) and unread(folder)


@torch.no_grad()
def in_transformers(folder: Path, ids: torch.Tensor) -> torch.Tensor | None:
    """Logits in bfloat16 as plain transformers computes them; None where a library is missing."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    sees = "vision_config" in json.loads((folder / "config.json").read_text())
    try:
        auto = AutoModelForImageTextToText if sees else AutoModelForCausalLM
        model = auto.from_pretrained(folder, dtype=torch.bfloat16)
    except ImportError:
        return None
    return model.eval()(input_ids=ids, use_cache=False).logits[:, :-1].float()


def judged(cell: dict[str, Any], ids: torch.Tensor, floats: Mapping[str, Any], logits: torch.Tensor) -> dict[str, Any]:
    """The figures of a cell, and what they say."""
    folder = Path(cell["folder"])
    ours = TORCH.stream(folder).answers(ids).all()[:, :-1].float()
    # it would leave experts for vLLM alone at random
    plain = None if is_for_vllm(folder) else in_transformers(folder, ids)
    figures: dict[str, Any] = {"kl": kl(ours, logits), "largest": float((ours - logits).abs().max())}
    figures["rounding"] = None if plain is None else kl(ours, plain)
    if floats:
        figures |= {"lost": kl(floats["ours"], ours), "floor": floats["kl"]}
    floor = max(figures["rounding"] or 0.0, figures.get("floor", 0.0))
    figures["result"] = "right" if figures["kl"] <= FLOORS * floor else "wrong"
    return {**figures, "ours": ours}


def of_loader(jobs: Mapping[str, dict[str, Any]], request: Mapping[str, Any], python: str) -> dict[str, dict[str, Any]]:
    """Cell of a mixture -> what vLLM's loader makes of its packed experts."""
    packed = {
        cell: {**job, "do": "experts", "folder": f"{job['folder']}-experts"}
        for cell, job in jobs.items()
        if cell.partition("/")[0] in (*_MIXTURES, "gpt-oss") and not cell.endswith(("/float", "-dense"))
    }
    answers, _ = helper("vllm_side.py", {**request, "jobs": list(packed.values())}, python=python)
    rows = {}
    for (cell, job), answer in zip(packed.items(), answers, strict=True):
        row: dict[str, Any] = {"loader": answer["reason"]}
        if not answer["error"]:
            row = loaded_experts.compared(Path(job["model"]), Path(job["folder"]) / "experts.safetensors")
        rows[cell] = row
    return rows


def main() -> int:
    parser = parsing(__doc__)
    parser.add_argument("--only", nargs="*", default=[], help="MODEL/LAYOUT or MODEL")
    parser.add_argument("--place", type=Path, help="folder that keeps models and logits")
    parser.add_argument("--mixtures", action="store_true", help="mixtures alone, with a record of their own")
    parser.add_argument("--vision", action="store_true", help="models with images alone, with a record of their own")
    options = parser.parse_args()
    alone = [*_MIXTURES, "gpt-oss"] if options.mixtures else [*_VISION] if options.vision else []
    with tempfile.TemporaryDirectory(prefix="vllm-cells-") as temporary:
        rows = run(options.place or Path(temporary), [*options.only, *alone])
    columns = {"cell": "cell", "result": "result", "ours": "a target says", "kl": "KL:.2g", "floor": "floor:.2g"}
    columns |= {"rounding": "bfloat16:.2g", "lost": "lost:.2g", "loader": "its loader", "kernels": "kernels"}
    columns |= {"reason": "reason"}
    show("vLLM on this CPU", rows, columns)
    results = {row["cell"]: row["result"] for row in rows}
    off = [row["cell"] for row in rows if "recipe" in row and row["result"] == "refused by vLLM" and not row["ours"]]
    over = [row["cell"] for row in rows if row["result"] in ("right", "theirs") and row["ours"]]
    wrong = [name for name, result in results.items() if result == "wrong" and not name.startswith("planted/")]
    settings = {"vllm": dict(apart.demand("vllm").versions), "floors": FLOORS, "samples": SAMPLES, "tokens": TOKENS}
    claim = "vLLM computes what a checkpoint says, or a target whose runtime is vLLM refuses it before work"
    part = "_mixtures" if options.mixtures else "_vision" if options.vision else ""
    record(f"vllm-cells{part}", claim, rows, settings, write=not options.only)
    return verdicts(
        {
            f"no cell is wrong: {' '.join(wrong)}": not wrong,
            f"what vLLM refuses, a target refuses: {' '.join(off)}": not off,
            f"what vLLM takes, a target takes: {' '.join(over)}": not over,
            "its loader holds every expert as we store it": all(row.get("loader", "equal") == "equal" for row in rows),
            "exchanged experts are seen": all(row["exchanged"] > 0.1 for row in rows if "exchanged" in row),
            "planted errors are seen": all(r == "wrong" for n, r in results.items() if n.startswith("planted/")),
        }
    )


def run(place: Path, only: list[str]) -> list[dict[str, Any]]:
    """Compile, open in vLLM, compare."""
    ids = torch.randint(0, 250, (SAMPLES, TOKENS), generator=torch.Generator().manual_seed(0))
    rows: list[dict[str, Any]] = []
    for model, layout in cells():
        if only and layout != "float" and not {model, f"{model}/{layout}"} & set(only):
            continue
        if only and not any(name.partition("/")[0] == model for name in only):
            continue
        about: dict[str, Any] = {"cell": f"{model}/{layout}", "ours": "" if layout == "float" else asked(layout)}
        about |= {"recipe": recipe(layout)} if model == "llama" and layout != "float" else {}
        source(model, place)
        about |= {} if layout == "float" else compiled(model, layout, place)
        rows.append({**about, "folder": str(place / model / layout / "model")})
        print(about, flush=True)
    if any(row["cell"] == _PLANTED for row in rows):
        rows += [{"cell": f"planted/{name}", "ours": "", "folder": str(folder)} for name, folder in planted(place)]
    opened = [row for row in rows if "result" not in row]
    settings = {"dtype": "bfloat16", "skip_tokenizer_init": True, "seed": 0, **EAGER}
    jobs = [
        {
            **{"model": row["folder"], "ids": ids.tolist(), "folder": f"{place}/logits/{row['cell']}"},
            # a tower would want a processor
            "settings": settings | ({"language_model_only": True} if row["cell"].partition("/")[0] in _VISION else {}),
        }
        for row in opened
    ]
    request = {"program": str(OWN.program), "environment": environment(), "jobs": jobs}
    python = apart.demand("vllm").python
    answers, _ = helper("vllm_side.py", request, python=python)
    loaded = of_loader({row["cell"]: job for row, job in zip(opened, jobs, strict=True)}, request, python)
    floats: dict[str, Any] = {}
    for row, job, answer in zip(opened, jobs, answers, strict=True):
        row["kernels"] = answer.get("model", {}).get("kernels")
        if answer["error"]:
            row.update({"result": "refused by vLLM", "reason": answer["reason"], "error": answer["error"]})
            row.update(loaded.get(row["cell"], {}))
            continue
        model = row["cell"].partition("/")[0]
        told = torch.stack(
            [load_file(f"{job['folder']}/{number}.safetensors")["logits"].float() for number in range(SAMPLES)]
        )
        if model == "planted":
            ours = floats[_PLANTED]
            row.update({"kl": kl(ours, told), "floor": floats["llama"]["kl"]})
            row["result"] = "right" if row["kl"] <= FLOORS * floats["llama"]["kl"] else "wrong"
            continue
        figures = judged(row, ids, floats.get(model, {}), told)
        ours = figures.pop("ours")
        if row["cell"].endswith("/float"):
            floats[model] = {"ours": ours, "kl": figures["kl"]}
        floats[row["cell"]] = ours
        row.update(figures)
        if row["result"] == "wrong" and (why := THEIRS.get(row["cell"])):
            row.update({"result": "theirs", "reason": why})
    return [{name: value for name, value in row.items() if name != "folder"} for row in rows]


if __name__ == "__main__":
    raise SystemExit(main())
