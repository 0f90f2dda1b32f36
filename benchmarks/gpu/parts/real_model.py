"""A real model, compiled by recipes on the card and run there: on our kernels, in CUDA graphs, by plain transformers.

What a bundle's linears compute on our kernels is held against what the layout's own library makes of the same
checkpoint: both in half precision, each against that library in float32, whose distance from its own half precision
says how much rounding alone explains. The processor compiles the same meanwhile, and its scores are compared. Then the
commands that only a GPU can answer run on what was compiled.
"""

from __future__ import annotations

import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parts.compile_model import ROOT, compiled
from parts.recipes import NATS, Row, answered, summary
from quantkit.errors import InputError

if TYPE_CHECKING:
    import torch

    from quantkit.bundle import Bundle

MODEL = "smollm2-135m"
# the first three have kernels of ours, the last is loaded by transformers
RECIPES = ("int4-best", "int8-dynamic", "nf4", "awq-int4")
ON_KERNELS = RECIPES[:3]
BATCHES = (1, 4, 16, 64)
# the text that logits are compared on, in sequences of tokens
_TEXT, _SEQUENCES, _TOKENS = ROOT / "benchmarks/texts/alice.txt", 4, 128
# of a graph against the same steps without one
_PROMPT, _STEPS, _ROOM = 16, 4, 64
# nats: how far kernels may be from float32, in times of what half precision alone explains, and at least
_TIMES, _NATS = 4.0, 1e-4
# nats between transformers on the card and on the processor
_DEVICES = 1e-3
_SECONDS = "15"
# seconds of all commands
_COMMANDS = 75.0


def measured(job: dict[str, Any], deadline: float) -> Iterator[tuple[str, Any]]:
    """(section, entry): `real`, `kernels`, `graphs`, `transformers`, one a recipe; `commands`; `settles`.

    Args:
        job: `model`; `target` of the compiles; `work`: a folder with room.
        deadline: `time.monotonic()` after which nothing new begins.

    Raises:
        InputError: `compile-failed`, with what the command said.
    """
    import torch

    from quantkit.bundle import Bundle

    # the commands run elsewhere than this
    model = job["model"] or MODEL
    model = str(Path(model).resolve()) if Path(model).is_dir() else model
    dtypes = (torch.float16, torch.bfloat16)
    with tempfile.TemporaryDirectory(dir=job["work"]) as name, ThreadPoolExecutor(2 * len(RECIPES)) as pool:
        folder = Path(name)

        def made(recipe: str, at: str) -> Row:
            out = folder / (recipe if at == "cuda" else f"{recipe}-{at}")
            asked = [sys.executable, "-m", "quantkit", "compile", model, "--recipe", recipe, "--device", at]
            asked += ["--target", job["target"], "--out", str(out), "--json", "--no-speed"]
            return compiled(asked, deadline)

        bundles: dict[str, Bundle] = {}
        ours, theirs = ({recipe: pool.submit(made, recipe, at) for recipe in RECIPES} for at in ("cuda", "cpu"))
        scores = {}
        for recipe in RECIPES:
            row = ours[recipe].result()
            scores[recipe] = row.get("kl")
            yield "real", {"recipe": recipe, "at": "cuda", **summary(row)}
            if not (folder / recipe / "manifest.json").is_file():
                why = row.get("error") or {"value": row.get("reason", "")}
                raise InputError("compile-failed", where=f"{model}, {recipe}", value=why["value"])
            bundles[recipe] = Bundle.load(folder / recipe)
        found: dict[str, list[Row]] = {"kernels": [], "graphs": []}
        for recipe in ON_KERNELS:
            if time.monotonic() > deadline:
                break
            ids = text_ids(bundles[recipe]).to("cuda")
            found["kernels"].append({"recipe": recipe, **on_kernels(bundles[recipe], ids, "cuda", dtypes)})
            yield "kernels", found["kernels"][-1]
            for row in graphed(bundles[recipe], ids, "cuda", BATCHES):
                found["graphs"].append({"recipe": recipe, **row})
                yield "graphs", found["graphs"][-1]
        for line, section in (("bundle-kernels", "kernels"), ("step-graph", "graphs")):
            if {row["recipe"] for row in found[section]} == set(ON_KERNELS):
                said = f"{len(found[section])} rows of `{section}`"
                yield "settles", {"line": line, "holds": all(row["ok"] for row in found[section]), "by": said}
        if time.monotonic() < deadline:
            row = by_transformers(bundles["awq-int4"], text_ids(bundles["awq-int4"]))
            yield "transformers", {"recipe": "awq-int4", **row}
            said = f"KL {row['kl']:.2g} nats between both, at most {_DEVICES}"
            yield "settles", {"line": "transformers-cuda", "holds": row["ok"], "by": said}
        # commands are timed: the processor's compiles end first, if they leave the commands their time
        wait(theirs.values(), timeout=max(deadline - _COMMANDS - time.monotonic(), 0.0))
        for words in _commands(folder, model):
            if time.monotonic() < deadline:
                yield "commands", answered(words, deadline)
        off: dict[str, float] = {}
        for recipe in RECIPES:
            row = theirs[recipe].result()
            yield "real", {"recipe": recipe, "at": "cpu", **summary(row)}
            if row.get("kl") is not None and scores[recipe] is not None:
                off[recipe] = abs(row["kl"] - scores[recipe])
        if len(off) == len(RECIPES):
            said = f"KL, at most {NATS} nats: " + ", ".join(f"{recipe} {nats:.2g}" for recipe, nats in off.items())
            yield "settles", {"line": "real-agrees", "holds": max(off.values()) <= NATS, "by": said}


def _commands(folder: Path, model: str) -> list[list[str]]:
    """`measure` again after `tax`, which puts `kernels.json` into the bundle: from then on a step is explained."""
    batches = ["--batch", ",".join(map(str, BATCHES)), "--seconds", _SECONDS]
    measure = [["measure", str(folder / each), "--runtime", "torch", *batches] for each in ("int4-best", "nf4")]
    return [
        ["tax", str(folder / "int4-best"), "--device", "cuda", *batches],
        *([*each, "--baseline", model] for each in measure),
    ]


def text_ids(bundle: Bundle) -> torch.Tensor:
    """Token ids [sequences, tokens] of a text that no model was made for."""
    import torch
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(bundle.model_folder)
    ids = tokenizer(_TEXT.read_text(encoding="utf-8"))["input_ids"][: _SEQUENCES * _TOKENS]
    return torch.tensor(ids).reshape(_SEQUENCES, _TOKENS)


def on_kernels(bundle: Bundle, ids: torch.Tensor, at: str, dtypes: tuple[torch.dtype, ...]) -> Row:
    """How far kernels and library, both in half precision, are from the library in float32: nats, a position.

    Args:
        ids: [sequences, tokens], on the device.
        at: the device; `cpu` in Triton's interpreter.
        dtypes: of half precision.

    Returns:
        `kernels` and `library` by dtype; `expanded`, what no kernel took; `ok`.
    """
    import torch

    def expanded(dtype: torch.dtype) -> torch.Tensor:
        model = bundle.model(dtype=dtype).to(at)
        # what our own reader has expanded has the dtype of its config; a library's has what was asked for
        library = getattr(model, "hf_quantizer", None) is not None
        return _logits(model if library else model.to(dtype), ids)

    exact = expanded(torch.float32).log_softmax(dim=-1)
    row: Row = {"kernels": {}, "library": {}, "expanded": []}
    for dtype in dtypes:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            ours = _logits(bundle.model(kernels=True, device=at, dtype=dtype), ids)
        row["expanded"] = [text for each in said if "no kernel" in (text := str(each.message))]
        name = str(dtype).removeprefix("torch.")
        row["kernels"][name] = _kl(exact, ours)
        row["library"][name] = _kl(exact, expanded(dtype))
    near = all(row["kernels"][name] <= max(_TIMES * nats, _NATS) for name, nats in row["library"].items())
    return row | {"ok": near and not row["expanded"]}


def graphed(bundle: Bundle, ids: torch.Tensor, at: str, batches: tuple[int, ...]) -> Iterator[Row]:
    """Steps as one CUDA graph against the same steps launched one by one, batch by batch."""
    import torch

    from quantkit.runtimes.torch.decode_graph import DecodeGraph

    class Eager(DecodeGraph):
        """The same without a graph."""

        graphed = False

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = bundle.model(kernels=True, device=at)
    flat = ids.flatten()
    for batch in batches:
        starts = [(7 * row) % (len(flat) - _PROMPT - _STEPS) for row in range(batch)]
        tokens = torch.stack([flat[start : start + _PROMPT + _STEPS] for start in starts])
        sides = [kind(model, batch, _ROOM) for kind in (DecodeGraph, Eager)]
        for side in sides:
            side.prefill(tokens[:, :_PROMPT])
        worst, size, equal = 0.0, 0.0, True
        for step in range(_STEPS):
            both = [side.step(tokens[:, _PROMPT + step]).float().clone() for side in sides]
            worst = max(worst, float((both[0] - both[1]).abs().max()))
            size = max(size, float(both[1].abs().max()))
            equal &= bool(torch.equal(*both))
        row = {"batch": batch, "graphed": sides[0].graphed, "equal": equal, "worst": worst, "largest_logit": size}
        yield row | {"ok": (sides[0].graphed or at == "cpu") and worst <= 2**-7 * size}


def by_transformers(bundle: Bundle, ids: torch.Tensor) -> Row:
    """A checkpoint that plain transformers loads onto the card, against the same on the processor, in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    both = []
    for at in ("cpu", "cuda"):
        model = AutoModelForCausalLM.from_pretrained(bundle.model_folder, device_map=at, dtype=torch.float32).eval()
        both.append(_logits(model, ids.to(at)).cpu())
    kl = _kl(both[0].log_softmax(dim=-1), both[1])
    return {"kl": kl, "ok": kl <= _DEVICES}


def _logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """[sequences, tokens, vocabulary] in float64."""
    import torch

    with torch.no_grad():
        found: torch.Tensor = model(input_ids=ids).logits.double()
    return found


def _kl(exact: torch.Tensor, logits: torch.Tensor) -> float:
    """Nats, the mean of all positions; `exact` are log-probabilities."""
    return float((exact.exp() * (exact - logits.log_softmax(dim=-1))).sum(dim=-1).mean())
