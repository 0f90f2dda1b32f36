"""What is refused for a GPU, and what the targets' cells say, are one table; and which library reads an export."""

from __future__ import annotations

import pytest

from quantkit import content
from quantkit.errors import InputError
from quantkit.exporters import reader
from quantkit.exporters.tensorrt.dialect import TYPES
from quantkit.exporters.tensorrt.exporter import FIRST_SM, FORMATS, refuse_gpu
from quantkit.target import Target

# compute capabilities that each library builds for; TensorRT-RTX has its list, TensorRT begins with Turing
BUILT = {"tensorrt_rtx": {"7.5", "8.0", "8.6", "8.9", "12.0", "12.1"}, "tensorrt": None}


@pytest.mark.parametrize("name", [name for name in content.names("export") if Target.load(name).kind == "gpu"])
@pytest.mark.parametrize("library", sorted(FIRST_SM))
def test_the_first_gpus_are_those_of_the_cells(name: str, library: str) -> None:
    target = Target.load(name)
    sm, built = target.arch.sm or "", BUILT[library]
    if (built is not None and sm not in built) or float(sm) < 7.5:
        assert all(target.supports(form, library).state == "absent" for form in FORMATS)
        return
    for form in FORMATS:
        state = target.supports(form, library).state
        try:
            refuse_gpu("layer", form, library, sm)
        except InputError:
            assert state == "absent", (form, sm)
        else:
            assert state != "absent", (form, sm)


def test_what_is_let_through_can_be_stored() -> None:
    assert set(FORMATS) == set(TYPES)


def test_the_library_that_was_asked_for_reads_it_else_the_first() -> None:
    assert reader("tensorrt", {"library": "tensorrt"}) == "tensorrt"
    assert reader("tensorrt", {}) == "tensorrt_rtx"
    assert reader("checkpoint", {"library": "tensorrt"}) == "torch"
    assert reader("onnx", {"dialect": "onnxruntime"}) == "onnxruntime"
