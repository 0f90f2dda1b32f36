"""A torch module as a graph, without the exporter's remarks."""

from __future__ import annotations

import logging
import warnings

import pytest

from quantkit.model.to_onnx import quiet


def test_the_exporter_is_quiet_and_its_logger_is_left_as_it_was(caplog: pytest.LogCaptureFixture) -> None:
    logger, inner = logging.getLogger("torch.onnx"), logging.getLogger("torch.onnx._internal.exporter")
    before = logger.level
    with pytest.raises(ZeroDivisionError), quiet():
        inner.warning("torchvision is not installed")
        warnings.warn("deprecated", stacklevel=1)
        inner.error("worth a word")
        raise ZeroDivisionError
    assert [record.message for record in caplog.records] == ["worth a word"]
    assert logger.level == before
