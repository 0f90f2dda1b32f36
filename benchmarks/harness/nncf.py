"""nncf from outside: `.peers/nncf/`, made by the first run, since its pins are not ours."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]
PINNED = ["nncf==3.4.0", "onnx==1.23.2", "onnxruntime==1.31.1"]


def quantized(graph: Path, feeds: Sequence[Mapping[str, Any]], out: Path, kind: str) -> str:
    """Write what nncf makes of a float graph; what it says of itself, or why there is nothing.

    Args:
        graph: float.
        feeds: what calibrates, item by item.
        out: the file to write.
        kind: `transformer` or `network`.
    """
    python = ROOT / ".peers" / "nncf" / "bin" / "python"
    if not python.is_file():
        print("making .peers/nncf ...", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", str(python.parent.parent)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *PINNED], check=True)
    with tempfile.TemporaryDirectory() as folder:
        given = Path(folder) / "feeds.npz"
        np.savez(given, **{f"{number}/{name}": x for number, feed in enumerate(feeds) for name, x in feed.items()})
        script = ROOT / "benchmarks" / "peers" / "nncf_onnx.py"
        asked = [str(python), str(script), str(graph), str(given), str(out), kind]
        done = subprocess.run(asked, capture_output=True, text=True, check=False)
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    return lines[-1] if lines else f"exit {done.returncode}"
