"""nncf: post-training quantization of a float ONNX graph, in an environment of its own; see `harness/nncf.py`.

    python nncf_onnx.py GRAPH FEEDS.npz OUT transformer|network

FEEDS holds `NUMBER/INPUT` for each item that calibrates. Its defaults otherwise, which are min-max ranges, fast bias
correction and, of transformers, SmoothQuant.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any


def main() -> int:
    import nncf  # type: ignore[import-not-found]
    import numpy as np
    import onnx

    graph, given, out, kind = sys.argv[1:]
    items: dict[int, dict[str, Any]] = {}
    with np.load(given) as arrays:
        for key in arrays.files:
            number, _, name = key.partition("/")
            items.setdefault(int(number), {})[name] = arrays[key]
    feeds = [items[number] for number in sorted(items)]
    begun = time.process_time()
    how: dict[str, Any] = {"preset": nncf.QuantizationPreset.MIXED, "subset_size": len(feeds)}
    if kind == "transformer":
        how["model_type"] = nncf.ModelType.TRANSFORMER
    made = nncf.quantize(onnx.load(graph), nncf.Dataset(feeds), **how)
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    onnx.save(made, out)
    print(f"nncf {nncf.__version__}: {time.process_time() - begun:.0f} CPU s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
