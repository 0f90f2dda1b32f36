"""`recover`: its gradients are plain transformers', its codes stay, and what is no gain is not kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from zoo import shrink

from quantkit.bundle import Bundle
from quantkit.errors import InputError, QuantkitError
from quantkit.exporters.values import Values
from quantkit.model.source.open import open_model
from quantkit.model.streaming.stream import StreamedModel
from quantkit.pipeline import Request, compile_model, prepare
from quantkit.pipeline.blocks.recover import UNGAINED
from quantkit.pipeline.blocks.student import Student
from quantkit.recipe import Recipe

pytestmark = pytest.mark.usefixtures("few_scored")
IDS = torch.randint(5, 60, (2, 24), generator=torch.Generator().manual_seed(3))
INT3 = {"format": "int3", "granularity": "group", "group": 16, "symmetric": False}


def asked(*passes: object, weights: dict[str, Any] = INT3, **changes: Any) -> Recipe:
    data = {
        "schema": 1,
        "summary": "a test",
        "calibration": {"set": "prose-en", "samples": 4, "tokens": 32},
        "scheme": {"weights": weights},
        "passes": ["rtn", *passes],
        "export": [{"checkpoint": {"layout": "pack-quantized"}}],
    }
    return Recipe.from_dict({**data, **changes}, name="tiny")


def made(folder: Path, chosen: Recipe, out: Path, **options: Any) -> Bundle:
    return compile_model(Request.of(str(folder), recipe=chosen, out=out, target="l4", **options)).bundle


def saved(folder: Path, name: str, tokenizer: Any, dtype: torch.dtype = torch.float32) -> Path:
    shrink.tiny(name, folder, dtype=dtype, vocab_size=len(tokenizer))
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory, bos_tokenizer: transformers.PreTrainedTokenizerBase) -> Path:
    return saved(tmp_path_factory.mktemp("models") / "llama", "LlamaForCausalLM", bos_tokenizer, torch.bfloat16)


def trained(**settings: int | float) -> dict[str, dict[str, int | float]]:
    return {"recover": {"sequences": 6, "held": 3, "steps": 10, "batch": 2, **settings}}


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Gemma3ForCausalLM", "Qwen2ForCausalLM"])
def test_gradients_are_those_of_the_whole_model(
    name: str, tmp_path: Path, bos_tokenizer: transformers.PreTrainedTokenizerBase
) -> None:
    folder = saved(tmp_path / "model", name, bos_tokenizer)
    bundle = made(folder, asked(), tmp_path / "out")
    source = StreamedModel(open_model(str(folder)))
    student = Student(Values.of_bundle(bundle.path), source.answers(IDS), IDS, half=False)
    loss = student.learn([0, 1])

    original = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    packed = bundle.model(dtype=torch.float32)
    weights = {linear: packed.get_submodule(linear).weight.detach() for linear in student._scales}
    for linear, weight in weights.items():
        plain.get_submodule(linear).weight.data.copy_(weight)
    ours, theirs = (model(IDS).logits.log_softmax(-1) for model in (plain, original))
    expected = nn.functional.kl_div(ours, theirs.detach(), log_target=True, reduction="sum") / IDS.numel()
    expected.backward()
    assert loss == pytest.approx(float(expected.detach()), rel=1e-4)
    for key, value in student.trained.items():
        if key in weights:
            gradient = plain.get_submodule(key).weight.grad * weights[key]
            wanted = nn.functional.pad(gradient, (0, -gradient.shape[1] % 16)).reshape(*value.shape, 16).sum(-1)
        else:
            parameter = plain.get_parameter(key)
            wanted = parameter.grad * parameter.detach().abs().mean()
        assert value.grad is not None
        assert float((value.grad - wanted).abs().max()) <= 1e-4 * float(wanted.abs().max()) + 1e-9, key
    assert "model.norm.weight" in student.trained


def tensors(bundle: Bundle) -> dict[str, Tensor]:
    return load_file(bundle.model_folder / "model.safetensors")


def test_scales_and_gains_alone_change_for_a_gain_and_a_resume_ends_in_the_same(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quantkit.pipeline.blocks.recover._EVERY", 4)
    chosen = asked(trained(rate=0.01))
    whole, before = made(llama, chosen, tmp_path / "whole"), made(llama, asked(), tmp_path / "before")
    (taken,) = [step for step in whole.manifest.decisions if step.pass_ == "recover"]
    assert taken.code == "note"
    assert "KL of 3 held sequences" in taken.reason
    now, then = tensors(whole), tensors(before)
    assert {name: value.dtype for name, value in now.items()} == {name: value.dtype for name, value in then.items()}
    changed = {name for name, value in now.items() if not torch.equal(value, then[name])}
    assert {name.rpartition(".")[2] for name in changed} == {"weight_scale", "weight"}
    assert all("norm" in name for name in changed if name.endswith(".weight"))

    learn, calls = Student.learn, list[object]()

    def stopped(self: Student, rows: list[int]) -> float:
        calls.append(rows)
        if len(calls) == 6:  # behind the first state that is committed
            raise KeyboardInterrupt
        return learn(self, rows)

    with monkeypatch.context() as patch:
        patch.setattr(Student, "learn", stopped)
        with pytest.raises(QuantkitError, match=r"\[interrupted\]"):
            made(llama, chosen, tmp_path / "out")
    calls.clear()
    monkeypatch.setattr(Student, "learn", lambda self, rows: calls.append(rows) or learn(self, rows))
    again = made(llama, chosen, tmp_path / "out", resume=True)
    assert len(calls) == 6
    assert again.manifest.content_sha256 == whole.manifest.content_sha256


def test_what_is_no_gain_is_not_kept(llama: Path, tmp_path: Path) -> None:
    bundle = made(llama, asked(trained(rate=0.99, steps=2)), tmp_path / "out")
    assert UNGAINED in [step.code for step in bundle.manifest.decisions]
    assert all(
        torch.equal(value, tensors(bundle)[name])
        for name, value in tensors(made(llama, asked(), tmp_path / "a")).items()
    )


@pytest.mark.parametrize(
    ("name", "recipe", "code"),
    [
        ("Gemma3nForCausalLM", asked("recover", weights={"format": "int8"}), "recover-unable"),
        (
            "LlamaForCausalLM",
            asked("recover", weights={"format": "mxfp4"}, export=[{"checkpoint": {"layout": "dense"}}]),
            "recover-scales",
        ),
        ("LlamaForCausalLM", asked("recover", weights={"format": "int8", "granularity": "tensor"}), "recover-scales"),
        ("LlamaForCausalLM", asked({"recover": {"sequences": 10**6}}), "recover-text"),
        ("LlamaForCausalLM", asked({"recover": {"sequences": 3}}), "recover-text"),
        ("LlamaForCausalLM", asked("recover", "fuse_qkv"), "pass-order"),
    ],
)
def test_what_cannot_be_recovered_is_refused_before_the_work(
    name: str, recipe: Recipe, code: str, tmp_path: Path, bos_tokenizer: transformers.PreTrainedTokenizerBase
) -> None:
    folder = saved(tmp_path / "model", name, bos_tokenizer)
    with pytest.raises(InputError) as refused:
        prepare(Request.of(str(folder), recipe=recipe, out=tmp_path / "out", target="l4"))
    assert refused.value.code == code
