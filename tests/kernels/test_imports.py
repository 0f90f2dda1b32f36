"""What the kernels need: torch, Triton and NumPy, as far as they are used; a GPU machine may have no more."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys
class Missing:
    def __init__(self, names):
        self.names = names
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
missing = Missing({absent})
sys.meta_path.insert(0, missing)
{program}
"""
OTHERS = (
    "pydantic",
    "yaml",
    "typer",
    "rich",
    "jinja2",
    "safetensors",
    "transformers",
    "scipy",
    "gguf",
    "onnx",
    "psutil",
)


def ran(program: str, *absent: str) -> None:
    made = PROGRAM.format(absent=set(absent), program=program)
    done = subprocess.run([sys.executable, "-c", made], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_package_needs_nothing() -> None:
    ran("import quantkit.kernels.layout, quantkit.kernels.dispatch", *OTHERS, "torch", "triton", "numpy")


def test_packing_needs_torch_alone_and_kernels_triton_and_numpy_too() -> None:
    """In one process: what kernels need besides is let in when all has been packed without it."""
    pytest.importorskip("triton")
    names = ("matmul", "native", "ahead", "solving.gptq", "solving.ahead")
    program = f"""
import torch
from quantkit.kernels import dispatch, layout
packed = layout.pack_parts("int4", torch.zeros(16, 64, dtype=torch.int8), torch.ones(16, 1))
assert dispatch.candidates(1) and packed.words.shape == (1, 1, 128)
missing.names = set({OTHERS})
import {", ".join(f"quantkit.kernels.{name}" for name in names)}
"""
    ran(program, *OTHERS, "triton", "numpy")
