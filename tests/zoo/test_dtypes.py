"""A model of each dtype, from its compile to a text; all recipes and destinations: `benchmarks/zoo.py --dtypes`."""

from __future__ import annotations

from pathlib import Path

import pytest

from zoo import dtypes


@pytest.mark.parametrize("dtype", dtypes.DTYPES)
def test_what_is_compared_afterwards_is_what_was_compared_at_compile_time(dtype: str, tmp_path: Path) -> None:
    source = dtypes.model(dtype, tmp_path / "tiny", hidden_size=64, intermediate_size=64, num_hidden_layers=1)
    cells = list(dtypes.cells(source, "rtn-int4", to=["onnx"]))
    assert [cell["step"] for cell in cells] == [*dtypes.STEPS, "export onnx"]
    assert {cell["verdict"] for cell in cells} == {"right"}, cells
