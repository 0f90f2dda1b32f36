"""What heads and token embeddings in fewer bits cost, behind quantized blocks: a process of its own.

    {"model": FOLDER, "blocks": FOLDER of a checkpoint whose head and embedding are floats, "calibration": [[ids]],
     "eval": [[ids]], "groups": [32, 64], "rows": [2048, 8192]}
        -> [{"head", "embedding", "kl", "kl_se", "costs", "costs_se", "error"}]; the first row is the blocks alone

Both models are run whole by plain transformers; a head multiplies what the blocks gave, as float32. `costs` is the KL
less that of the blocks alone, position by position; `error` is ||W - W'||² / ||W||².
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from score import load
from torch import Tensor

from quantkit.calibrate.statistics.sums import InputStats
from quantkit.formats import load_format
from quantkit.measurement.accuracy.positions import Accuracy, Items
from quantkit.passes import load_pass
from quantkit.passes.assign import in_pieces, nearest
from quantkit.pipeline.blocks.quantize import moments_of_sums
from quantkit.scheme import WeightScheme

# of `int4-cpu`
GPTQ = {"damping": 0.01, "shrink": 0.5, "correction": 1.0, "ridge": 2.0}
# blocks of a table in 8 bits, and of what 2 bits are for
BLOCK = 64


@torch.no_grad()
def inputs(model: Any, ids: list[list[int]]) -> list[Tensor]:
    """What the head is given, [T, K] of each sequence."""
    found: list[Tensor] = []
    hook = model.lm_head.register_forward_pre_hook(lambda _, given: found.append(given[0][0].float()))
    for row in ids:
        model(torch.tensor([row]))
    hook.remove()
    return found


def dense(weight: Tensor, form: str, group: int, *, symmetric: bool = True) -> Tensor:
    """A weight as its nearest codes have it."""
    codes = nearest(weight, WeightScheme(format=form, granularity="group", group=group, symmetric=symmetric))
    return load_format(form).dequantize(codes)[:, : weight.shape[1]]


def error(weight: Tensor, found: Tensor) -> float:
    return float((weight - found).double().square().sum() / weight.double().square().sum())


class Scores:
    """The KL of heads on what blocks give, in one table with the blocks alone."""

    def __init__(self, ids: list[list[int]], expected: list[Tensor]) -> None:
        self.ids, self.expected = ids, expected
        self.rows: list[dict[str, Any]] = []
        self.alone: Items | None = None

    def add(self, head: str, embedding: str, given: list[Tensor], weight: Tensor, lost: float | None) -> None:
        """A row of a head's weight [V, K] on its inputs."""
        accuracy = Accuracy()
        for row, before, x in zip(self.ids, self.expected, given, strict=True):
            accuracy.add(torch.tensor(row), before, x @ weight.T)
        items = accuracy.items()
        self.alone = self.alone or items
        kl, more = items.mean(items.kl), items.mean(items.kl - self.alone.kl)
        row = {"head": head, "embedding": embedding, "kl": kl.value, "kl_se": kl.standard_error}
        self.rows.append(row | {"costs": more.value, "costs_se": more.standard_error, "error": lost})
        print(self.rows[-1], file=sys.stderr, flush=True)


@torch.no_grad()
def main(request: dict[str, Any]) -> list[dict[str, Any]]:
    original, blocks = load(request["model"]), load(request["blocks"])
    weight = original.lm_head.weight.detach().float()
    scores = Scores(request["eval"], [x @ weight.T for x in inputs(original, request["eval"])])
    given = inputs(blocks, request["eval"])
    scores.add("floats", "floats", given, weight, None)

    seen = InputStats()
    for after, before in zip(*(inputs(model, request["calibration"]) for model in (blocks, original)), strict=True):
        seen.add(after[None], before[None])
    del original
    moments = moments_of_sums(seen)
    settings = load_pass("gptq").Settings
    plain = settings(**GPTQ | {"correction": 0.0})
    ways = {"rounded": {}, "solved": {"gptq": plain}, "solved, drift corrected": {"gptq": settings(**GPTQ)}}
    for group in request["groups"]:
        for name, passes in ways.items():
            scheme = WeightScheme(format="int4", granularity="group", group=group, symmetric=False)
            codes, lost = in_pieces(weight, moments if passes else None, scheme, passes)
            found = load_format("int4").dequantize(codes)[:, : weight.shape[1]]
            scores.add(f"group {group}, {name}", "floats", given, found, lost)
            if group == request["groups"][0] and passes:
                best = found
    for rows in request["rows"]:
        first = torch.cat([dense(weight[:rows], "int8", BLOCK), best[rows:]])
        scores.add(f"the best of group {request['groups'][0]}, {rows} rows in 8 bits", "floats", given, first, None)

    tables = {"8 bits": dense(weight, "int8", BLOCK), "the head's codes": best}
    for bits in (2, 4):
        tables[f"the head's codes and {bits} bits"] = best + dense(weight - best, f"int{bits}", BLOCK)
    embedding = blocks.get_input_embeddings()
    for name, table in tables.items():
        embedding.weight = torch.nn.Parameter(table.to(embedding.weight.dtype), requires_grad=False)
        scores.add("floats", name, inputs(blocks, request["eval"]), weight, error(weight, table))
    return scores.rows
