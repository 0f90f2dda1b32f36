"""A plan of an encoder and a decoder: both caches, and what a step of each phase reads."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from quantkit.errors import InputError
from quantkit.model.sizes import configs
from quantkit.pipeline.plan import PlanQuestion, plan
from quantkit.planning.memory import storage
from quantkit.planning.roofline import ModelStep, rows_of
from quantkit.planning.support import shipped
from quantkit.recipe import ExportStep
from quantkit.target import Target

T5: dict[str, Any] = {
    **{"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "dtype": "float32", "vocab_size": 1000},
    **{"d_model": 256, "d_kv": 64, "d_ff": 1024, "num_layers": 3, "num_decoder_layers": 2, "num_heads": 4},
}
BART: dict[str, Any] = {
    **{"model_type": "bart", "architectures": ["BartForConditionalGeneration"], "dtype": "float32"},
    **{"d_model": 256, "encoder_layers": 3, "decoder_layers": 2, "encoder_attention_heads": 4, "vocab_size": 1000},
    **{"decoder_attention_heads": 4, "encoder_ffn_dim": 512, "decoder_ffn_dim": 512, "max_position_embeddings": 512},
}

WHISPER: dict[str, Any] = {
    **{"model_type": "whisper", "architectures": ["WhisperForConditionalGeneration"], "dtype": "float32"},
    **{"d_model": 384, "encoder_layers": 4, "decoder_layers": 4, "encoder_attention_heads": 6, "vocab_size": 51864},
    **{"decoder_attention_heads": 6, "encoder_ffn_dim": 1536, "decoder_ffn_dim": 1536, "num_mel_bins": 80},
    **{"max_source_positions": 1500, "max_target_positions": 448},
}


@pytest.mark.parametrize("config", [T5, BART])
def test_a_step_reads_the_decoder_and_a_prompt_the_encoder(config: dict[str, Any]) -> None:
    model = configs.from_config(config, "x")
    prompt, step = ModelStep(2, tokens=100), ModelStep(2, context=130)
    for matrix in model.inside():
        part = matrix.name.partition("encoder_attn" if config is BART else "EncDecAttention")
        crossing = matrix.name.endswith((".k_proj", ".v_proj", ".k", ".v")) and part[1]
        of_source = "encoder." in matrix.name.removeprefix("model.")[:8] or crossing
        assert rows_of(matrix, prompt) == (200 if of_source else 2), matrix.name
        assert rows_of(matrix, step) == (0 if of_source else 2), matrix.name


def test_both_caches_hold_the_source_and_the_answer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BART))
    question = PlanQuestion(str(tmp_path), recipes=["float"], prompt=300, output=100, batches=(1,))
    (candidate,) = plan(question, samples=[]).candidates
    assert candidate.runtime in ("torch", "onnxruntime") and candidate.memory is not None
    width = 4  # a CPU's floats
    # keys and values of 300 tokens of source and of 100 of answer, in each of two decoder blocks
    assert candidate.memory.parts["cache"] == 2 * 2 * (300 + 100) * 256 * width


def test_no_other_export_is_planned_and_no_other_runtime(tmp_path: Path) -> None:
    model = configs.from_config(T5, "x")
    other = shipped("awq-int4").model_copy(update={"export": [ExportStep(name="openvino")]})
    for recipe, why in ((shipped("gguf-q8_0"), "`gguf` supports"), (other, "one stack of blocks")):
        with pytest.raises(InputError, match=why):
            storage(model, recipe)
    (tmp_path / "config.json").write_text(json.dumps(T5))
    bare = Target.load("cpu-x86").model_copy(update={"runtimes": ["llama_cpp"]})
    with pytest.raises(InputError, match="target-cannot-run"):
        plan(PlanQuestion(str(tmp_path), recipes=["float"], target=bare), samples=[])


def test_a_recording_has_as_many_positions_as_the_encoder(tmp_path: Path) -> None:
    architecture = configs.from_config(WHISPER, "x")
    with torch.device("meta"):
        model = transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**WHISPER))
    assert architecture.parameters == sum(value.numel() for value in model.parameters())
    linears = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    assert {matrix.name for matrix in architecture.inside()} == linears - {"proj_out"}
    (tmp_path / "config.json").write_text(json.dumps(WHISPER))
    question = PlanQuestion(str(tmp_path), recipes=["float"], output=100, batches=(1,))
    (candidate,) = plan(question, samples=[]).candidates
    assert candidate.memory is not None and candidate.memory.parts["cache"] == 4 * 2 * (1500 + 100) * 384 * 4
