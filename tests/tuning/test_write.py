"""An assignment becomes a recipe that says the same, in as few overrides as read well."""

from pathlib import Path

import numpy as np
import pytest

from quantkit.recipe import Recipe
from quantkit.scheme import WeightScheme
from quantkit.tuning.answer import globs, recipe_of, recipe_text

INT4 = WeightScheme(format="int4", granularity="group", group=32, symmetric=True)
INT8 = WeightScheme(format="int8", granularity="channel", symmetric=True)
KINDS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")
LAYERS = [f"model.layers.{block}.{kind}" for block in range(12) for kind in KINDS]
SIZES = dict.fromkeys(LAYERS, 100)


def base(**changes: object) -> Recipe:
    data = {
        "summary": "a base",
        "scheme": {"weights": INT4.model_dump()},
        "passes": [{"gptq": {"damping": 1e-05}}],
        "export": [{"checkpoint": {"layout": "pack-quantized"}}],
        "gates": {"kl_max": 0.5},
        **changes,
    }
    return Recipe.from_dict(data, name="base")


@pytest.mark.parametrize("seed", range(8))
def test_any_assignment_is_said_exactly(seed: int, tmp_path: Path) -> None:
    random = np.random.default_rng(seed)
    schemes = [INT4, INT8, None]
    chances = [[0.5, 0.3, 0.2], [0.9, 0.1, 0.0], [0.1, 0.9, 0.0], [0.0, 0.2, 0.8]][seed % 4]
    assignment = {layer: schemes[random.choice(3, p=chances)] for layer in LAYERS}
    path = tmp_path / "tuned.yaml"
    path.write_text(
        recipe_text(recipe_of(base(), assignment, SIZES, name="tuned", summary="s: a # sign"), ["what it is"])
    )
    read = Recipe.load(path)
    assert {layer: read.weights_for(layer) for layer in LAYERS} == assignment
    assert read.summary == "s: a # sign"
    assert read.passes[0].settings.damping == 1e-05
    assert (read.gates, read.export) == (base().gates, base().export)


def test_a_kind_of_layer_is_one_override_and_an_exception_another() -> None:
    assignment = {layer: INT8 if layer.endswith("down_proj") else INT4 for layer in LAYERS}
    assert globs(assignment, INT4, SIZES) == [("*.mlp.down_proj", INT8)]
    assignment["model.layers.1.mlp.down_proj"] = None
    assignment["model.layers.3.mlp.down_proj"] = INT4
    found = globs(assignment, INT4, SIZES)
    assert found[0] == ("*.mlp.down_proj", INT8)
    assert found[1:] == [("model.layers.1.mlp.down_proj", None), ("model.layers.3.mlp.down_proj", INT4)]


def test_a_block_or_a_part_of_it_is_one_override() -> None:
    assignment: dict[str, WeightScheme | None] = dict.fromkeys(LAYERS, INT4)
    assignment |= {layer: INT8 for layer in LAYERS if layer.startswith("model.layers.1.")}
    assignment |= {layer: None for layer in LAYERS if layer.startswith("model.layers.11.self_attn.")}
    found = globs(assignment, INT4, SIZES)
    assert found == [("model.layers.1.*", INT8), ("model.layers.11.self_attn.*", None)]


def test_one_scheme_for_all_needs_no_override() -> None:
    made = recipe_of(base(), dict.fromkeys(LAYERS, INT8), SIZES, name="tuned", summary="s")
    assert (made.overrides, made.scheme.weights) == ([], INT8)


def test_nothing_quantized_is_a_recipe_without_passes() -> None:
    made = recipe_of(base(), dict.fromkeys(LAYERS), SIZES, name="tuned", summary="s")
    assert made.passes == []
    assert all(made.weights_for(layer) is None for layer in LAYERS)


def test_the_users_own_overrides_stay_and_win() -> None:
    own = [{"match": "lm_head", "weights": {"format": "int8", "granularity": "channel", "symmetric": True}}]
    assignment = {layer: INT8 if "down" in layer else INT4 for layer in LAYERS}
    made = recipe_of(base(overrides=own, keep=["embeddings"]), assignment, SIZES, name="tuned", summary="s")
    assert made.overrides[-1].match == "lm_head"
