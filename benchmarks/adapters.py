"""Whether adapters are merged into real models as PEFT merges them, and what of a small model a larger one accepts.

    pip install peft
    python benchmarks/adapters.py [--models smollm2-135m ...]
    ... --compile awq-int4                 one whole compile with an adapter trained on half of Candide
    ... --drafts [BUNDLE ...]              acceptance and gain of versions of SmolLM2 as drafts of the float model

LoRA, rsLoRA and DoRA of rank 8 on every linear, with random values of the size of a trained adapter's, are written by
PEFT and merged twice: by PEFT's `merge_and_unload`, and by quantkit, tensor by tensor. In float32 the largest
difference is at most 1e-6. From bfloat16, both are held against the exact sum: quantkit's error is not the larger one.
`--compile` starts from bfloat16; the bundle is held against the model that PEFT merges, by plain transformers.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from harness.process import compiled, run, scored
from harness.process import quantkit as quantkit_command
from harness.record import layout, parsing, record, sha256, show, verdicts

import quantkit
from quantkit.bundle import Bundle
from quantkit.measurement.accuracy.drafts import WAYS, Acceptance, DraftTimes, gains
from quantkit.model.source.merged import merge, open_adapter
from quantkit.model.source.open import open_model
from quantkit.model.structure.names import match_names
from quantkit.pipeline.drafts import MOST, forecast
from quantkit.target import Target

MODELS = ("smollm2-135m", "gemma-3-270m", "qwen2.5-coder-0.5b")
KINDS: dict[str, dict[str, Any]] = {"LoRA": {}, "rsLoRA": {"use_rslora": True}, "DoRA": {"use_dora": True}}
# machines that the gain of a draft is forecast on
MACHINES = ("l4", "h100")
RANK, SPREAD, LIMIT = 8, 0.02, 1e-6
TEXT = Path(__file__).resolve().parent / "texts" / "candide.txt"


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


def trained(base: Path, text: str, folder: Path, steps: int) -> list[float]:
    """Train a LoRA on a text by a few steps; return the losses."""
    import peft
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    ids = torch.tensor(tokenizer(text)["input_ids"])
    rows = ids[: len(ids) // 128 * 128].reshape(-1, 128)
    torch.manual_seed(0)
    config = peft.LoraConfig(r=RANK, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(loaded(base, torch.float32), config)
    optimizer = torch.optim.AdamW([value for value in model.parameters() if value.requires_grad], lr=2e-3)
    losses = []
    for step in range(steps):
        batch = rows[(4 * step + torch.arange(4)) % len(rows)]
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    model.save_pretrained(folder)
    return losses


def compiled_whole(name: str, recipe: str, steps: int, work: Path) -> dict[str, Any]:
    """Compile a bfloat16 model with a trained adapter; hold the bundle against the model that PEFT itself merges."""
    import peft

    base, adapter, merged, out = (work / part for part in ("base", "adapter", "merged", "bundle"))
    loaded(open_model(name).path, torch.bfloat16).save_pretrained(base)
    tokenizer = open_model(name).tokenizer()
    tokenizer.save_pretrained(base)
    text = TEXT.read_text()
    half = len(text) // 2
    (work / "held-out.txt").write_text(text[half:])
    losses = trained(base, text[:half], adapter, steps)
    peft.PeftModel.from_pretrained(loaded(base, torch.bfloat16), adapter).merge_and_unload().save_pretrained(merged)
    tokenizer.save_pretrained(merged)
    changes = ("--adapter", adapter, "--set=export=[{checkpoint: {}}]", "--no-speed", "--no-vllm")
    result, done = compiled(base, recipe, out, *changes)
    own = next(row for row in result["measurements"] if row["name"] == "accuracy.kl")
    checked = run(quantkit_command("verify", out, "--json"))
    generated = run(quantkit_command("generate", out, "--prompt", "Candide", "--json"))
    ours, theirs = merge(open_model(str(base)), open_adapter(str(adapter))).weights, open_model(str(merged)).weights
    pairs = ((ours.read(name).float(), theirs.read(name).float()) for name in theirs.entries)
    apart = max(float((one - other).abs().max()) for one, other in pairs)
    candidates = {"base": str(base), "bundle": str(out / "model")}
    texts = {"held-out": {"file": str(work / "held-out.txt")}, "prose-en": {"set": "prose-en"}}
    rows = {(row["candidate"], row["text"]): row for row in scored(str(merged), candidates, texts, samples=4)}
    french = rows["bundle", "held-out"]
    return {
        **{"model": name, "dtype": "bfloat16", "recipe": recipe, "steps": steps, "loss": [losses[0], losses[-1]]},
        **{"apart": apart, "verify": checked.status, "generate": generated.status, "seconds": done.wall},
        "perplexity_base": rows["base", "held-out"]["perplexity"],
        "perplexity_merged": french["perplexity_reference"],
        "perplexity_bundle": french["perplexity"],
        **{"kl": french["kl"], "kl_se": french["kl_se"]},
        **{f"{key}_prose": rows["bundle", "prose-en"][key] for key in ("kl", "kl_se")},
        **{"kl_stated": own["value"], "kl_stated_ci95": own["ci95"]},
    }


def _gained(seen: Acceptance, times: DraftTimes | None) -> dict[str, Any]:
    """Return the best expected gain of each way at some times; nothing without times."""
    if times is None:
        return {}
    listed = gains(seen, times, MOST)
    best = {way: max((one for one in listed if one.way == way), key=lambda one: one.gain) for way in WAYS}
    row: dict[str, Any] = {"times": f"{times.source}: {times.about}", "step": times.step, "step_draft": times.draft}
    for way, one in best.items():
        row |= {f"{way}_gain": one.gain, f"{way}_k": one.k, f"{way}_gain_ci95": list(one.ci95 or ())}
    return row


def drafted(names: list[str], dtype: str, work: Path) -> list[dict[str, Any]]:
    """Judge bundles as drafts of the float model that they were made from, in a dtype."""
    how: dict[str, Any] = {"speed": False, "vllm": False}
    checkpoint = ["export=[{checkpoint: {}}]"]
    source: str | Path = "smollm2-135m"
    if dtype != "float32":
        source = work / f"smollm2-135m-{dtype}"
        loaded(open_model("smollm2-135m").path, getattr(torch, dtype)).save_pretrained(source)
        open_model("smollm2-135m").tokenizer().save_pretrained(source)
    target = quantkit.compile(source, "float", out=work / "float", changes=checkpoint, **how)
    rows = []
    for name in names:
        draft: Any = Path(name)
        if not draft.is_dir():
            draft = quantkit.compile("smollm2-135m", name, out=work / name, changes=checkpoint, **how)
        judged = quantkit.judge_draft(draft, target)
        row: dict[str, Any] = {"draft": Path(name).name, "target": dtype, "positions": int(judged.seen.greedy.size)}
        for way in WAYS:
            mean = judged.seen.mean(way)
            row |= {way: mean.value, f"{way}_ci95": list(mean.ci95 or ())}
        rows.append({**row, "machine": "cpu-x86", **_gained(judged.seen, judged.times)})
        opened = [quantkit.load(one.path if isinstance(one, Bundle) else one) for one in (draft, target)]
        for machine in MACHINES:
            times, _ = forecast(*opened, Target.load(machine))
            rows.append({**row, "machine": machine, **_gained(judged.seen, times)})
    return rows


def main() -> int:
    parser = parsing(__doc__)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--compile", metavar="RECIPE", help="one whole compile with a trained adapter, alone")
    parser.add_argument("--steps", type=int, default=24, help="of its training")
    parser.add_argument("--drafts", nargs="*", metavar="BUNDLE|RECIPE", help="the acceptance alone")
    parser.add_argument("--dtype", default="float32", help="of the target of drafts")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        if options.drafts is not None:
            rows = drafted(options.drafts or ["int8-weights", "awq-int4", "rtn-int4"], options.dtype, Path(place))
            columns = (
                "draft | target | machine | greedy:.4f | greedy_ci95=95 %:.4f | greedy_gain=gain:.2f | greedy_k=k:d"
            )
            columns += " | sampling:.4f | sampling_ci95=95 %:.4f | sampling_gain=gain:.2f | sampling_k=k:d | times"
            show("SmolLM2-135M as a draft of its float model", rows, layout(columns))
            claim = "no claim: acceptance of quantized versions as drafts, and the gain at the target's times"
            record(f"drafts-{options.dtype}", claim, rows, {"note": options.note})
            return 0
        if options.compile:
            row = compiled_whole("smollm2-135m", options.compile, options.steps, Path(place))
            columns = "model | recipe | loss:.3f | perplexity_base=base:.2f | perplexity_merged=merged:.2f"
            columns += " | perplexity_bundle=bundle:.2f | kl=KL from PEFT's merge:.4f | kl_prose=on prose-en:.4f"
            columns += " | kl_stated=stated:.4f | apart:.1e"
            show("a compile with an adapter, against the model that PEFT merges", [row], layout(columns))
            claim = "a compile with an adapter is a compile of the model that PEFT merges"
            record("adapters-compiled", claim, [row], {"rank": RANK, "text": sha256(TEXT), "note": options.note})
            low, high = row["kl_stated_ci95"]
            return verdicts(
                {
                    "the merged weights are PEFT's, to a unit of bfloat16": row["apart"] <= 2**-8,
                    "verify and generate end well": row["verify"] == row["generate"] == 0,
                    "the adapter lowers the perplexity of its text": row["perplexity_merged"] < row["perplexity_base"],
                    "the KL from PEFT's model is the stated one, within both intervals": abs(
                        row["kl_prose"] - row["kl_stated"]
                    )
                    <= (high - low) / 2 + 1.96 * row["kl_se_prose"],
                }
            )
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
