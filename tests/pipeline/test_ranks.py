"""Ranks in one compile: the same content on any number of them, one line for each way to fail, and a resume."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
import transformers
import yaml
import zoo
from safetensors.torch import load_file
from thorough import beside

from quantkit.bundle import Bundle
from quantkit.calibrate.ranks import Ranks
from quantkit.errors import Stopped

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="starts children by forking after imports")

RECIPE: dict[str, Any] = {
    "schema": 1,
    "summary": "a test",
    "calibration": {"set": "prose-en", "samples": 9, "tokens": 24},
    "scheme": {"weights": {"format": "int4", "granularity": "group", "group": 32, "symmetric": False}},
    "passes": [{"gptq": {"correction": 1.0, "shrink": "auto"}}],
    "export": [{"checkpoint": {"layout": "pack-quantized"}}],
}
# each block is committed; few positions are scored
BEGIN = """
import sys, torch
torch.set_num_threads(1)
from quantkit.pipeline.blocks import quantize, tokens
quantize._EVERY, tokens.SCORED = 0.0, 300
"""
RUN = "from quantkit.cli import main\nmain()"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory, byte_tokenizer: transformers.PreTrainedTokenizerBase) -> Path:
    folder = tmp_path_factory.mktemp("models") / "llama"
    wide = {"hidden_size": 128, "intermediate_size": 320}
    return zoo.save(folder, byte_tokenizer, "llama", vocab_size=len(byte_tokenizer), num_hidden_layers=8, **wide)


def recipe(folder: Path, **changes: Any) -> str:
    file = folder / "test.yaml"
    file.write_text(yaml.safe_dump({**RECIPE, **changes}))
    return str(file)


def free() -> str:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return str(one.getsockname()[1])


def start(
    count: int, out: Path, *asked: object, between: dict[int, str] | None = None, ranks: int | None = None
) -> list[subprocess.Popen[str]]:
    """Begin a compile of `count` ranks as a launcher other than torchrun does, by the environment.

    Args:
        between: rank -> what it runs before the command.
        ranks: number of them that come, if not all do.
    """
    port, started = free(), []
    for rank in range(count if ranks is None else ranks):
        where = {"RANK": str(rank), "WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        program = BEGIN + (between or {}).get(rank, "") + RUN
        command = ["compile", *map(str, asked), "--out", str(out), "--no-speed", "--no-vllm", "--json"]
        started.append(
            subprocess.Popen(
                forked.python("-c", program, *command),
                env={**os.environ, **where, "QUANTKIT_CACHE": f"{out.parent}/cache"},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    return started


def ended(started: list[subprocess.Popen[str]]) -> tuple[list[int], list[str], list[str]]:
    """Wait for all; return exit codes, answers and lines of errors."""
    said = [process.communicate(timeout=300) for process in started]
    answers = [out for out, _ in said if out]
    errors = [line for _, err in said for line in err.splitlines() if line.startswith("error: ")]
    return [process.returncode for process in started], answers, errors


def content(out: Path) -> str:
    bundle = Bundle.load(out)
    assert not [check for check in bundle.verify() if not check.ok]
    return bundle.manifest.content_sha256


def compiled(count: int, out: Path, *asked: object) -> str:
    codes, answers, errors = ended(start(count, out, *asked))
    assert (codes, errors, len(answers)) == ([0] * count, [], 1)
    return content(out)


def test_a_mixture_has_the_same_content_on_any_number_of_ranks(
    tmp_path: Path, byte_tokenizer: transformers.PreTrainedTokenizerBase
) -> None:
    few = {"num_experts": 16, "num_experts_per_tok": 1, "vocab_size": len(byte_tokenizer)}
    model = tmp_path / "model"
    zoo.mixture("qwen3", **few).to(torch.bfloat16).save_pretrained(model)  # type: ignore[operator]
    byte_tokenizer.save_pretrained(model)
    # an expert with fewer tokens than ranks is missing on one of them
    calibration = {"set": "prose-en", "samples": 8, "tokens": 16, "expert_tokens": 2}
    passes = [{"awq": {"grid": 3, "cost": "gptq", "sequences": 3}}, *RECIPE["passes"]]
    asked = (model, "--recipe", recipe(tmp_path, calibration=calibration, passes=passes))

    # as a user starts it
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", free()]
    command = ["-m", "quantkit", "compile", *map(str, asked), "--out", str(tmp_path / "two"), "--no-speed", "--json"]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "QUANTKIT_CACHE": f"{tmp_path}/cache"}
    run = subprocess.run([*launch, *command, "--no-vllm"], capture_output=True, text=True, env=variables, check=False)
    assert run.returncode == 0, run.stderr[:3000]
    (line,) = run.stdout.splitlines()
    assert json.loads(line)["result"]["content_sha256"] == content(tmp_path / "two")
    routed = [layer.routed for layer in Bundle.load(tmp_path / "two").manifest.layers if layer.routed is not None]
    assert 0 < min(count for count in routed if count) < 4

    assert compiled(1, tmp_path / "one", *asked) == compiled(4, tmp_path / "four", *asked) == content(tmp_path / "two")

    # and one process, which sums in another order, finds all but the same codes
    alone = forked.run("-c", BEGIN + RUN, *["compile", *asked, "--out", tmp_path / "alone", "--no-speed", "--no-vllm"])
    assert alone.returncode == 0, alone.stderr[:3000]
    mine, theirs = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("alone", "two"))
    packed = [name for name in mine if name.endswith("weight_packed")]
    codes = [
        [tensors[name] >> shift & 15 for name in packed for shift in range(0, 32, 4)] for tensors in (mine, theirs)
    ]
    same = sum(int((one == other).sum()) for one, other in zip(*codes, strict=True))
    assert same / sum(one.numel() for one in codes[0]) > 0.9
    assert len(packed) > 50


@pytest.mark.parametrize("victim", beside([1], [0, 1]))
def test_a_rank_that_is_killed_ends_all_and_another_number_resumes(llama: Path, tmp_path: Path, victim: int) -> None:
    asked, out = (llama, "--recipe", recipe(tmp_path)), tmp_path / "killed"
    journal = tmp_path / "killed.partial" / "steps" / "journal.jsonl"
    started = start(2, out, *asked)
    while all(process.poll() is None for process in started):
        if journal.exists() and journal.read_bytes().count(b"\n") >= 3:
            started[victim].send_signal(signal.SIGUSR1)  # SIGKILL for the program
            break
        time.sleep(0.001)
    codes, answers, errors = ended(started)
    assert codes[1 - victim] == 75, errors
    assert codes[victim] == -signal.SIGKILL
    assert len(errors) == 1
    assert "[rank-lost]" in errors[0]
    assert "--resume" in errors[0]
    assert len(answers) == 1  # the envelope of that error
    assert json.loads(answers[0])["error"]["code"] == "rank-lost"
    kept = journal.read_bytes()
    assert 3 <= kept.count(b"\n") < 8

    count = 4 if victim else 1
    assert compiled(count, out, *asked, "--resume") == compiled(1, tmp_path / "whole", *asked)


@pytest.mark.parametrize(
    "problem", [KeyboardInterrupt(), Stopped("rank-lost", "rank 1", "the first rank", remedy="--resume")]
)
def test_a_rank_that_torchrun_stops_tells_of_the_first_one(
    problem: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: None)

    class Gone:
        def wait(self, *_: object) -> None:
            signal.raise_signal(signal.SIGTERM)
            self.add()

        def add(self, *_: object) -> int:
            raise RuntimeError("it went with the first rank")

    told = r"rank-lost.*the first rank.*--resume"
    with pytest.raises(Stopped, match=told), Ranks(1, 2, 1, Gone()).told_once():
        raise problem


def refused(started: list[subprocess.Popen[str]], code: str, exit_code: int, out: Path) -> str:
    """Demand one line and one envelope of an error, all ranks ended by it, and nothing left."""
    codes, answers, errors = ended(started)
    assert set(codes) == {exit_code}
    (line,) = errors
    assert f"[{code}]" in line
    (answer,) = answers
    assert json.loads(answer)["error"]["code"] == code
    assert not out.exists()
    assert not Path(f"{out}.partial").exists()
    return line


def test_ranks_that_do_not_belong_together_are_refused_before_the_work(llama: Path, tmp_path: Path) -> None:
    out, asked = tmp_path / "out", (llama, "--recipe", recipe(tmp_path))
    other = "sys.argv += ['--set', 'calibration.tokens=32']\n"
    line = refused(start(2, out, *asked, between={1: other}), "ranks-differ", 2, out)
    assert "calibration tokens 32, not 24" in line

    newer = "from quantkit.pipeline import subject\nsubject.__version__ = '99.1'\n"
    assert "99.1" in refused(start(2, out, *asked, between={1: newer}), "ranks-differ", 2, out)

    # its folder is another one of the same name
    elsewhere = """
from quantkit.pipeline import together
seen = together.Build.beside
together.Build.beside = staticmethod(lambda out: seen(out.parent / 'other' / out.name))
"""
    line = refused(start(2, out, *asked, between={1: elsewhere}), "out-unseen", 2, out)
    assert "rank 1 does not see it" in line

    gone = f"sys.argv[2] = {str(tmp_path / 'gone')!r}\n"
    assert "gone" in refused(start(2, out, *asked, between={1: gone}), "file-missing", 2, out)


def test_ranks_that_cannot_share_the_work_are_refused(llama: Path, tmp_path: Path) -> None:
    out, asked = tmp_path / "out", (llama, "--recipe", recipe(tmp_path))
    few = ("--set", "calibration.samples=1")
    line = refused(start(2, out, *asked, *few), "ranks-count", 2, out)
    assert "2 ranks, 1 sequences" in line
    assert "at most 1 ranks" in line
    assert "--set gptq.gradients=0" in refused(
        start(2, out, llama, "--recipe", recipe(tmp_path, passes=[{"gptq": {"gradients": 1}}])),
        "ranks-unsupported",
        2,
        out,
    )
    asked = (llama, "--recipe", recipe(tmp_path))
    assert "3 ranks" in refused(start(3, out, *asked), "ranks-invalid", 2, out)
    line = refused(start(2, out, *asked, "--rank-timeout", "1", ranks=1), "rank-lost", 75, out)
    assert "within 1 s" in line
    assert "auto" in refused(start(1, out, *asked, "--device", "auto"), "device-absent", 2, out)
