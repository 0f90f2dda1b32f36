"""A compile in a process of its own: forked from one that has imported everything.

python in_child.py MODEL OUT REPORT …      REPORT gets {"peak": bytes}, what that compile had resident at most
"""

import gc
import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

_IMPORTED = [
    "torch",
    "transformers.models.llama.modeling_llama",
    "compressed_tensors",
    "scipy.optimize",
    "quantkit.pipeline.compile",
    "quantkit.pipeline.blocks.work",
    "quantkit.measurement.accuracy.score",
    "quantkit.report.bundle.document",
]

RECIPE = {
    "schema": 1,
    "summary": "a test",
    "calibration": {"set": "prose-en", "samples": 4, "tokens": 32},
    "scheme": {"weights": {"format": "int4", "granularity": "group", "group": 32, "symmetric": False}},
    "passes": [{"gptq": {"correction": 0.5}}],
    "export": [{"checkpoint": {"layout": "pack-quantized"}}],
}


def start(
    model: Path, out: Path, *, resume: bool = False, graph: dict[str, Any] | None = None
) -> subprocess.Popen[bytes]:
    """Begin a compile of a folder with `RECIPE`, or of a graph.

    Args:
        model: folder or file.
        out: the bundle's name; its cache stands beside it.
        resume: go on.
        graph: its recipe and what else is asked.
    """
    import forked

    asked = (str(model), str(out), resume, *([] if graph is None else [graph]))
    path = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    program = f"import sys; sys.path += {path!r}; import in_child; in_child.{'_compile' if graph is None else '_graph'}"
    return subprocess.Popen(forked.python("-c", f"{program}(*{asked!r})"))


def _begin(out: str) -> None:
    gc.freeze()  # what is imported is no garbage, and a compile looks for some six times
    os.environ["QUANTKIT_CACHE"] = f"{out}.cache"


def _graph(model: str, out: str, resume: bool, asked: dict[str, Any]) -> None:
    _begin(out)
    import quantkit

    quantkit.compile(model, out=out, resume=resume, speed=False, **asked)


def _compile(model: str, out: str, resume: bool) -> None:
    _begin(out)
    import torch

    from quantkit.pipeline import Request, compile_model
    from quantkit.pipeline.blocks import quantize, tokens
    from quantkit.recipe import Recipe

    torch.set_num_threads(1)
    tokens.SCORED = 600
    quantize._EVERY = 0.0  # each block is committed: a kill finds some that are and some that are not
    compile_model(Request.of(model, recipe=Recipe.from_dict(RECIPE, name="tiny"), out=out, resume=resume))


def _high_water() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmHWM")


def _fork_and_weigh(model: str, out: str, report: str) -> None:
    child = os.fork()
    if child == 0:
        from quantkit.pipeline.blocks.subject import TransformerSubject

        # plain transformers holds all of a small model at once: here as many blocks as of a large one
        TransformerSubject._fitting_blocks = lambda _: 1  # type: ignore[method-assign]
        _compile(model, out, False)
        Path(report).write_text(json.dumps({"peak": _high_water()}))
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


if __name__ == "__main__":
    gc.disable()
    for module in _IMPORTED:
        import_module(module)
    gc.enable()
    for start in range(1, len(sys.argv), 3):
        _fork_and_weigh(*sys.argv[start : start + 3])
