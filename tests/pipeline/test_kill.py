"""SIGKILL, for real, in two different stages; a resume ends with the content of the undisturbed run."""

import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked
import in_child
import pytest
import transformers
import zoo
from small_graph import chain

import quantkit
from quantkit.bundle import Bundle


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, byte_tokenizer: transformers.PreTrainedTokenizerBase) -> Path:
    folder = tmp_path_factory.mktemp("models") / "llama"
    return zoo.save(folder, byte_tokenizer, "llama", vocab_size=len(byte_tokenizer), num_hidden_layers=12)


def committed(partial: Path) -> int:
    journal = partial / "steps" / "journal.jsonl"
    return journal.read_bytes().count(b"\n") if journal.exists() else 0


def killed(
    model: Path, out: Path, ripe: Callable[[], bool], *, resume: bool, graph: dict[str, Any] | None = None
) -> None:
    """Start a compile and kill it as soon as it is `ripe`."""
    process = in_child.start(model, out, resume=resume, graph=graph)
    while process.poll() is None and not ripe():
        time.sleep(0.001)
    forked.kill(process)
    assert process.returncode == -signal.SIGKILL, "it ended before it could be killed"
    assert not out.exists()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="starts children by forking after imports")
def test_two_kills_then_resume_ends_with_the_undisturbed_content(model: Path, tmp_path: Path) -> None:
    whole, out = tmp_path / "whole", tmp_path / "killed"
    partial = tmp_path / "killed.partial"
    process = in_child.start(model, whole)
    assert process.wait() == 0

    killed(model, out, lambda: committed(partial) >= 5, resume=False)
    assert committed(partial) < 12
    # every block is done; it exports, checks or scores
    killed(model, out, (partial / "bundle" / "model" / "config.json").exists, resume=True)
    assert committed(partial) >= 12

    process = in_child.start(model, out, resume=True)
    assert process.wait() == 0
    assert not partial.exists()
    resumed = Bundle.load(out)
    assert resumed.manifest.content_sha256 == Bundle.load(whole).manifest.content_sha256
    assert not [check for check in resumed.verify() if not check.ok]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="starts children by forking after imports")
def test_a_graph_killed_twice_and_resumed_ends_with_the_undisturbed_content(tmp_path: Path) -> None:
    file, whole, out = tmp_path / "graph.onnx", tmp_path / "whole", tmp_path / "killed"
    chain(file, tmp_path / "set.npz", links=12)
    asked: dict[str, Any] = {"recipe": "int8", "calibration": str(tmp_path / "set.npz")}
    undisturbed = quantkit.compile(str(file), out=whole, speed=False, **asked)
    partial = tmp_path / "killed.partial"

    # ranges and two products, at least, and not all
    killed(file, out, lambda: committed(partial) >= 3, resume=False, graph=asked)
    assert 3 <= committed(partial) < 13
    before = (partial / "steps" / "journal.jsonl").read_bytes()
    killed(file, out, (partial / "bundle" / "onnx" / "model.onnx").exists, resume=True, graph=asked)
    assert committed(partial) == 13
    assert (partial / "steps" / "journal.jsonl").read_bytes().startswith(before)

    resumed = quantkit.compile(str(file), out=out, resume=True, speed=False, **asked)
    assert not partial.exists()
    assert resumed.manifest.content_sha256 == undisturbed.manifest.content_sha256
    assert not [check for check in resumed.verify() if not check.ok]
