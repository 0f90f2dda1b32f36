"""A file for llama.cpp on a device that has llama.cpp, from a machine that has not: over a real sshd."""

from pathlib import Path
from typing import Any

import pytest
import zoo

from devices.loopback import Loopback
from devices.test_device_command import said
from devices.wheels import small_python
from quantkit import machine
from quantkit.bundle import Bundle
from quantkit.pipeline import Request, compile_model
from quantkit.recipe import Recipe
from quantkit.runtimes import load_runtime

pytestmark = [
    pytest.mark.skipif(not machine.has("llama_cpp"), reason="llama-cpp-python compiles for minutes"),
]
RECIPE = Recipe.from_dict(
    {
        "summary": "a test",
        "calibration": {"set": "prose-en", "samples": 2, "tokens": 32},
        "scheme": {"weights": {"format": "q8_0"}},
        "passes": ["rtn"],
        "export": [{"gguf": {}}],
    },
    name="tiny-gguf",
)


def test_it_is_verified_continued_measured_and_compared_there(
    devices: Loopback,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    merging_tokenizer: Any,
) -> None:
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("quantkit.pipeline.blocks.tokens.SCORED", 300)
    model, bundle = tmp_path / "m", tmp_path / "b"
    zoo.save(model, merging_tokenizer, "llama", vocab_size=len(merging_tokenizer))
    compile_model(Request.of(str(model), recipe=RECIPE, out=bundle, speed=False))
    runtime = load_runtime("llama_cpp")
    here = runtime.generate(Bundle.load(bundle), "the", new_tokens=4)["text"]
    # from here on it is the device alone that has it
    monkeypatch.setattr("quantkit.runtimes.llama_cpp.library.LlamaLibrary", None)
    monkeypatch.setattr(type(runtime), "why_not_here", lambda self, folder=None: "it is not installed")
    python = small_python(tmp_path / "python", runtime.packages)
    assert said(capsys, "device", "add", "pi", "ssh://plain", "--workdir", tmp_path / "there", "--python", python)
    checks = said(capsys, "verify", bundle, "--on", "pi")["result"]["checks"]
    assert {"llama_cpp.loads": True}.items() <= {check["name"]: check["ok"] for check in checks}.items()
    asked = ("--runtime", "llama_cpp", "--on", "pi")
    there = said(capsys, "generate", bundle, *asked, "--prompt", "the", "--new-tokens", 4)
    assert there["error"] is None
    assert (there["result"]["text"], there["result"]["device"]) == (here, "pi")
    words = ("--baseline", model, "--batch", 1, "--seconds", 1)
    found = said(capsys, "measure", bundle, *asked, *words)
    assert found["exit"] in (0, 3), found["error"]
    rows = found["result"]["measurements"]
    assert {row["name"] for row in rows} >= {"accuracy.kl", "latency.decode_step", "latency.prefill", "memory.peak"}
    assert {(row["device"]["on"], row["runtime"]) for row in rows if row["name"] == "latency.prefill"} == {
        ("pi", "llama_cpp")
    }
    both = ("--measure", "--on", "pi", "--batch", 1, "--seconds", 1, "--examples", 0)
    compared = said(capsys, "compare", bundle, bundle, *both)
    assert compared["exit"] in (0, 3), compared["error"]
    cells = [each for each in compared["result"]["cells"] if each["what"] == "latency"]
    assert {(each["runtime"], each["device"]) for each in cells} == {("llama_cpp", "pi")}
