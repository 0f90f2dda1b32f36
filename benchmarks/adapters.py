"""Whether adapters are merged into real models as PEFT merges them, and what of a small model a larger one accepts.

    pip install peft
    python benchmarks/adapters.py [--models smollm2-135m ...] [--drafts]

LoRA, rsLoRA and DoRA of rank 8 on every linear, with random values of the size of a trained adapter's, are written by
PEFT and merged twice: by PEFT's `merge_and_unload`, and by quantkit, tensor by tensor. In float32 the largest
difference is at most 1e-6. From bfloat16, both are held against the exact sum: quantkit's error is not the larger one.
`--drafts` measures the acceptance of int4 and int8 versions of SmolLM2 as drafts of the float model.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from harness.record import layout, parsing, record, show, verdicts

import quantkit
from quantkit.measurement.accuracy.drafts import WAYS
from quantkit.model.source.merged import merge, open_adapter
from quantkit.model.source.open import open_model
from quantkit.model.structure.names import match_names

MODELS = ("smollm2-135m", "gemma-3-270m", "qwen2.5-coder-0.5b")
KINDS: dict[str, dict[str, Any]] = {"LoRA": {}, "rsLoRA": {"use_rslora": True}, "DoRA": {"use_dora": True}}
RANK, SPREAD, LIMIT = 8, 0.02, 1e-6


def written(model: Any, folder: Path, settings: dict[str, Any]) -> None:
    """Write an adapter on all linears; every value of it is random."""
    import peft

    config = peft.LoraConfig(r=RANK, lora_alpha=16, target_modules="all-linear", **settings)
    wrapped = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
    generator = torch.Generator().manual_seed(0)
    for value in wrapped.parameters():
        if value.requires_grad:
            value.data += SPREAD * torch.randn(value.shape, generator=generator).to(value.dtype)
    wrapped.save_pretrained(folder, save_embedding_layers=False)
    wrapped.unload()


def loaded(folder: Path, dtype: torch.dtype) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)


def compared(name: str, kind: str, dtype: torch.dtype, work: Path) -> dict[str, Any]:
    """Merge one adapter both ways."""
    import peft

    source = open_model(name)
    folder = source.path
    if dtype != torch.float32:
        folder = work / f"{name}-half"
        if not folder.exists():
            loaded(source.path, dtype).save_pretrained(folder)
        source = open_model(str(folder))
    place = work / f"{name}-{kind}-{dtype}"
    written(loaded(folder, dtype), place, KINDS[kind])
    ours = merge(source, open_adapter(str(place)))
    files = match_names(ours.weights, ours.skeleton())
    names = sorted(entry for entry in files if entry.endswith("_proj.weight"))
    values = {entry: ours.weights.read(files[entry]) for entry in names}
    theirs = peft.PeftModel.from_pretrained(loaded(folder, dtype), place).merge_and_unload().state_dict()
    apart = max(float((values[entry].double() - theirs[entry].double()).abs().max()) for entry in names)
    row = {"model": name, "kind": kind, "dtype": str(dtype).removeprefix("torch."), "weights": len(names)}
    row |= {"apart": apart}
    if dtype == torch.float32:
        return row
    wide = peft.PeftModel.from_pretrained(loaded(folder, torch.float32), place).merge_and_unload().state_dict()
    squares = {"ours": 0.0, "theirs": 0.0}
    for entry in names:
        exact = wide[entry].double()
        squares["ours"] += float((values[entry].double() - exact).square().sum())
        squares["theirs"] += float((theirs[entry].double() - exact).square().sum())
    count = sum(values[entry].numel() for entry in names)
    return row | {f"{side}_rms": (total / count) ** 0.5 for side, total in squares.items()}


def drafted(work: Path) -> list[dict[str, Any]]:
    """Judge versions of SmolLM2 as drafts of its float model."""
    how: dict[str, Any] = {"speed": False, "vllm": False}
    checkpoint = ["export=[{checkpoint: {}}]"]
    target = quantkit.compile("smollm2-135m", "float", out=work / "float", changes=checkpoint, **how)
    rows = []
    for recipe in ("int8-weights", "awq-int4", "rtn-int4"):
        draft = quantkit.compile("smollm2-135m", recipe, out=work / recipe, changes=checkpoint, **how)
        judged = quantkit.judge_draft(draft, target)
        means = {way: judged.seen.mean(way) for way in WAYS}
        rows.append(
            {"draft": recipe, "positions": int(judged.seen.greedy.size)}
            | {way: mean.value for way, mean in means.items()}
            | {f"{way}_ci95": list(mean.ci95 or ()) for way, mean in means.items()}
        )
    return rows


def main() -> int:
    parser = parsing(__doc__)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--drafts", action="store_true", help="the acceptance alone")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        if options.drafts:
            rows = drafted(Path(place))
            show(
                "SmolLM2-135M as a draft of its float model",
                rows,
                layout(
                    "draft | positions:d | greedy:.4f | greedy_ci95=95 %:.4f | sampling:.4f | sampling_ci95=95 %:.4f"
                ),
            )
            record("drafts", "no claim: acceptance of quantized versions as drafts", rows, {"note": options.note})
            return 0
        rows = [
            compared(name, kind, dtype, Path(place))
            for name in options.models
            for dtype in (torch.float32, torch.bfloat16)
            for kind in KINDS
        ]
    columns = layout(
        "model | kind | dtype | weights:d | apart=apart from PEFT:.1e | ours_rms=our error:.2e | theirs_rms=PEFT's:.2e"
    )
    show(f"adapters of rank {RANK} on all linears, merged", rows, columns)
    settings = {"rank": RANK, "spread": SPREAD, "note": options.note}
    record(Path(__file__).stem, "adapters are merged as PEFT merges them", rows, settings)
    whole = [row for row in rows if row["dtype"] == "float32"]
    half = [row for row in rows if row["dtype"] != "float32"]
    return verdicts(
        {
            f"in float32 the largest difference is at most {LIMIT:.0e}": all(row["apart"] <= LIMIT for row in whole),
            "from bfloat16 the error is at most PEFT's": all(row["ours_rms"] <= row["theirs_rms"] for row in half),
        }
    )


if __name__ == "__main__":
    raise SystemExit(main())
