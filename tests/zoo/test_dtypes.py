"""A model of each dtype, from its compile to a text; all recipes and destinations: `benchmarks/zoo.py --dtypes`."""

from pathlib import Path

import pytest

from zoo import dtypes


# of kv-fp8 the weights are dense, and the checkpoint has a quantization_config all the same
@pytest.mark.parametrize(
    ("dtype", "recipe", "to"),
    [
        ("bfloat16", "rtn-int4", ["onnx"]),
        ("bfloat16", "kv-fp8", []),
        pytest.param("float32", "rtn-int4", ["onnx"], marks=pytest.mark.thorough),
        pytest.param("float16", "rtn-int4", ["onnx"], marks=pytest.mark.thorough),
    ],
)
def test_what_is_compared_afterwards_is_what_was_compared_at_compile_time(
    dtype: str, recipe: str, to: list[str], tmp_path: Path
) -> None:
    source = dtypes.model(dtype, tmp_path / "tiny", hidden_size=64, intermediate_size=64, num_hidden_layers=1)
    cells = list(dtypes.cells(source, recipe, to=to))
    assert [cell["step"] for cell in cells] == [*dtypes.STEPS, *(f"export {name}" for name in to)]
    assert {cell["verdict"] for cell in cells} == {"right"}, cells
