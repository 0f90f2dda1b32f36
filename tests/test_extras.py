"""Every extra installs alone, in an environment of its own, and does what it is for (`make extras`)."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
# a command of quantkit's, or a line of Python, that needs what the extra brings
USES = {
    "compile": "quantkit compile fashion-mnist-cnn --recipe int8-network --no-speed",
    "data": "from quantkit.bundle.frame import frame; frame([{'value': 1.0}], 'pyarrow'); import datasets",
    "onnx": "from quantkit.runtimes import load_runtime; assert load_runtime('onnxruntime').why_not_here() is None",
    "openvino": "from quantkit.runtimes import load_runtime; assert load_runtime('openvino').why_not_here() is None",
    "report": "quantkit plan llama-3-8b --target h100 --html plan.html",
    "tensorrt": "from quantkit.runtimes.tensorrt.library import load; assert load('tensorrt_rtx').capabilities()",
    "gpu": "import pynvml, triton",
    "nightly": "quantkit nightly run nightly.yaml --dry-run",
    "sign": "import OpenSSL, model_signing",
    "ray": "import ray, duckdb",
    "tasks": "from lm_eval.tasks import TaskManager",
}
# llama.cpp compiles for minutes; humming compiles against CUDA; torchvision of the package index loads beside its torch
LEFT = {"gguf", "humming", "vision", "test", "all"}

pytestmark = [pytest.mark.extras, pytest.mark.timeout(1800)]


def test_every_extra_is_here() -> None:
    assert set(EXTRAS) == set(USES) | LEFT


@pytest.mark.parametrize("extra", USES)
def test_an_extra_installs_alone_and_works(extra: str, tmp_path: Path) -> None:
    python = tmp_path / "environment" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "environment")], check=True)
    # torch first and pinned: else another package could bring another build of it
    torch = ["torch"] if any("torch" in package for package in EXTRAS[extra]) else []
    for packages in (torch, [f"{ROOT}[{extra}]"]):
        if packages:
            install = [str(python), "-m", "pip", "install", "--quiet", "-c", str(ROOT / "constraints.txt"), *packages]
            subprocess.run(install, check=True)
    use = USES[extra]
    command = use.split() if use.startswith("quantkit ") else [str(python), "-c", use]
    if use.startswith("quantkit "):
        command[0] = str(python.with_name("quantkit"))
    (tmp_path / "nightly.yaml").write_bytes((ROOT / "docs" / "nightly" / "nightly.yaml").read_bytes())
    environment = {**os.environ, "QUANTKIT_CACHE": str(tmp_path / "cache"), "PYTHONPATH": ""}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    help_ = [str(python.with_name("quantkit")), "list"]
    assert subprocess.run(help_, cwd=tmp_path, env=environment, check=False).returncode == 0
