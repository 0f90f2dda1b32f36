"""Networks from a description: shapes, TensorFlow's padding, where inputs are added, and what is refused."""

import json
import logging
import math
import warnings
from pathlib import Path
from typing import Any

import networks
import pytest
import torch
from torch import nn

from quantkit.errors import InputError
from quantkit.model import cnn
from quantkit.model.source.packaged import NETWORKS
from quantkit.model.to_onnx import quiet

PLAIN: dict[str, Any] = {
    "channels": 2,
    "size": 11,
    "classes": 3,
    "activation": "relu6",
    "norm_epsilon": 1e-3,
    "stem": {"channels": 4, "kernel": 3, "stride": 2},
    "stages": [
        {"channels": 4, "repeats": 2, "kernel": 3, "stride": 1, "linear": False},
        {"channels": 6, "repeats": 2, "kernel": 5, "stride": 2, "expansion": 3},
    ],
    "head": 8,
    "dropout": 0.2,
}


def built(seed: int = 0, **changes: Any) -> cnn.Cnn:
    """A network whose norms do something."""
    torch.manual_seed(seed)
    network = cnn.Cnn(cnn.CnnConfig.model_validate(PLAIN | changes)).eval()
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            for tensor, low in (
                (module.weight, 0.5),
                (module.bias, -1),
                (module.running_mean, -1),
                (module.running_var, 0.5),
            ):
                assert tensor is not None
                nn.init.uniform_(tensor, low, low + 1.5)
    return network


def plain(
    values: dict[str, torch.Tensor], prefix: str, images: torch.Tensor, stride: int, *, activated: bool
) -> torch.Tensor:
    """Convolution in TensorFlow's SAME padding, norm, clip to 0..6; output pixel by output pixel."""
    weight = values[f"{prefix}.conv.weight"].double()
    outputs, share, kernel, _ = weight.shape
    count, inputs, size, _ = images.shape
    after = math.ceil(size / stride)
    missing = max((after - 1) * stride + kernel - size, 0)
    wide = torch.zeros(count, inputs, size + missing, size + missing, dtype=torch.float64)
    wide[:, :, missing // 2 : missing // 2 + size, missing // 2 : missing // 2 + size] = images
    found = torch.empty(count, outputs, after, after, dtype=torch.float64)
    for output in range(outputs):
        first = 0 if share == inputs else output
        for row in range(after):
            for column in range(after):
                seen = wide[
                    :,
                    first : first + share,
                    row * stride : row * stride + kernel,
                    column * stride : column * stride + kernel,
                ]
                found[:, output, row, column] = (seen * weight[output]).sum((1, 2, 3))
    scale, bias, mean, variance = (
        values[f"{prefix}.norm.{name}"].double()[None, :, None, None]
        for name in ("weight", "bias", "running_mean", "running_var")
    )
    found = (found - mean) / (variance + 1e-3).sqrt() * scale + bias
    return found.clamp(0, 6) if activated else found


def test_it_computes_what_the_description_says() -> None:
    network = built()
    images = torch.randn(2, 2, 11, 11, generator=torch.Generator().manual_seed(1))
    values = dict(network.state_dict())
    found = plain(values, "stem", images.double(), 2, activated=True)
    assert found.shape == (2, 4, 6, 6)
    for number, (stride, expanded, linear, added) in enumerate(
        [(1, False, False, True), (1, False, False, True), (2, True, True, False), (1, True, True, True)]
    ):
        before, name = found, f"blocks.{number}"
        if expanded:
            found = plain(values, f"{name}.expand", found, 1, activated=True)
        found = plain(values, f"{name}.depthwise", found, stride, activated=True)
        found = plain(values, f"{name}.project", found, 1, activated=not linear)
        found = found + before if added else found
    found = plain(values, "head", found, 1, activated=True).mean((2, 3))
    wanted = found @ values["classifier.weight"].double().T + values["classifier.bias"].double()
    with torch.no_grad():
        torch.testing.assert_close(network(images).double(), wanted, atol=1e-5, rtol=1e-5)


def test_nothing_is_added_where_the_description_says_so() -> None:
    stages = [{"channels": 4, "residual": False}]
    assert not any(block.residual for block in built(stages=stages).blocks)  # type: ignore[union-attr]
    assert all(block.residual for block in built(stages=[{"channels": 4}]).blocks)  # type: ignore[union-attr]


def test_saved_and_loaded(tmp_path: Path) -> None:
    network = built()
    (tmp_path / cnn.CONFIG).write_text(json.dumps(PLAIN))
    cnn.save(network, tmp_path)
    again = cnn.load(tmp_path)
    with torch.no_grad():
        assert torch.equal(again(again.example() + 1), network(network.example() + 1))
    assert not again.training


@pytest.mark.parametrize(
    "changes, code",
    [
        ({"stages": [{"channels": 5}]}, "weights-shape"),
        ({"head": None}, "weights-names"),
        ({"stages": [*PLAIN["stages"], {"channels": 6}]}, "weights-names"),
    ],
    ids=str,
)  # fmt: skip
def test_weights_of_another_network_are_refused(tmp_path: Path, changes: dict[str, Any], code: str) -> None:
    first = {"stages": [{"channels": 4}]} if code == "weights-shape" else {}
    cnn.save(built(**first), tmp_path)
    (tmp_path / cnn.CONFIG).write_text(json.dumps(PLAIN | changes))
    with pytest.raises(InputError) as caught:
        cnn.load(tmp_path)
    assert caught.value.code == code and caught.value.remedy


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"activation": "gelu"}, "activation"),
        ({"chanels": 2}, "did you mean 'channels'"),
        ({"stages": []}, "stages"),
        ({"stages": [{"channels": 4, "stride": 7}]}, "a stride of 7 where 6 pixels are left"),
        ({"stages": [{"channels": 4, "expand": 2}]}, "did you mean 'expansion'"),
        ({"classes": 0}, "classes"),
    ],
    ids=str,
)
def test_a_description_is_closed(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    (tmp_path / cnn.CONFIG).write_text(json.dumps(PLAIN | changes))
    with pytest.raises(InputError, match=message) as caught:
        cnn.CnnConfig.load(tmp_path / cnn.CONFIG)
    assert caught.value.code == "config-invalid"


@pytest.mark.parametrize("name", sorted(path.parent.name for path in NETWORKS.glob("*/config.json")))
def test_shipped_descriptions_are_networks(name: str) -> None:
    with torch.device("meta"):
        network = cnn.Cnn(cnn.CnnConfig.load(NETWORKS / name / cnn.CONFIG)).eval()
        assert network(network.example()).shape == (2, network.config.classes)


def test_the_exporter_is_quiet_and_its_logger_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = heard.append  # type: ignore[method-assign]
    logger, inner = logging.getLogger("torch.onnx"), logging.getLogger("torch.onnx._internal.exporter")
    monkeypatch.setattr(logger, "handlers", [handler])
    before = logger.level
    with pytest.raises(ZeroDivisionError), quiet():
        inner.warning("torchvision is not installed")
        warnings.warn("deprecated", stacklevel=1)
        inner.error("worth a word")
        raise ZeroDivisionError
    assert [record.getMessage() for record in heard] == ["worth a word"]
    assert logger.level == before


def test_a_written_graph_names_no_file_of_this_machine(tmp_path: Path) -> None:
    """Its hash is the model's identity, wherever quantkit lies."""
    networks.write(tmp_path / "tiny.onnx")
    graph = (tmp_path / "tiny.onnx").read_bytes()
    assert b".py" not in graph and str(Path(__file__).parent.parent).encode() not in graph
