"""The matrix is all targets' cells, whatever shows it; the page in docs/ is made from it."""

from pathlib import Path
from typing import Any

import pytest

from quantkit import content
from quantkit.errors import InputError
from quantkit.planning import matrix
from quantkit.target import Target


@pytest.fixture(scope="module")
def found() -> list[matrix.MatrixEntry]:
    return matrix.entries()


def test_every_cell_of_every_target_is_in_it(found: list[matrix.MatrixEntry]) -> None:
    assert {each.target for each in found} == set(content.names("export"))
    for name in ("l4", "cpu-x86"):
        target = Target.load(name)
        weights = [each for each in found if each.target == name and each.part == "weights"]
        assert len(weights) == sum(len(cells) for cells in target.formats.values())
        for each in weights:
            assert target.supports(each.format, each.runtime).source == each.source


def test_every_format_and_runtime_of_the_matrix_is_there(found: list[matrix.MatrixEntry]) -> None:
    formats = "float32 float16 bfloat16 int8 int4 int3 int2 fp8_e4m3 fp8_e5m2 nf4 mxfp4 mxfp8 nvfp4"
    assert {each.format for each in found} >= set(formats.split())
    assert {each.runtime for each in found} == set(matrix.runtimes()) - {"quantkit_cpu"}


def test_letters_are_large_where_a_runtime_computes_in_the_format(found: list[matrix.MatrixEntry]) -> None:
    made = matrix.table(found)
    assert made["l4"]["fp8_e4m3"] == "TRVp"
    assert made["a100"]["fp8_e4m3 inputs"] == "vp"
    assert made["cpu-x86"]["nf4"] == "op"
    assert "fp8_e5m2" not in made["cpu-x86"] or made["cpu-x86"]["fp8_e5m2"] == ""
    assert matrix.columns(found)[:4] == ["float32", "float16", "bfloat16", "fp8_e4m3"]
    assert "O ONNX Runtime, T TensorRT" in matrix.legend(found)


def test_it_is_narrowed_to_a_target_a_format_or_a_runtime(tmp_path: Path) -> None:
    cells = matrix.entries(target="l4", form="int8", runtime="vllm")
    assert [(each.column, each.state) for each in cells] == [("int8", "native"), ("int8 inputs", "native")]
    mine = tmp_path / "mine.yaml"
    mine.write_text(content.find("export", "l4").read_text(encoding="utf-8"), encoding="utf-8")
    assert matrix.as_rows(matrix.entries(target=str(mine), form="nf4"))[0]["target"] == "mine"


@pytest.mark.parametrize(
    ("asked", "code", "says"),
    [
        ({"target": "l5"}, "unknown-target", "did you mean 'l4'"),
        ({"form": "int44"}, "unknown-format", "did you mean 'int4'"),
        ({"runtime": "vlm"}, "unknown-runtime", "did you mean 'vllm'"),
    ],
)
def test_what_is_misspelt_is_named(asked: dict[str, Any], code: str, says: str) -> None:
    with pytest.raises(InputError, match=says) as caught:
        matrix.entries(**asked)
    assert caught.value.code == code


def test_the_page_is_current() -> None:
    page = Path(__file__).parents[2] / "docs" / "matrix.md"
    assert page.read_text(encoding="utf-8") == matrix.markdown(), "make matrix"
