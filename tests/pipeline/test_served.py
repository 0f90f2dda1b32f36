"""`reload.vllm`: a checkpoint that vLLM computes as torch does; one wrong scale; what vLLM refuses is no failure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import standin_vllm
import zoo

from quantkit.bundle import Bundle
from quantkit.errors import GateError
from quantkit.pipeline import Request, compile_model, served
from quantkit.pipeline.reload import reload
from quantkit.runtimes import apart
from quantkit.runtimes.vllm import OWN

RECIPE = """schema: 1
summary: small
calibration: {tokens: 32}
scheme:
  weights: {format: int8, granularity: channel, symmetric: true, scale: float32}
  activations: {format: int8, granularity: token}
passes: [rtn]
export: [{checkpoint: {layout: int-quantized}}]
"""
REAL = apart.find("vllm")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, byte_tokenizer: Any) -> Path:
    home = tmp_path_factory.mktemp("served")
    tiny: Any = zoo.tiny("llama", vocab_size=len(byte_tokenizer), num_hidden_layers=2, head_dim=32)
    tiny.save_pretrained(home / "model")
    byte_tokenizer.save_pretrained(home / "model")
    (home / "recipe.yaml").write_text(RECIPE)
    return home


def compiled(home: Path, out: Path, target: str = "cpu-x86", **more: Any) -> Bundle:
    how: dict[str, Any] = {"recipe": str(home / "recipe.yaml"), "target": target, "out": out, "speed": False, **more}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("quantkit.pipeline.blocks.tokens.LOOKED", 200)
        patch.setattr("quantkit.pipeline.blocks.tokens.SCORED", 200)
        return compile_model(Request.of(str(home / "model"), **how)).bundle


@pytest.fixture(scope="module")
def bundle(model: Path) -> Bundle:
    return compiled(model, model / "b")


def standing_in(home: Path, monkeypatch: pytest.MonkeyPatch, source: str = standin_vllm.STAND_IN) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(home / "data"))
    apart.add(OWN, standin_vllm.python(home / "p", "0.32.0", source))


def test_every_linear_of_vllm_is_the_checkpoint_s(
    bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    standing_in(tmp_path, monkeypatch)
    logits, linears = served.check(bundle.model_folder)[0]
    # its logits are not a Llama's
    assert (logits.name, logits.ok) == (served.LOGITS, False) and (logits.value or 0) > (logits.limit or 0)
    assert linears.name == served.LINEARS and linears.ok and 0 < (linears.value or 0) < 0.01
    # one scale of one of two merged linears, doubled
    monkeypatch.setenv("WRONG", "model.layers.1.mlp.up_proj.weight")
    linears = served.check(bundle.model_folder)[0][1]
    assert not linears.ok and linears.value == pytest.approx(1.0, abs=0.2)
    assert linears.where == "model.layers.1.mlp.up_proj"


@pytest.mark.parametrize("prefix", ["language_model.", "elsewhere_"])
def test_a_text_stack_that_vllm_has_elsewhere_is_compared_too(
    prefix: str, bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = standin_vllm.STAND_IN.replace("path = self.core, name.", f"path = self.core, ({prefix!r} + name).")
    standing_in(tmp_path, monkeypatch, source)
    monkeypatch.setenv("WRONG", "model.layers.1.mlp.up_proj.weight")
    checks, note = served.check(bundle.model_folder)
    if prefix == "language_model.":
        assert not checks[1].ok and checks[1].where == "model.layers.1.mlp.up_proj"
    else:  # a check that compares nothing does not pass
        assert not checks and "none of its linears" in note


def test_a_compile_for_vllm_delivers_nothing_that_it_computes_otherwise(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    standing_in(tmp_path, monkeypatch)
    with pytest.raises(GateError) as caught:
        compiled(model, tmp_path / "b", "h100")
    assert caught.value.code == "check-failed" and served.LOGITS in str(caught.value.value)
    assert not (tmp_path / "b").exists()
    without = compiled(model, tmp_path / "c", "h100", vllm=False)
    assert not any(check.name.startswith(served.LOGITS) for check in without.manifest.checks)


def test_one_that_never_answers_is_ended_and_noted(
    bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs = "import os, pathlib, time\nSamplingParams = None\nclass LLM:\n    def __init__(self, **_):\n"
    hangs += f"        pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(os.getpid()))\n        time.sleep(60)\n"
    standing_in(tmp_path, monkeypatch, hangs)
    monkeypatch.setattr(served, "SILENCE", 5.0)
    assert reload(bundle)[1] == ["not run in vLLM: no answer for 5 s"]
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text()}").exists()


def test_what_vllm_refuses_is_a_note_with_its_reason(
    bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuses = "SamplingParams = None\nclass LLM:\n    def __init__(self, **_):\n        raise ValueError('no kernel')\n"
    standing_in(tmp_path, monkeypatch, refuses)
    checks, notes = reload(bundle)
    assert notes == ["not run in vLLM: no kernel"]
    assert not any(check.name.startswith(served.LOGITS) for check in checks)


def test_without_vllm_nothing_is_said(bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "none"))
    assert served.check(bundle.model_folder) == ([], "")


@pytest.mark.thorough
@pytest.mark.skipif(REAL is None, reason="quantkit runtime add vllm --install")
def test_the_real_one_computes_what_was_written(
    bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert REAL is not None
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    apart.add(OWN, Path(REAL.python))
    checks, why = served.check(bundle.model_folder)
    assert why == ""
    assert [(check.name, check.ok) for check in checks] == [(served.LOGITS, True), (served.LINEARS, True)]
