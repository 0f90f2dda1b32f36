"""What is around the work changes: its reader leaves, the clock goes backwards, the memory ends."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import forked
import pytest

from faults.work import WORK
from quantkit.bundle import Bundle
from quantkit.model.source.files import file_sha256

TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize("leaves", ["stdout", "stderr"])
def test_work_goes_on_when_its_reader_leaves(leaves: str, tmp_path: Path) -> None:
    """SIGPIPE: `quantkit … 2>&1 | head -1`."""
    script = (
        "import sys\nfrom pathlib import Path\nfrom faults.work import WORK\n"
        "import quantkit.report.catalog as catalog\nfrom quantkit.cli import main\n"
        "def work(kind):\n"
        "    for number in range(20000): print('at', number, file=sys.stderr)\n"
        f"    WORK['compile'].act(Path({str(tmp_path)!r}))\n"
        "    return {'passes': {'a': 'b' * 200000}}\n"
        "catalog.listing = work\nmain()"
    )
    process = subprocess.Popen(
        forked.python("-c", script, "list", "--json", light=True),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=TESTS,
    )
    assert process.stdout is not None and process.stderr is not None
    gone, stays = (process.stdout, process.stderr) if leaves == "stdout" else (process.stderr, process.stdout)
    if leaves == "stderr":
        assert gone.readline() == b"at 0\n"
    gone.close()
    said = stays.read()
    stays.close()
    assert process.wait(timeout=60) == 0
    assert WORK["compile"].left(tmp_path)
    assert b"Error" not in said and b"Traceback" not in said
    if leaves == "stderr":
        assert json.loads(said)["exit"] == 0


def test_a_clock_that_goes_backwards_hides_no_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "weights"
    path.write_bytes(b"one")
    os.utime(path, (1e9, 1e9))
    monkeypatch.setattr(time, "time_ns", lambda: int(4e18))  # far ahead: what is hashed is remembered
    before = file_sha256(path)
    monkeypatch.setattr(time, "time_ns", lambda: int(1e18))
    path.write_bytes(b"two")
    os.utime(path, (1e9, 1e9))
    assert file_sha256(path) != before


def test_memory_that_ends_is_said_and_resumed(tmp_path: Path, byte_tokenizer: Any) -> None:
    import zoo

    model = tmp_path / "model"
    zoo.save(model, byte_tokenizer, "llama", vocab_size=len(byte_tokenizer))
    recipe = tmp_path / "small.yaml"
    recipe.write_text(
        "schema: 1\nsummary: small\ncalibration: {set: prose-en, samples: 4, tokens: 32}\n"
        "scheme: {weights: {format: int4, granularity: group, group: 32, symmetric: false}}\n"
        "passes: [rtn]\nexport: [{checkpoint: {layout: pack-quantized}}]\n"
    )
    script = f"""
import gc, resource, sys
gc.disable()
from pathlib import Path
import compressed_tensors, torch, transformers, transformers.models.llama.modeling_llama
from quantkit import cli, limits
from quantkit.pipeline.blocks import tokens
gc.enable()
gc.freeze()
tokens.SCORED = 300
def compile(out, *more):
    return cli.run(["compile", {str(model)!r}, "--recipe", {str(recipe)!r}, "--out", out, *more, "--no-speed"])
most = resource.getrlimit(resource.RLIMIT_DATA)[1]
resource.setrlimit(resource.RLIMIT_DATA, (int(limits._held()) + (4 << 20), most))
print(compile("limited"), file=sys.__stdout__)
resource.setrlimit(resource.RLIMIT_DATA, (most, most))
print(compile("limited", "--resume"), file=sys.__stdout__)
"""
    # what a process already holds and has free differs in a forked one
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert [line for line in done.stdout.splitlines() if line.isdigit()] == ["2", "0"], (
        done.returncode,
        done.stderr[-800:],
    )
    assert "error: [out-of-memory]" in done.stderr
    assert not (tmp_path / "limited.partial").exists()
    assert all(check.ok for check in Bundle.load(tmp_path / "limited").verify())
