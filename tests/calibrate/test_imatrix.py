"""Importance matrices: what is summed, what is written, and files of other models."""

import struct
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import zoo

from quantkit.calibrate.statistics import imatrix
from quantkit.errors import InputError
from quantkit.model.source.open import open_model
from quantkit.model.streaming.stream import StreamedModel

IDS = torch.randint(0, zoo.VOCABULARY, (3, 12), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("model") / "m"
    zoo.tiny("llama").save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def found(folder: Path) -> imatrix.ImportanceMatrix:
    return imatrix.collected(StreamedModel(open_model(str(folder))), IDS, ["text"])


def test_squares_are_those_of_transformers_own_forward(folder: Path, found: imatrix.ImportanceMatrix) -> None:
    from transformers import AutoModelForCausalLM

    model, seen = AutoModelForCausalLM.from_pretrained(folder), {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(lambda _, given, name=name: seen.update({name: given[0].reshape(36, -1)}))
    with torch.no_grad():
        model(IDS)
    assert found.squares.keys() == {imatrix.tensor_name(name) for name in seen}
    assert found.tokens == 36 and "output.weight" in found.squares and "blk.2.ffn_down.weight" in found.squares
    for name, rows in seen.items():
        torch.testing.assert_close(
            found.squares[imatrix.tensor_name(name)], rows.square().mean(0), rtol=1e-4, atol=1e-7
        )


def test_the_file_is_as_llama_cpp_reads_it(tmp_path: Path, found: imatrix.ImportanceMatrix) -> None:
    """`common_imatrix_load`: float32 sums and counts of each tensor, and three fields."""
    imatrix.write(found, tmp_path / "i.gguf")
    reader = gguf.GGUFReader(tmp_path / "i.gguf")
    fields = {key: value.contents() for key, value in reader.fields.items()}
    assert fields["general.type"] == "imatrix" and fields["imatrix.datasets"] == ["text"]
    assert (fields["imatrix.chunk_count"], fields["imatrix.chunk_size"]) == (3, 12)
    tensors = {each.name: each for each in reader.tensors}
    assert len(tensors) == 2 * len(found.squares)
    sums, counts = tensors["blk.0.attn_q.weight.in_sum2"], tensors["blk.0.attn_q.weight.counts"]
    assert list(sums.shape) == [64, 1] and list(counts.shape) == [1, 1] and counts.data.item() == 36
    np.testing.assert_allclose(sums.data[0] / 36, found.squares["blk.0.attn_q.weight"].numpy(), rtol=1e-6)


@pytest.mark.parametrize("name", ["i.gguf", "i.dat"])
def test_what_was_written_is_read(tmp_path: Path, found: imatrix.ImportanceMatrix, name: str) -> None:
    imatrix.write(found, tmp_path / name)
    again = imatrix.read(tmp_path / name)
    assert again.squares.keys() == found.squares.keys()
    for key, squares in found.squares.items():
        torch.testing.assert_close(again.squares[key], squares)
    linears = {"model.layers.0.self_attn.q_proj": 64}
    assert set(again.of_linears(linears, name)) == set(linears)


def test_one_of_another_model_is_refused(found: imatrix.ImportanceMatrix) -> None:
    with pytest.raises(InputError, match=r"imatrix-foreign.*64 inputs of blk.0.attn_q.weight, which has 96"):
        found.of_linears({"model.layers.0.self_attn.q_proj": 96}, "i.gguf")
    with pytest.raises(InputError, match=r"imatrix-foreign.*no values for blk.9.attn_q"):
        found.of_linears({"model.layers.9.self_attn.q_proj": 64}, "i.gguf")


def test_one_of_a_larger_model_is_refused(found: imatrix.ImportanceMatrix) -> None:
    parts = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
    parts += ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    layers = {name: len(squares) for name, squares in found.squares.items() if name.startswith("blk.")}
    ours = {f"model.layers.{number}.{part}" for number in range(3) for part in parts}
    widths = {linear: layers[imatrix.tensor_name(linear)] for linear in ours}
    found.demand_of(widths, "i.gguf")
    fewer = {linear: width for linear, width in widths.items() if ".2." not in linear}
    with pytest.raises(InputError, match=r"imatrix-foreign.*blk.2.*which is not in the model"):
        found.demand_of(fewer, "i.gguf")
    # and one of a smaller model, which a block of this one would wait for in vain
    smaller = replace(found, squares={name: each for name, each in found.squares.items() if ".2." not in name})
    with pytest.raises(InputError, match=r"imatrix-foreign.*no values for blk.2.*the rest of model.layers.2;"):
        smaller.demand_of(widths, "i.gguf")


@pytest.mark.parametrize(
    ("kind", "linears"),
    [
        ("phi3", {"model.layers.1.self_attn.qkv_proj": "attn_qkv", "model.layers.1.mlp.gate_up_proj": "ffn_up"}),
        ("gpt2", {"transformer.h.1.attn.c_attn": "attn_qkv", "transformer.h.1.mlp.c_proj": "ffn_down"}),
        ("gpt_neox", {"gpt_neox.layers.1.attention.query_key_value": "attn_qkv"}),
        ("gemma3_text", {"model.layers.1.mlp.down_proj": "ffn_down"}),
    ],
)
def test_names_are_those_of_the_models_own_architecture(kind: str, linears: dict[str, str]) -> None:
    for linear, name in linears.items():
        assert imatrix.tensor_name(linear, kind) == f"blk.1.{name}.weight"
        squares = {f"blk.1.{name}.weight": torch.ones(8)}
        assert set(imatrix.ImportanceMatrix(squares, 8, 8).of_linears({linear: 8}, "i.gguf")) == {linear}


def test_a_map_of_one_architecture_leaves_those_of_others_alone() -> None:
    """gguf's own class writes an architecture's names into what all share."""
    imatrix.tensor_names("model.layers.0.self_attn.q_proj")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 1)
    assert names.get_name("model.layers.0.post_attention_layernorm") == "blk.0.ffn_norm"


def test_what_llama_cpp_has_no_name_for_is_refused_before_work(tmp_path: Path) -> None:
    zoo.mixture("mixtral").save_pretrained(tmp_path / "m")
    stream = StreamedModel(open_model(str(tmp_path / "m")))
    with pytest.raises(InputError, match=r"imatrix-unnamed.*experts.*in a model of type mixtral"):
        imatrix.collected(stream, IDS)


def test_a_place_that_cannot_be_written_is_refused_before_work(tmp_path: Path) -> None:
    from quantkit.pipeline.imatrix import importance_of

    with pytest.raises(InputError, match="file-unwritable"):
        importance_of(str(tmp_path / "no model"), tmp_path / "nowhere" / "i.gguf")


def test_a_head_is_weighed_by_the_file(folder: Path, tmp_path: Path, found: imatrix.ImportanceMatrix) -> None:
    from quantkit.passes import load_pass

    rtn = load_pass("rtn")
    imatrix.write(found, tmp_path / "i.gguf")
    settings = rtn.Settings(range="importance", imatrix=str(tmp_path / "i.gguf"))
    moments = rtn.brought("lm_head", 64, settings)
    assert moments is not None and moments.decisions == []
    torch.testing.assert_close(moments.mean_square[0], found.squares["output.weight"])
    with pytest.raises(InputError, match=r"imatrix-foreign.*64 inputs of output.weight, which has 96"):
        rtn.brought("lm_head", 96, settings)
    # llama-imatrix leaves the head out, unless it is told to take it
    without = {name: squares for name, squares in found.squares.items() if name != "output.weight"}
    imatrix.write(replace(found, squares=without), tmp_path / "i.gguf")
    moments = rtn.brought("lm_head", 64, settings)
    assert moments is not None and [each.code for each in moments.decisions] == ["no-importance"]
    assert rtn.brought("lm_head", 64, rtn.Settings(range="importance")) is None


def test_damaged_files_are_one_line(tmp_path: Path, found: imatrix.ImportanceMatrix) -> None:
    path = tmp_path / "i.gguf"
    imatrix.write(found, path)
    raw = path.read_bytes()
    for bad in (raw[:200], raw[:-40], b"GGUF", b"", b"\x00" * 64, raw.replace(b"imatrix", b"imatric", 1)):
        path.write_bytes(bad)
        with pytest.raises(InputError, match="imatrix-damaged"):
            imatrix.read(path)
    for value in (torch.nan, -1.0, torch.inf):
        imatrix.write(replace(found, squares={"blk.0.attn_q.weight": torch.full((64,), value)}), path)
        with pytest.raises(InputError, match=r"imatrix-damaged.*blk\.0\.attn_q\.weight"):
            imatrix.read(path)
    for count in (0.0, -1.0, torch.nan, torch.inf):
        path.write_bytes(raw.replace(struct.pack("<f", found.tokens), struct.pack("<f", count)))
        with pytest.raises(InputError, match=rf"imatrix-damaged.*sums of {count:g} tokens"):
            imatrix.read(path)
    with pytest.raises(InputError, match="file-missing"):
        imatrix.read(tmp_path / "none.gguf")


def test_rtn_weighs_by_a_file_as_by_its_own_calibration(tmp_path: Path, folder: Path, byte_tokenizer: object) -> None:
    """Of the first block the inputs are the same, so the codes are."""
    import json

    from safetensors.torch import load_file

    from quantkit.pipeline import Request
    from quantkit.pipeline.compile import compile_model

    zoo.tiny("llama", vocab_size=258, max_position_embeddings=128).save_pretrained(tmp_path / "m")
    byte_tokenizer.save_pretrained(tmp_path / "m")  # type: ignore[attr-defined]
    from quantkit.pipeline.imatrix import importance_of

    importance_of(str(tmp_path / "m"), tmp_path / "i.gguf", samples=4, tokens=32)
    changes = ["calibration.samples=4", "calibration.tokens=32", "scheme.weights.group=32", "rtn.range=importance"]
    stored = []
    for name, more in {"own": [], "file": [f"rtn.imatrix={tmp_path / 'i.gguf'}"]}.items():
        request = Request.of(str(tmp_path / "m"), recipe="rtn-int4", out=tmp_path / name, changes=[*changes, *more])
        compile_model(request)
        stored.append(load_file(tmp_path / name / "model" / "model.safetensors"))
    name = "model.layers.0.self_attn.q_proj.weight_packed"
    nibbles = [each[name].view(torch.uint8) for each in stored]
    assert float((nibbles[0] == nibbles[1]).float().mean()) > 0.99  # sums are in another order
    manifest = json.loads((tmp_path / "file" / "manifest.json").read_text())
    assert manifest["recipe"]["passes"][0]["rtn"]["imatrix"] == "path:i.gguf"  # and no folder of this machine
