"""What is wrong is found while everything is opened, before the first block is worked on."""

from pathlib import Path

import pytest
import torch
import transformers
import zoo

from quantkit.bundle import Decision
from quantkit.errors import InputError
from quantkit.pipeline import Request, compile_model, prepare
from quantkit.pipeline.gates import refuse
from quantkit.target import Target


def test_wrong_weights_in_the_last_block_are_found_before_the_first(
    tmp_path: Path, byte_tokenizer: transformers.PreTrainedTokenizerBase
) -> None:
    folder = tmp_path / "m.odel"
    model = zoo.tiny("llama", vocab_size=len(byte_tokenizer))
    with torch.no_grad():
        model.get_parameter("model.layers.2.mlp.down_proj.weight")[3, 5] = float("nan")
    model.save_pretrained(folder)
    byte_tokenizer.save_pretrained(folder)
    with pytest.raises(InputError, match="weights-nonfinite"):
        prepare(Request.of(str(folder), recipe="gptq-int4", out=tmp_path / "out"))


def test_what_vllm_needs_for_a_layout_is_noted_and_no_error_under_strict(
    tmp_path: Path, byte_tokenizer: transformers.PreTrainedTokenizerBase
) -> None:
    folder = tmp_path / "model"
    model = zoo.tiny("llama", vocab_size=len(byte_tokenizer), hidden_size=64, intermediate_size=128)
    model.save_pretrained(folder)
    byte_tokenizer.save_pretrained(folder)

    def noted(recipe: str, target: str) -> list[Decision]:
        request = Request.of(str(folder), recipe=recipe, target=target, out=tmp_path / "out", changes=["passes=[rtn]"])
        return [each for each in prepare(request).decisions if "vllm-bnb-plugin" in each.reason]

    found = noted("nf4", "l4")
    assert len(found) == 1
    refuse(found)
    assert noted("nf4", "cpu-x86") == noted("nvfp4", "l4") == []


def test_experts_that_vllm_does_not_multiply_are_noted_or_refused(
    tmp_path: Path, byte_tokenizer: transformers.PreTrainedTokenizerBase
) -> None:
    folder = tmp_path / "model"
    zoo.mixture("mixtral", vocab_size=len(byte_tokenizer)).save_pretrained(folder)  # type: ignore[operator]
    byte_tokenizer.save_pretrained(folder)

    def noted(target: Target, *changes: str) -> list[str]:
        how = {"recipe": "int4-symmetric", "changes": ["passes=[rtn]", "scheme.weights.group=32", *changes]}
        prepared = prepare(Request.of(str(folder), target=target, out=tmp_path / "out", **how))
        return [one.reason for one in prepared.decisions if one.where == "checkpoint"]

    here = Target.load("cpu-x86")
    reason = "No WNA16 MoE backend supports the deployment configuration"
    assert [reason in text for text in noted(here)] == [True]
    alone = here.model_copy(update={"runtimes": ["vllm"]})
    with pytest.raises(InputError, match=reason) as caught:
        noted(alone)
    assert caught.value.code == "target-cannot-run"
    assert noted(here, "export=[{checkpoint: {layout: dense}}]") == []
    assert not any(reason in text for text in noted(Target.load("h100")))


def test_weights_beyond_float16_get_wider_scales_or_are_refused(
    tmp_path: Path, merging_tokenizer: transformers.PreTrainedTokenizerBase
) -> None:
    """Their codes' scales fit float16, but not what transformers makes of them by multiplying there."""
    folder, place = tmp_path / "m", "model.layers.0.mlp.up_proj"
    model = zoo.tiny("llama", vocab_size=len(merging_tokenizer), num_hidden_layers=1, max_position_embeddings=64)
    with torch.no_grad():
        model.get_parameter(f"{place}.weight")[3, 5] = 3e5
    model.save_pretrained(folder)
    merging_tokenizer.save_pretrained(folder)
    small = ["calibration.samples=2", "calibration.tokens=32"]
    changes = [*small, "scheme.weights.group=32"]
    made = compile_model(Request.of(str(folder), recipe="rtn-int4", out=tmp_path / "out", changes=changes, speed=False))
    wider = [each.where for each in made.decisions if each.code == "scale-dtype"]
    assert wider == [place]
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model")
    ids = zoo.ids(1, 16)
    found, wanted = loaded(ids).logits, model(ids).logits
    assert float((found - wanted).norm()) < 0.3 * float(wanted.norm())

    def gguf(value: float, name: str, more: tuple[str, ...] = ()) -> None:
        with torch.no_grad():
            model.get_parameter(f"{name}.weight")[3, 5] = value
        model.save_pretrained(folder)
        prepare(Request.of(str(folder), recipe="gguf-q4_0", out=tmp_path / "g", changes=[*small, *more]))

    gguf(5e5, place)  # the scale of a code of -8 is a float16
    kept = (f"keep=[{place}]", "export=[{gguf: {floats: bfloat16}}]")
    with pytest.raises(InputError, match=r"float16-overflow.*up_proj.*q4_0 ends at 524032") as caught:
        gguf(6e5, place)
    assert all(each in caught.value.remedy for each in kept)
    gguf(6e5, place, kept)
    with pytest.raises(InputError, match=r"float16-overflow.*embed_tokens.*float16 ends at 65504"):
        gguf(7e4, "model.embed_tokens", ("export=[gguf]", *kept[:1]))
