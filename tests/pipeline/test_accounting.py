"""Every tensor of the source is accounted for, and what stays in floats unasked is said."""

from pathlib import Path

import pytest
from safetensors.torch import load_file
from zoo import shrink

from quantkit.bundle import Decision, decision
from quantkit.errors import GateError, InputError
from quantkit.model.source.open import open_model
from quantkit.model.streaming.stream import StreamedModel
from quantkit.model.structure.experts import routers
from quantkit.pipeline.blocks.layers import about, account, lay_out, left_in_floats
from quantkit.pipeline.gates import refuse, warnings
from quantkit.planning.assigned import ROUTER, TOWER
from quantkit.recipe import Recipe


def stream_of(name: str, tmp_path: Path) -> StreamedModel:
    shrink.tiny(name, tmp_path / name)
    return StreamedModel(open_model(str(tmp_path / name)))


def linears(stream: StreamedModel) -> set[str]:
    from quantkit.model.structure.traced import is_linear

    inside = tuple(f"{block}." for block in stream.block_names)
    return {name for name, module in stream.skeleton.named_modules() if is_linear(module) and name.startswith(inside)}


def test_all_elements_of_the_files_are_counted_once(tmp_path: Path) -> None:
    for name in ("LlamaForCausalLM", "BertModel", "MixtralForCausalLM", "GPT2LMHeadModel"):
        stream = stream_of(name, tmp_path)
        entries = account(stream, linears(stream), [], head=False)
        stored = load_file(tmp_path / name / "model.safetensors")
        assert sum(entry.elements for entry in entries) == sum(value.numel() for value in stored.values())
        assert sum(entry.tensors for entry in entries) == len(stored)


def test_a_tower_is_kept_on_purpose_whatever_its_parts_are(tmp_path: Path) -> None:
    stream = stream_of("Gemma3ForConditionalGeneration", tmp_path)
    entries = account(stream, linears(stream), [], head=False)
    tower = [entry for entry in entries if entry.reason == TOWER]
    assert [(entry.linear, entry.asked) for entry in tower] == [(True, True)]
    assert not [entry for entry in entries if "which is no linear" in entry.reason] and about(entries) == []


def test_the_first_decision_on_a_linear_is_its_reason(tmp_path: Path) -> None:
    stream = stream_of("JetMoeForCausalLM", tmp_path)
    router = sorted(routers(stream.skeleton))[0]
    pairs = [("recipe", ROUTER, "it chooses"), ("awq", "not-scaled", "outputs differ")]
    decisions = [decision(name, code, router, reason) for name, code, reason in pairs]
    entries = account(stream, linears(stream) - {router}, decisions, head=False)
    assert [(entry.reason, entry.asked) for entry in entries if entry.example == router + ".weight"] == [
        ("it chooses", True)
    ]


@pytest.fixture
def unsplit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave merged experts as they are, as those whose forward is not understood."""
    monkeypatch.setattr("quantkit.model.structure.experts.split", lambda *_: None)


@pytest.mark.usefixtures("unsplit")
def test_experts_that_are_no_linears_are_a_warning_and_an_error_under_strict(tmp_path: Path) -> None:
    stream = stream_of("DbrxForCausalLM", tmp_path)
    entries = account(stream, linears(stream) - routers(stream.skeleton), [], head=False)
    share = left_in_floats(entries, unasked=True)
    assert share is not None and share > 0.5
    (taken,) = about(entries)
    assert taken.code == "floats-left"
    assert "ffn.experts" in taken.reason and f"{share:.0%}" in taken.reason
    assert warnings([taken]) == [taken.reason]
    with pytest.raises(GateError):
        refuse([taken])


@pytest.mark.usefixtures("unsplit")
@pytest.mark.parametrize(
    ("name", "glob"),
    [("GptOssForCausalLM", None), ("GraniteMoeForCausalLM", None), ("DbrxForCausalLM", "*.experts.mlp")],
)
def test_experts_that_keep_names_are_asked_for(name: str, glob: str | None, tmp_path: Path) -> None:
    """What `--strict` advises is what it takes."""
    stream = stream_of(name, tmp_path)

    def taken(*keep: str) -> list[Decision]:
        weights = {"format": "int8", "granularity": "channel"}
        asked = {"summary": "a", "scheme": {"weights": weights}, "passes": [{"rtn": {}}], "keep": ["lm_head", *keep]}
        recipe = Recipe.from_dict({"schema": 1, **asked}, name="a")
        layers = lay_out(recipe, stream.skeleton, stream.block_names, stream.source.dtype)
        return [*layers.decisions, *about(account(stream, layers.schemes, layers.decisions, head=False))]

    with pytest.raises(GateError) as caught:
        refuse(taken())
    refuse(taken(glob or caught.value.remedy.split("'")[1]))
    with pytest.raises(InputError, match="keep-unmatched"):
        taken("*.no_such")


def test_a_glob_of_the_module_keeps_all_its_experts(tmp_path: Path) -> None:
    stream = stream_of("GptOssForCausalLM", tmp_path)
    weights = {"format": "int8", "granularity": "channel"}
    asked = {"summary": "a", "scheme": {"weights": weights}, "passes": [{"rtn": {}}], "keep": ["lm_head", "*.experts"]}
    layers = lay_out(
        Recipe.from_dict({"schema": 1, **asked}, name="a"), stream.skeleton, stream.block_names, stream.source.dtype
    )
    assert layers.merged and not any(name in layers.schemes for name in layers.merged)
    assert {taken.code for taken in layers.decisions if ".experts." in taken.where} == {"kept-as-asked"}
    assert not about(account(stream, layers.schemes, layers.decisions, head=False))


def test_routers_of_any_name_stay(tmp_path: Path) -> None:
    assert {name.rpartition("ffn.")[2] for name in routers(stream_of("DbrxForCausalLM", tmp_path).skeleton)} == {
        "router.layer"
    }
    assert any("router.layer" in name for name in routers(stream_of("JetMoeForCausalLM", tmp_path).skeleton))
    assert not routers(stream_of("LlamaForCausalLM", tmp_path).skeleton)


def test_a_tied_head_that_the_recipe_stores_but_nothing_quantized_is_a_linear(tmp_path: Path) -> None:
    """Counted as the embedding that it shares its weight with, the largest linear of a small model would be nothing."""
    stream = stream_of("Gemma3ForCausalLM", tmp_path)
    assert (
        stream.head is not None and stream.files[f"{stream.head}.weight"] == stream.files["model.embed_tokens.weight"]
    )
    asked = account(stream, linears(stream), [], head=True)
    (taken,) = about(asked)
    assert "embed_tokens" in taken.reason
    kept = account(stream, linears(stream), [], head=False)
    assert not about(kept)
    assert sum(each.elements for each in asked) == sum(each.elements for each in kept)
    quantized = account(stream, {*linears(stream), stream.head}, [], head=True)
    assert not about(quantized)


def test_a_table_that_a_head_shares_is_an_embedding_whichever_comes_first(tmp_path: Path) -> None:
    """JinaEmbeddingsV3ForMaskedLM makes its head before its base."""
    stream = stream_of("JinaEmbeddingsV3ForMaskedLM", tmp_path)
    assert next(iter(stream.files)).startswith("lm_head")
    entries = {each.reason: each for each in account(stream, linears(stream), [], head=False)}
    outside = entries["it lies outside the blocks"]
    assert (outside.tensors, outside.elements, outside.example) == (1, 64 * 64, "lm_head.dense.weight")
    assert entries["embeddings"].tensors == 2
