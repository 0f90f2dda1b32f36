"""What the kernels need: torch, Triton and NumPy, as far as they are used; a GPU machine may have no more."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {absent}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Missing())
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


def test_packing_needs_torch_alone() -> None:
    program = """
import torch
from quantkit.kernels import configs, layout
packed = layout.pack_parts("int4", torch.zeros(16, 64, dtype=torch.int8), torch.ones(16, 1))
assert configs.candidates(1) and packed.words.shape == (1, 1, 128)
"""
    ran(program, *OTHERS, "triton", "numpy")


def test_the_package_needs_nothing() -> None:
    ran("import quantkit.kernels.layout, quantkit.kernels.configs", *OTHERS, "torch", "triton", "numpy")


def test_kernels_need_torch_triton_and_numpy_alone() -> None:
    pytest.importorskip("triton")
    names = ("matmul", "native", "dequantize", "quantize", "ahead", "solving.choose", "solving.ahead")
    ran("import " + ", ".join(f"quantkit.kernels.{name}" for name in names), *OTHERS)
