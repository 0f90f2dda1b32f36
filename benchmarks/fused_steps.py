"""Decode steps whose small kernels torch.compile joins: launches counted anywhere, seconds on a GPU.

    python benchmarks/fused_steps.py [--batch 1 --batch 16] [--layers 32]

Claim: joined or not, a step has the same logits, and joined it launches fewer kernels for a layer. A model of
Llama-3-8B's build is transformers' own class with random int4 weights in our kernels; without a GPU a narrow one of
floats in their place, and inductor generates code for the CPU, whose count stands for nothing but itself. Needs what
`quantkit[compile,gpu]` installs.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import torch
from harness.record import parsing, record, show, verdicts
from torch._inductor import metrics
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from quantkit.measurement.timing.cuda import KernelDecoder
from quantkit.runtimes.torch.decode_graph import DecodeGraph

WIDE = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
NARROW = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
_CONTEXT, _STEPS = 512, 64
# of tensors, not of memory: nothing is launched
_VIEWS = ("view", "unsqueeze", "t.default", "transpose", "slice", "expand", "select", "detach", "alias")


class Launches(TorchDispatchMode):
    """Counts what is not a mere view."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).removeprefix("aten.")
        if not name.lstrip("_").startswith(_VIEWS) and "view" not in name:
            self.found[name] += 1
        return func(*args, **(kwargs or {}))


class Left(torch.nn.Linear):
    """A linear that torch.compile does not see, as it does not see `QuantLinear`."""

    @torch.compiler.disable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The product."""
        return torch.nn.functional.linear(x, self.weight, self.bias)


def model(layers: int, at: str) -> Any:
    """Random weights; the linears of blocks in int4 on a GPU."""
    torch.manual_seed(0)
    sizes, dtype = (WIDE, torch.bfloat16) if at == "cuda" else (NARROW, torch.float32)
    made = LlamaForCausalLM._from_config(LlamaConfig(**sizes, num_hidden_layers=layers, vocab_size=1024), dtype=dtype)
    made = made.to(at).eval()
    for name, each in list(made.model.named_modules()):
        if not isinstance(each, torch.nn.Linear):
            continue
        if at == "cuda":
            from quantkit.kernels.linear import QuantLinear
            from quantkit.measurement.cuda.sides import known, weight

            made.model.set_submodule(name, QuantLinear(weight(known()["int4.g128"], *each.weight.shape, at)))
        else:
            each.__class__ = Left
    return made


def stepping(of: Any, fuse: str) -> tuple[DecodeGraph, torch.Tensor]:
    """A step's graph with a prompt of three tokens in it, and the fourth."""
    graph = DecodeGraph(of, 1, 8, fuse=fuse)
    ids = torch.arange(4, device=of.device).reshape(1, 4)
    graph.prefill(ids[:, :3])
    return graph, ids[:, 3]


def counted(of: Any) -> tuple[int, int, float]:
    """(what torch launches in a step, kernels that inductor makes of it, how far the logits are apart)."""
    graph, ids = stepping(of, "")
    with torch.no_grad(), Launches() as seen:
        of(input_ids=graph.ids, past_key_values=graph.cache, use_cache=True, logits_to_keep=1)
    graph, ids = stepping(of, "")
    apart = graph.step(ids).clone()
    torch._dynamo.reset()
    metrics.reset()
    graph, ids = stepping(of, "inductor")
    joined = graph.step(ids).clone()
    return seen.found.total(), metrics.generated_kernel_count, float((joined - apart).norm() / apart.norm())


def main() -> int:
    """Count, compare, time where there is a GPU, record."""
    parser = parsing(__doc__)
    parser.add_argument("--batch", type=int, action="append", help="sequences; 1 and 16")
    parser.add_argument("--layers", type=int, default=32, help="of the model that is timed")
    args = parser.parse_args()
    at = "cuda" if torch.cuda.is_available() else "cpu"
    few, more = (counted(model(layers, at)) for layers in (2, 3))
    apart, joined, off = more[0] - few[0], more[1] - few[1], max(few[2], more[2])
    rows: list[dict[str, Any]] = [
        {"device": at, "what": "launches of torch for a layer, 7 linears among them", "value": apart},
        {"device": at, "what": "kernels of inductor for a layer, besides linears and attention", "value": joined},
        {"device": at, "what": "logits of both, relative to their size", "value": off},
    ]
    if at == "cuda":
        whole = model(args.layers, at)
        for batch in args.batch or (1, 16):
            for fuse in ("", "inductor"):
                run = KernelDecoder(whole, fuse=fuse).decode(batch, _CONTEXT)
                taken = sorted(run() or 0.0 for _ in range(_STEPS))
                rows.append(
                    {"device": at, "what": f"seconds, batch {batch}, {fuse or 'apart'}", "value": taken[_STEPS // 2]}
                )
    show("decode steps, apart and joined", rows, {"device": "device", "what": "what", "value": "value:.3g"})
    record("fused-steps", "joined kernels, same logits", rows, {"layers": args.layers})
    return verdicts(
        {
            "logits are the same": off < (2.0**-7 if at == "cuda" else 1e-5),
            "fewer kernels for a layer": 0 < joined < apart - 8,
        }
    )


if __name__ == "__main__":
    sys.exit(main())
