"""Schemes: the format says what it has, and what holds where nothing is written."""

from typing import Any

import pytest

from quantkit.errors import InputError
from quantkit.recipe import Recipe

BASE: dict[str, Any] = {"schema": 1, "summary": "a test", "passes": ["rtn"]}


@pytest.mark.parametrize(
    ("written", "granularity", "group", "scale"),
    [
        ({"format": "int4"}, "channel", None, "float16"),
        ({"format": "int4", "granularity": "group", "group": 64}, "group", 64, "float16"),
        ({"format": "fp8_e4m3"}, "channel", None, "float32"),
        ({"format": "fp8_e4m3", "granularity": "block"}, "block", 128, "float32"),
        ({"format": "nf4"}, "group", 64, "float32"),
        ({"format": "nf4", "group": 256, "scale": "double"}, "group", 256, "double"),
        ({"format": "mxfp8"}, "group", 32, "e8m0"),
        ({"format": "nvfp4"}, "group", 16, "fp8_e4m3"),
    ],
)
def test_the_format_fills_in_what_is_not_written(
    written: dict[str, Any], granularity: str, group: int | None, scale: str
) -> None:
    found = Recipe.from_dict({**BASE, "scheme": {"weights": written}}, name="mine").scheme.weights
    assert found is not None
    assert (found.granularity, found.group, found.symmetric, found.scale) == (granularity, group, True, scale)
    assert type(found).model_validate(found.model_dump()) == found


@pytest.mark.parametrize(
    ("written", "says"),
    [
        ({"format": "nf4", "granularity": "channel"}, "nf4 has granularity group, not channel"),
        ({"format": "int4", "granularity": "block", "group": 32}, "int4 has granularity channel, tensor or group, not"),
        ({"format": "nf4", "group": 48}, "2048 or 4096, not 48"),
        ({"format": "mxfp4", "group": 64}, "mxfp4 has groups of 32, not 64"),
        ({"format": "nvfp4", "symmetric": False}, "nvfp4 is always symmetric"),
        ({"format": "mxfp4", "scale": "float16"}, "mxfp4 has scales of type e8m0, not float16"),
        ({"format": "int4", "scale": "double"}, "float16, bfloat16 or float32, not double"),
        ({"format": "nf5"}, "no format is called 'nf5'; did you mean 'nf4'?"),
    ],
)
def test_what_a_format_does_not_have_is_refused_with_what_it_has(written: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError) as caught:
        Recipe.from_dict({**BASE, "scheme": {"weights": written}}, name="mine")
    assert says in caught.value.line()


@pytest.mark.parametrize("part", ["activations", "kv_cache"])
def test_formats_of_activations_and_cache_are_known_ones(part: str) -> None:
    with pytest.raises(InputError) as caught:
        Recipe.from_dict({**BASE, "scheme": {part: {"format": "int9"}}}, name="mine")
    assert "no format is called 'int9'" in caught.value.line()
