"""The shipped recipes of GGUF files, compiled whole: a head of its own, and one that is tied to the embedding."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zoo
from thorough import beside

from quantkit import machine
from quantkit.pipeline.compile import Compiled, compile_model
from quantkit.pipeline.export import export_bundle
from quantkit.pipeline.request import Request
from quantkit.recipe import Recipe
from quantkit.runtimes import load_runtime

pytestmark = pytest.mark.usefixtures("one_thread")
# less of the text, and no accuracy asked of a model of random weights
FEW = ("calibration.samples=2", "calibration.tokens=32", "calibration.generated=0", "gates={}")
RECIPES = ("gguf-q4_0", "gguf-iq4_nl", "gguf-q4_k_m", "gguf-q3_k_m", "gguf-q5_k_m", "gguf-q8_0")
# of super-blocks of 256 weights alone: 256 divides the widths of the model that they get
POINTS = {"gguf-iq4_xs": "IQ4_XS", "gguf-iq3_s": "IQ3_S", "gguf-iq3_xxs": "IQ3_XXS", "gguf-iq2_m": "IQ2_S"}
WIDE = {"hidden_size": 256, "intermediate_size": 256}
PAIRS = [(recipe, model) for recipe in RECIPES for model in ("llama", "llama-tied")]
PAIRS += [(recipe, f"{model}-wide") for recipe in POINTS for model in ("llama", "llama-tied")]
ALWAYS = [pair for pair in PAIRS if pair[1] == "llama-tied" and pair[0] != "gguf-q5_k_m"]
ALWAYS.append(("gguf-iq3_s", "llama-tied-wide"))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, merging_tokenizer: Any) -> Callable[[str], Path]:
    place = tmp_path_factory.mktemp("models")

    def made(name: str) -> Path:
        if not (place / name).exists():
            changes = {"vocab_size": len(merging_tokenizer), "num_hidden_layers": 2}
            wide = WIDE if name.endswith("-wide") else {}
            zoo.save(place / name, merging_tokenizer, name.removesuffix("-wide"), **changes, **wide)
        return place / name

    return made


def compiled(model: Path, out: Path, recipe: str, *changes: str, patch: pytest.MonkeyPatch) -> Compiled:
    patch.setattr("quantkit.pipeline.blocks.tokens.SCORED", 300)
    calibrated = [each for each in FEW if not (recipe == "gguf-q8_0" and each.startswith("calibration"))]
    return compile_model(
        Request.of(str(model), recipe=Recipe.load(recipe, (*calibrated, *changes)), out=out, speed=False)
    )


def kl(result: Compiled) -> dict[str | None, float]:
    """By the runtime that was scored in."""
    rows = [row for row in result.bundle.measurements if row["name"] == "accuracy.kl"]
    return {row["runtime"]: row["value"] for row in rows}


@pytest.mark.parametrize(("recipe", "model"), beside(ALWAYS, PAIRS))
def test_a_shipped_recipe_compiles(
    recipe: str, model: str, models: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = compiled(models(model), tmp_path / "b", recipe, patch=monkeypatch)
    checks = {check.name: check for check in result.bundle.manifest.checks}
    assert all(check.ok for check in checks.values())
    wanted = {"gguf.tensors", "reload.gguf", *(["reload.llama_cpp"] if machine.has("llama_cpp") else [])}
    assert wanted <= checks.keys()
    # the same numbers in the same order: where a table of floats is looked up in, this is 0.008 (Q8_0) to 0.13
    assert checks["reload.gguf"].value == pytest.approx(0, abs=1e-6)
    if recipe in POINTS:
        import gguf

        kinds = {each.tensor_type.name for each in gguf.GGUFReader(result.bundle.path / "gguf" / "model.gguf").tensors}
        assert POINTS[recipe] in kinds, "256 divides all widths"


@pytest.mark.parametrize("model", beside(["llama-tied"], ["llama", "llama-tied"]))
def test_a_table_of_codes_costs_what_it_costs_without_llama_cpp(
    model: str, models: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a tied head in floats the table's codes are the head's."""
    monkeypatch.setattr(type(load_runtime("llama_cpp")), "why_not_here", lambda self, folder=None: "not installed")
    monkeypatch.setattr("quantkit.exporters.gguf.check.machine.has", lambda name: False)
    found = {}
    for table in ("{format: q4_0}", "null"):
        changes = (f"gguf.embedding={table}", "gguf.floats=float32", "keep=[lm_head]")
        out = tmp_path / table[:4]
        found[table] = kl(compiled(models(model), out, "gguf-q8_0", *changes, patch=monkeypatch))
    coded, floats = (each["torch"] for each in found.values())
    assert coded > 10 * floats > 0


@pytest.mark.parametrize("model", beside(["llama-tied"], ["llama", "llama-tied"]))
def test_a_file_is_added_to_a_finished_bundle(
    model: str, models: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the checkpoint's codes; the table, which has none there, by codes of its own."""
    import gguf
    import torch

    from quantkit.model.source import pretrained

    weights = {"format": "int4", "granularity": "group", "group": 32, "symmetric": False}
    recipe = {"summary": "a test", "scheme": {"weights": weights}, "passes": ["rtn"], "export": ["checkpoint"]}
    monkeypatch.setattr("quantkit.pipeline.blocks.tokens.SCORED", 300)
    chosen = Recipe.from_dict({**recipe, "calibration": {"set": "prose-en", "samples": 2, "tokens": 32}}, name="x")
    bundle = compile_model(Request.of(str(models(model)), recipe=chosen, out=tmp_path / "b", speed=False)).bundle
    done = export_bundle(bundle, "gguf", ["embedding={format: q6_k}", "floats=float16"])
    assert {"gguf.tensors", "reload.gguf"} <= {check.name for check in done.checks}
    assert all(check.ok for check in [*done.checks, *done.bundle.verify()])
    path = bundle.path / "gguf" / "model.gguf"
    kinds = {each.name: each.tensor_type.name for each in gguf.GGUFReader(path).tensors}
    assert kinds["token_embd.weight"] == "Q8_0" and kinds["blk.0.attn_q.weight"] == "Q4_1"
    assert kinds.get("output.weight") == (None if model == "llama-tied" else "F16")
    assert [each.code for each in done.decisions] == ["type-fallback"]
    ids = torch.arange(20)[None]
    with torch.no_grad():
        theirs = pretrained.of_gguf(path, {})(ids).logits
        ours = load_runtime("torch").open(bundle.path, 1).answers(ids).all()
    assert 0 < float((theirs - ours).abs().max() / ours.abs().max()) < 0.05, "by what the table and the floats lose"
