"""A compile of a model with an adapter: the merged model is the original, from the manifest to the last command."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import zoo
from conftest import CHANGES, recipe  # type: ignore[import-not-found]
from safetensors.torch import load_file, save_file

import quantkit
from quantkit.bundle import Bundle
from quantkit.errors import InputError
from quantkit.measurement.rows import Row
from quantkit.pipeline.compile import asked
from quantkit.report.bundle import figures, usage

MODULES = ("self_attn.q_proj", "mlp.down_proj")


def adapter(folder: Path, rank: int = 4, **changes: object) -> Path:
    """Write an adapter for the tiny model, in PEFT's form."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(rank)
    tensors = {}
    for module, (rows, columns) in zip(MODULES, ((64, 64), (64, 96)), strict=True):
        name = f"base_model.model.model.layers.0.{module}"
        tensors[f"{name}.lora_A.weight"] = 0.3 * torch.randn(rank, columns, generator=generator)
        tensors[f"{name}.lora_B.weight"] = 0.3 * torch.randn(rows, rank, generator=generator)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "base_model_name_or_path": "tiny", **changes}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, byte_tokenizer: Any) -> Path:
    place = tmp_path_factory.mktemp("base") / "tiny"
    zoo.save(place, byte_tokenizer, "llama", **CHANGES)
    return place


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quantkit.pipeline.blocks.tokens.SCORED", 300)


def rows(bundle: Bundle) -> dict[str, Row]:
    return {row.name: row for row in map(Row.model_validate, bundle.measurements)}


def test_a_bundle_s_original_is_the_merged_model(base: Path, tmp_path: Path) -> None:
    french, how = adapter(tmp_path / "french"), {"speed": False, "vllm": False}
    floats = quantkit.compile(base, recipe("checkpoint", passes=()), out=tmp_path / "f", adapters=french, **how)
    assert rows(floats)["accuracy.kl"].value == pytest.approx(0.0, abs=1e-6)
    plain, merged = (
        transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for folder in (base, floats.model_folder)
    )
    weights = load_file(french / "adapter_model.safetensors")
    name = f"model.layers.0.{MODULES[0]}"
    product = weights[f"base_model.model.{name}.lora_B.weight"] @ weights[f"base_model.model.{name}.lora_A.weight"]
    difference = merged.get_submodule(name).weight - plain.get_submodule(name).weight
    assert torch.allclose(difference, 2 * product, atol=1e-6)
    bundle = quantkit.compile(base, recipe("checkpoint"), out=tmp_path / "q", adapters=[french], **how)
    source = bundle.manifest.model.source
    assert bundle.manifest.model.name == "tiny+french" and source.ref == "path:tiny"
    assert source.sha256 == floats.manifest.model.source.sha256 != source.base
    (entry,) = source.adapters
    assert (entry.ref, entry.kind, entry.ranks, entry.alpha, entry.weights) == ("path:french", "LoRA", [4], 8.0, 2)
    assert str(tmp_path) not in json.dumps(bundle.manifest.as_dict())
    assert "path:french, LoRA, rank 4, alpha 8, 2 weights" in figures.adapter(entry)
    assert "--adapter ./french" in usage.again(bundle.manifest).text
    before = rows(bundle)["accuracy.kl"]
    again = {row["name"]: row for row in quantkit.measure(bundle, speed=False)}
    assert again["accuracy.kl"]["baseline"] == before.as_dict()["baseline"]
    assert again["accuracy.kl"]["value"] == pytest.approx(before.value, rel=0.5)
    by_bundle = {row["name"]: row for row in quantkit.measure(bundle, baseline=floats.path, speed=False)}
    assert by_bundle["accuracy.kl"]["value"] == pytest.approx(again["accuracy.kl"]["value"], rel=1e-3)
    assert quantkit.compare(base, bundle, speed=False).b.content_sha256 == bundle.manifest.content_sha256


def test_an_adapter_that_is_gone_or_fits_no_more_is_told_before_work(base: Path, tmp_path: Path) -> None:
    french = adapter(tmp_path / "french", rank=3)  # one that lies nowhere else
    bundle = quantkit.compile(base, recipe("checkpoint"), out=tmp_path / "q", adapters=french, speed=False, vllm=False)
    french.rename(tmp_path / "moved")
    with pytest.raises(InputError, match="baseline-needed") as refused:
        quantkit.measure(bundle, speed=False)
    assert "french" in refused.value.line() and "\n" not in refused.value.line()
    with pytest.raises(InputError, match="file-missing"):
        asked(str(base), adapters=[str(french)])
    with pytest.raises(InputError, match="adapter-kind"):
        asked(str(base), adapters=[str(adapter(tmp_path / "ia3", peft_type="IA3"))])
    with pytest.raises(InputError, match="usage"):
        asked("fashion-mnist-cnn", recipe="int8-network", adapters=[str(tmp_path / "moved")])
    with pytest.raises(InputError, match="adapter-misfit"):
        wrong = adapter(tmp_path / "wrong")
        tensors = load_file(wrong / "adapter_model.safetensors")
        moved = {name.replace("layers.0", "layers.7"): value for name, value in tensors.items()}
        save_file(moved, wrong / "adapter_model.safetensors")
        quantkit.compile(base, recipe("checkpoint"), out=tmp_path / "w", adapters=wrong, speed=False)
    assert not (tmp_path / "w").exists() and not (tmp_path / "w.partial").exists()


def test_an_adapter_changes_what_a_resume_goes_on_with(base: Path, tmp_path: Path) -> None:
    one, two = adapter(tmp_path / "one"), adapter(tmp_path / "two", rank=2)
    how = {"speed": False, "vllm": False, "out": tmp_path / "q"}
    first = quantkit.compile(base, recipe("checkpoint"), adapters=[one, two], **how)
    again = quantkit.compile(base, recipe("checkpoint"), adapters=[one, two], resume=True, **how)
    assert again.manifest.content_sha256 == first.manifest.content_sha256
    with pytest.raises(InputError, match="another model"):
        quantkit.compile(base, recipe("checkpoint"), adapters=[two, one], resume=True, **how)


def test_a_model_in_memory_takes_adapters_too(base: Path, tmp_path: Path) -> None:
    shutil.copytree(base, tmp_path / "tiny")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "tiny")
    french = adapter(tmp_path / "french")
    bundle = quantkit.compile(model, recipe("checkpoint"), out=tmp_path / "q", adapters=french, speed=False, vllm=False)
    assert bundle.manifest.model.source.adapters[0].ref == "path:french"


# --- other commands that take a model --------------------------------------------------------------------------------


def test_a_search_an_importance_matrix_and_a_rehearsal_see_the_merged_model(base: Path, tmp_path: Path) -> None:
    from quantkit.pipeline.imatrix import importance_of
    from quantkit.pipeline.rehearsal import rehearse
    from quantkit.pipeline.request import Request

    french = adapter(tmp_path / "french")
    how: dict[str, Any] = {"formats": ["int4", "int8"], "samples": 1, "budget": "bits=5"}
    searched = [
        quantkit.tune(base, recipe=recipe("checkpoint"), out=tmp_path / f"t{number}", adapters=adapters, **how)
        for number, adapters in enumerate(((), french))
    ]
    plain, merged = (tuned.front for tuned in searched)
    assert merged["model"]["name"] == "tiny+french" and merged["model"]["sha256"] != plain["model"]["sha256"]
    assert merged["chosen"]["measured"] != plain["chosen"]["measured"]
    bundle = Bundle.load(tmp_path / "t1" / "bundle").manifest.model.source
    assert bundle.sha256 == merged["model"]["sha256"] and bundle.adapters
    few = {"samples": 2, "tokens": 32}
    one = importance_of(str(base), tmp_path / "a.dat", **few)
    other = importance_of(str(base), tmp_path / "b.dat", adapters=[str(french)], **few)
    name = next(name for name in one.squares if "attn_output" in name)
    assert any((one.squares[name] != other.squares[name]).reshape(-1).tolist())
    asked_for = Request.of(str(base), recipe=recipe("checkpoint"), adapters=[french], speed=False)
    assert rehearse(asked_for).ok


def test_a_plan_reads_the_adapter_s_config_and_shapes(tmp_path: Path) -> None:
    place = tmp_path / "french"
    place.mkdir()

    def planned(**changes: object) -> Any:
        config = {"peft_type": "LORA", "r": 8, "base_model_name_or_path": "org/base", **changes}
        (place / "adapter_config.json").write_text(json.dumps(config))
        return quantkit.plan("smollm2-135m", ["float", "awq-int4"], adapters=place)

    plain = quantkit.plan("smollm2-135m", ["float", "awq-int4"])
    merged = planned(target_modules=["q_proj", "v_proj"])
    assert merged.architecture == plain.architecture
    first = "the adapter french is merged first, into 60 of 210 linears; it changes no size"
    assert merged.notes[0] == f"{first}; its weights are not here, so nothing tells whether they fit"
    assert "into 210 of 210" in planned(target_modules="all-linear").notes[0]
    assert "into 30 of 210" in planned(target_modules=r".*mlp\.up_proj").notes[0]
    for changes in (
        {"target_modules": ["lm_head"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    ):
        parted = planned(**changes)
        assert "no longer share" in parted.notes[0] and not parted.architecture.tied
        assert parted.architecture.parameters == plain.architecture.parameters + 49152 * 576
    for changes, code in (
        ({"target_modules": ["c_attn"]}, "adapter-misfit"),
        ({"target_modules": ["q_proj"], "peft_type": "IA3"}, "adapter-kind"),
    ):
        with pytest.raises(InputError, match=code) as refused:
            planned(**changes)
        assert "\n" not in refused.value.line()
    with pytest.raises(InputError, match=r"adapter-misfit.*made for .*, and smollm2-135m has \[576, 1536\]"):
        quantkit.plan("smollm2-135m", ["float"], adapters=adapter(tmp_path / "tiny"))
    with pytest.raises(InputError, match=r"adapter-unmerged.*--adapter"):
        quantkit.plan(place)
