"""Launches of a decode step on the kernels, whose small kernels torch.compile joins; seconds on a GPU.

    python benchmarks/fused_steps.py [--batch 1 --batch 16] [--layers 32]

Claim: joined or not, a step has the same logits; it is one graph, and launches fewer kernels for a layer. The model is
transformers' own class of Llama-3-8B's build with random int4 weights, as `bundle.model(kernels=True)` has it. Without
a GPU it is narrow, in Triton's interpreter, and inductor generates code for the CPU, of which a function may be several
kernels on a GPU.
Needs what `quantkit[compile,gpu]` installs.
"""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from typing import Any

import torch

if not torch.cuda.is_available():  # read when Triton is imported
    os.environ["TRITON_INTERPRET"] = "1"

from harness.record import parsing, record, show, verdicts
from torch._inductor.utils import run_and_get_code
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from quantkit.measurement.cuda.sides import known, weight
from quantkit.measurement.timing.cuda import KernelDecoder
from quantkit.runtimes.torch import packed
from quantkit.runtimes.torch.decode_graph import DecodeGraph, attend_by_kernel

WIDE = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
NARROW = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
_CONTEXT, _STEPS = 512, 64
# of tensors, not of memory: nothing is launched
_VIEWS = ("view", "unsqueeze", "t.default", "transpose", "slice", "expand", "select", "detach", "alias", "split")
# where inductor's code calls a kernel of its own: on a CPU a function, which is several loops; on a GPU a launch
_KERNEL = re.compile(r"^ *(?:cpp_\w+\(|triton_\w+\.run\()", re.MULTILINE)
_PRODUCTS, _ATTENTION = "quantkit.linear", "quantkit.attend"


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

    def of(self, part: str) -> int:
        """Return the launches of operators with this in their names."""
        return sum(count for name, count in self.found.items() if part in name)


def model(layers: int, at: str) -> Any:
    """Random weights; the linears of blocks in int4 with zero points, as recipes write them."""
    torch.manual_seed(0)
    sizes, dtype = (WIDE, torch.bfloat16) if at == "cuda" else (NARROW, torch.float16)
    config = LlamaConfig(**sizes, num_hidden_layers=layers, vocab_size=1024)
    made = LlamaForCausalLM._from_config(config, dtype=dtype).to(at).eval()
    linears = {name: each for name, each in made.model.named_modules() if isinstance(each, torch.nn.Linear)}
    weights = {f"model.{n}": weight(known()["int4.g64.zeros"], *each.weight.shape, at) for n, each in linears.items()}
    apart, _ = packed.placed(made, weights, {}, device=at, skeleton=packed.without_values(LlamaForCausalLM, config))
    assert not apart and not attend_by_kernel(made)
    return made


def stepping(of: Any, fuse: str) -> tuple[DecodeGraph, torch.Tensor]:
    """A step's graph with a prompt of three tokens in it, and the fourth."""
    graph = DecodeGraph(of, 1, 8, fuse=fuse)
    ids = torch.arange(4, device=of.device).reshape(1, 4)
    graph.prefill(ids[:, :3])
    return graph, ids[:, 3]


def counted(of: Any) -> dict[str, float]:
    """Launches of torch in a step, kernels that inductor makes of it, products, attention; the logits' distance."""
    graph, ids = stepping(of, "")
    with torch.no_grad(), Launches() as seen:
        of(input_ids=graph.ids, past_key_values=graph.cache, use_cache=True, logits_to_keep=1)
    graph, ids = stepping(of, "")
    apart = graph.step(ids).clone()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    graph, ids = stepping(of, "inductor")
    joined, codes = run_and_get_code(lambda: graph.step(ids).clone())
    return {
        **{"torch": seen.found.total(), "inductor": sum(len(_KERNEL.findall(code)) for code in codes)},
        "masks": sum(code.count("torch.bool)") for code in codes),
        **{"products": seen.of(_PRODUCTS), "attention": seen.of(_ATTENTION)},
        "graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"],
        "off": float((joined - apart).norm() / apart.norm()),
    }


def main() -> int:
    """Count, compare, time where there is a GPU, record."""
    parser = parsing(__doc__)
    parser.add_argument("--batch", type=int, action="append", help="sequences; 1 and 16")
    parser.add_argument("--layers", type=int, default=32, help="of the model that is timed")
    args = parser.parse_args()
    at = "cuda" if torch.cuda.is_available() else "cpu"
    few, more = (counted(model(layers, at)) for layers in (2, 3))
    layer = {name: more[name] - few[name] for name in ("torch", "inductor", "products", "attention")}
    joined, off = layer["inductor"] + layer["products"] + layer["attention"], max(few["off"], more["off"])
    rows: list[dict[str, Any]] = [
        {"device": at, "what": "launches of torch for a layer", "value": layer["torch"]},
        {"device": at, "what": "products of weights for a layer", "value": layer["products"]},
        {"device": at, "what": "kernels of inductor for a layer", "value": layer["inductor"]},
        {"device": at, "what": "launches for a layer, joined: products, attention, inductor's", "value": joined},
        {"device": at, "what": "compiled graphs of a step", "value": more["graphs"]},
        {"device": at, "what": "masks that inductor makes in a step of three layers", "value": more["masks"]},
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
            "logits are the same": off < (2.0**-7 if at == "cuda" else 2.0**-9),
            "a step is one graph": more["graphs"] == 1,
            "the mask is made once for all layers": few["masks"] == more["masks"] == 1,
            "four products and one attention for a layer": (layer["products"], layer["attention"]) == (4, 1),
            "fewer launches for a layer": 0 < joined < layer["torch"] - 8,
        }
    )


if __name__ == "__main__":
    sys.exit(main())
