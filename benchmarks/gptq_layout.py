"""Checkpoints in the GPTQ layouts, loaded by plain transformers with GPTQModel, against our own dequantization.

    python benchmarks/gptq_layout.py [--no-record]

GPTQModel is too large a dependency for the test suite, which unpacks these layouts by an independent reader instead.
Here every linear of SmolLM2-135M is rounded to nearest and stored in each way; the logits of what transformers loads
must equal those of a float model that holds our own values, to 1e-3. The environment is made in `.peers/gptqmodel` by
the first run (GPTQModel builds without its compiled kernels).
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from harness.environments import environment
from harness.record import parsing, record, show

ROOT = Path(__file__).resolve().parent.parent
GROUP = {"granularity": "group", "group": 64}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("gptq", {"format": "int4", **GROUP}),
    ("gptq-v2", {"format": "int4", **GROUP, "symmetric": False}),
    ("gptq-v2", {"format": "int8", "scale": "float16"}),
    ("gptq-v2", {"format": "int3", **GROUP, "symmetric": False}),
]
LIMIT = 1e-3


def write(layout: str, fields: dict[str, Any], folder: Path) -> Any:
    """A checkpoint in `folder / model`, and the float model that holds the same values."""
    import torch
    from transformers import AutoModelForCausalLM

    from quantkit.exporters import load_exporter
    from quantkit.exporters.values import Values
    from quantkit.formats import load_format
    from quantkit.model import finished
    from quantkit.model.finished import Finished
    from quantkit.model.source.open import open_model
    from quantkit.model.streaming.stream import StreamedModel
    from quantkit.scheme import WeightScheme

    how = WeightScheme(**fields)
    form = load_format(how.format)
    source = open_model("smollm2-135m")
    stream = StreamedModel(source)
    model = AutoModelForCausalLM.from_pretrained(source.path).eval()
    tensors = {}
    for name, module in model.named_modules():
        if name.startswith(f"{stream.path}.") and isinstance(module, torch.nn.Linear):
            tensors[name] = form.quantize(module.weight.detach(), how)
            module.weight.data.copy_(form.dequantize(tensors[name]))
    finished.save(folder / "codes", tensors, {})
    results = Finished([folder / "codes"], dict.fromkeys(tensors, how))
    checkpoint, values = load_exporter("checkpoint"), Values.of_results(source, stream, results)
    checkpoint.export(folder / "model", values, checkpoint.Options(layout=layout))
    return model


def compare(layout: str, fields: dict[str, Any]) -> dict[str, Any]:
    """One case: the largest difference of logits, over the largest logit."""
    import numpy as np
    import torch

    ids = torch.arange(48).mul(7919).remainder(49152).reshape(2, 24)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = write(layout, fields, folder)
        with torch.no_grad():
            meant = model(ids).logits.float().numpy()
        (folder / "ids.json").write_text(json.dumps(ids.tolist()))
        side = ROOT / "benchmarks" / "harness" / "load_side.py"
        command = [environment("gptqmodel"), side, folder / "model", folder / "ids.json", folder / "logits.npy"]
        done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stderr[-2000:])
        answer = json.loads(done.stdout.strip().splitlines()[-1])
        found = np.load(folder / "logits.npy")
    difference = float(np.abs(found - meant).max() / np.abs(meant).max())
    scheme = " ".join(str(value) for value in fields.values())
    return {"layout": layout, "scheme": scheme, "difference": difference, "ok": difference <= LIMIT, **answer}


def main() -> int:
    parsing(__doc__).parse_args()
    environment("gptqmodel")
    rows = [compare(layout, fields) for layout, fields in CASES]
    show(
        "GPTQ layouts through transformers",
        rows,
        {"layout": "layout", "scheme": "scheme", "kernel": "kernel", "difference": "difference:.1e"},
    )
    claim = "transformers with GPTQModel loads our GPTQ checkpoints as our own dequantization, to 1e-3"
    record("gptq-layout", claim, rows, {"limit": LIMIT})
    return 0 if all(row["ok"] and not row["wrong"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
