"""What a step of a GGUF file costs: against the model's own parameters and the `gguf` package's count of bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import zoo
from exported import export, write_as

from quantkit.exporters.gguf.exporter import EXPORT
from quantkit.measurement.operators.tax import StepCost
from quantkit.runtimes.llama_cpp.session import AttentionSizes, work_of_file
from quantkit.scheme import WeightScheme

# of `zoo.tiny`
SIZES = AttentionSizes(layers=2, heads=4, kv_heads=2, head_dim=16, vocabulary=258)


@pytest.mark.parametrize("name", ["llama", "llama-tied"])
@pytest.mark.parametrize("form", ["q8_0", "float32"])
def test_it_is_what_the_parameters_are(name: str, form: str, tmp_path: Path, merging_tokenizer: Any) -> None:
    model = zoo.tiny(name, vocab_size=len(merging_tokenizer))
    model.save_pretrained(tmp_path / "m")
    merging_tokenizer.save_pretrained(tmp_path / "m")
    how = None if form == "float32" else WeightScheme(format=form)
    made = export(tmp_path / "m", tmp_path / "b", how, layout="dense")
    write_as(EXPORT, made.folder, made.source, made.stream, made.results, {"floats": "float32"})
    path = made.folder / "gguf" / "model.gguf"
    found = StepCost(form, **work_of_file(path, SIZES))
    tied = name == "llama-tied"
    inside = [value for key, value in model.named_parameters() if value.dim() > 1 and ".layers." in key]
    table = model.get_input_embeddings().weight
    assert found.flops_per_token == 2 * sum(value.numel() for value in inside)
    assert found.head_flops == 2 * table.numel()
    stored = {each.name: int(each.n_bytes) for each in gguf.GGUFReader(path).tensors}
    assert ("output.weight" in stored) is not tied
    read = sum(stored.values()) - (0 if tied else stored["token_embd.weight"])
    assert found.weight_bytes == read
    assert found.compute == ("fp32" if form == "float32" else "int8")
    assert found.float_bytes == (4 * table.numel() if form == "q8_0" else found.flops_per_token * 2 + 4 * table.numel())
    # keys and values of two layers, two heads of 16, in float16
    assert found.kv_bytes_per_token == 2 * 2 * 2 * 16 * 2
    assert found.attention_flops == 4 * 2 * 4 * 16
