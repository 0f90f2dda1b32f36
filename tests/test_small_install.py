"""The small install: a bundle's ONNX runs where torch, transformers, scipy and onnx are not there."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_onnx
import torch
from forked import CLI, without
from small_onnx import TEXT, Small, export, relative, scheme

ABSENT = (
    *("torch", "transformers", "scipy", "onnx", "onnx_ir", "onnxscript", "ml_dtypes", "datasets", "compressed_tensors"),
    *("accelerate", "gguf", "pyarrow", "pandas", "onnxruntime_genai", "psutil"),
)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory, byte_tokenizer: Any) -> Small:
    """A decoder's bundle with `onnx/` and nothing else."""
    found = export(
        tmp_path_factory.mktemp("edge"), "llama", scheme(), tokenizer=byte_tokenizer, changes=TEXT, accuracy_level=0
    )
    small_onnx.bundle(found.folder)
    return found


def ran(program: str, *arguments: object) -> str:
    done = without(ABSENT, program, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_what_is_blocked_is_really_missing() -> None:
    for name in ("torch", "scipy.stats", "onnx"):
        assert "No module named" in without(ABSENT, f"import {name}").stderr


def test_generate_gives_what_transformers_gives(small: Small) -> None:
    said = json.loads(
        ran(
            CLI,
            "generate",
            small.folder,
            *("--prompt", "The state", "--runtime", "onnxruntime", "--new-tokens", 8, "--json"),
        )
    )
    from quantkit.runtimes.text import Tokenizer

    tokenizer = Tokenizer(small.onnx)
    ids = torch.tensor([tokenizer.encode("The state")])
    with torch.no_grad():
        made = small.model.generate(  # type: ignore[operator]
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False
        )[0, ids.shape[1] :].tolist()
    made = made[: made.index(257)] if 257 in made else made
    assert said["result"]["text"] == tokenizer.decode(made)
    assert said["result"]["tokens"] == len(made)
    assert said["error"] is None


def test_a_bundle_s_onnx_is_loaded_checked_and_run(small: Small, tmp_path: Path) -> None:
    ids = np.arange(3, 13).reshape(2, 5)
    ran(
        "import sys, numpy as np, quantkit\n"
        + "from quantkit.runtimes import load_runtime\n"
        + "bundle = quantkit.load(sys.argv[1])\n"
        + "assert all(check.ok for check in bundle.verify())\n"
        + "model = load_runtime('onnxruntime').load(bundle, threads=1)\n"
        + "state = model.state(2, 5)\n"
        + "ids = np.arange(3, 13).reshape(2, 5)\n"
        + "parts = [model.run(state, ids[:, :3]), model.run(state, ids[:, [3]]), model.run(state, ids[:, [4]])]\n"
        + "model.decode(1, 8)(), model.prefill(1, 8)()\n"
        + "np.save(sys.argv[2], np.concatenate(parts, axis=1))\n"
        + "assert not missing.names & set(sys.modules), missing.names & set(sys.modules)\n",
        small.folder,
        tmp_path / "logits.npy",
    )
    wanted = small_onnx.expected(small.model, torch.from_numpy(ids))
    assert relative(np.load(tmp_path / "logits.npy"), wanted) < 5e-6


@pytest.mark.parametrize(
    "arguments", [("show", "int4"), ("show", "onnxruntime"), ("list", "runtimes"), ("show", "onnx")], ids=" ".join
)
def test_what_there_is_can_be_shown(arguments: tuple[str, ...]) -> None:
    assert ran(CLI, *arguments)


def test_a_bundle_is_shown_and_verified(small: Small) -> None:
    said = json.loads(ran(CLI, "verify", small.folder, "--json"))
    assert {check["name"]: check["ok"] for check in said["result"]["checks"]}["files.sha256"]


def test_what_needs_more_says_what_to_install(small: Small) -> None:
    for arguments in (
        ("generate", str(small.folder), "--prompt", "x", "--runtime", "torch"),
        ("export", str(small.folder), "--to", "onnx"),
    ):
        done = without(ABSENT, CLI, *arguments)
        assert done.returncode == 2, (arguments, done.stderr)
        assert "Traceback" not in done.stderr
        assert "error: [" in done.stderr
