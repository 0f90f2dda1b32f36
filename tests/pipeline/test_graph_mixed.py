"""The few products that are kept in floats: the fragile one is found, no more are kept, and the page shows it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import networks
import numpy as np
import pytest
import torch

import quantkit
from quantkit.errors import InputError, QuantkitError
from quantkit.graph.codes import solve
from quantkit.measurement.accuracy.harm import MixedSearch
from quantkit.model.to_onnx import write_onnx
from quantkit.pipeline.graphs import mixed as graph_mixed
from quantkit.pipeline.verdict import read_harm

STEM = "node_conv2d"
TINY = 1e-3
UNMET = "gates={kl_max: 0.0}"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A network whose first convolution sees one channel a thousand times as small as the others, by weights a
    thousand times as large: one scale for all of its inputs loses that channel, one for each row of weights the others.
    """
    folder = tmp_path_factory.mktemp("fragile")
    model = networks.tiny()
    with torch.no_grad():
        model.stem[0].weight[:, 0] /= TINY
    small = np.array([TINY, 1, 1], np.float32).reshape(3, 1, 1)
    probe = torch.from_numpy(networks.images(2) * small)
    write_onnx(model, [probe], folder / "fragile.onnx", inputs=["images"], outputs=["logits"])
    values = networks.images(240) * small
    with torch.no_grad():
        labels = model(torch.from_numpy(values)).argmax(dim=1).numpy()
    np.savez(folder / "set.npz", images=values, labels=labels)
    return folder / "fragile.onnx", folder / "set.npz"


@pytest.fixture(scope="module")
def unmet(files: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, MixedSearch]:
    """What a search comes to that was not interrupted, and whose gate nothing meets."""
    return compiled(files, tmp_path_factory.mktemp("unmet") / "bundle", UNMET)


def compiled(files: tuple[Path, Path], out: Path, *changes: str, resume: bool = False) -> tuple[Any, MixedSearch]:
    asked: dict[str, Any] = {"calibration": files[1], "out": out, "speed": False, "resume": resume}
    bundle = quantkit.compile(str(files[0]), recipe="int8-mixed", changes=list(changes), **asked)
    harm = read_harm(bundle.path)
    assert harm is not None
    assert harm.mixed is not None
    return bundle, harm.mixed


def decided(bundle: Any) -> dict[str, str]:
    return {each.where: each.code for each in bundle.manifest.decisions if each.pass_ == "mixed"}


def test_the_fragile_product_is_found_and_it_alone_is_kept(files: tuple[Path, Path], tmp_path: Path) -> None:
    bundle, mixed = compiled(files, tmp_path / "bundle", "gates={kl_max: 0.0001}")
    assert mixed.layers[0].name == STEM
    assert mixed.layers[0].harm > 10 * mixed.layers[1].harm
    assert mixed.chosen == 1
    assert mixed.limit == 0.0001
    assert mixed.steps[0].harm > 0.0001 >= mixed.steps[1].harm
    assert mixed.steps[1].kept == [STEM]
    # what is kept costs its floats less its codes and their scales
    assert mixed.steps[1].bytes - mixed.steps[0].bytes == mixed.layers[0].bytes
    assert decided(bundle) == {STEM: "kept-high"}
    assert STEM not in [layer.name for layer in bundle.manifest.layers]
    assert bundle.manifest.state == "complete"
    assert {check.name: check.ok for check in bundle.manifest.checks}["integer.macs"]
    page = (bundle.path / "report.html").read_text()
    assert "Mixed precision" in page
    assert "Keeping 1 layer in high precision" in page
    assert all(check.ok for check in bundle.verify())


class Interrupted:
    """Stands where something is computed: counts, and is interrupted before each of some calls."""

    def __init__(self, plain: Callable[..., Any]) -> None:
        self.plain, self.calls, self.stops = plain, 0, set[int]()

    def __call__(self, *given: Any, **more: Any) -> Any:
        if self.calls in self.stops:
            self.stops.remove(self.calls)
            raise KeyboardInterrupt
        self.calls += 1
        return self.plain(*given, **more)


def test_an_interrupted_search_goes_on_where_it_was(
    files: tuple[Path, Path], unmet: tuple[Any, MixedSearch], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    solved, measured = Interrupted(solve.product), Interrupted(graph_mixed.agreement)
    monkeypatch.setattr(solve, "product", solved)
    monkeypatch.setattr(graph_mixed, "agreement", measured)
    solved.stops, measured.stops = {8}, {2, 7}
    for _ in range(3):
        with pytest.raises(QuantkitError, match="interrupted"):
            compiled(files, tmp_path / "out", UNMET, resume=True)
    again, found = compiled(files, tmp_path / "out", UNMET, resume=True)
    # four of all, then three, two and one with others kept; four alone, and four points
    assert (solved.calls, measured.calls) == (10, 8)
    assert found == unmet[1]
    assert again.manifest.content_sha256 == unmet[0].manifest.content_sha256
    assert again.manifest.decisions == unmet[0].manifest.decisions


def test_a_gate_that_is_met_keeps_nothing(files: tuple[Path, Path], tmp_path: Path) -> None:
    bundle, mixed = compiled(files, tmp_path / "bundle", "gates={agreement_min: 0.5}")
    assert (mixed.chosen, len(mixed.steps), decided(bundle)) == (0, 1, {})
    assert "That meets the gate, so no layer was kept in high precision." in (bundle.path / "report.html").read_text()
    assert mixed.scored == "12 samples of set.npz (tune), 8 views of each"


def test_crops_of_few_photographs_are_said_to_be(files: tuple[Path, Path], tmp_path: Path) -> None:
    with np.load(files[1]) as held:
        np.savez(tmp_path / "crops.npz", images=held["images"], clusters=np.arange(240) // 6)
    _, mixed = compiled((files[0], tmp_path / "crops.npz"), tmp_path / "bundle", "gates={agreement_min: 0.5}")
    assert mixed.scored == "12 samples of crops.npz (tune), drawn from 2, 8 views of each"


def test_without_a_gate_nothing_is_kept(files: tuple[Path, Path], tmp_path: Path) -> None:
    bundle, mixed = compiled(files, tmp_path / "bundle", "gates={}")
    assert (mixed.chosen, mixed.limit, mixed.steps[0].kept) == (0, None, [])
    assert len(mixed.steps) > 1, "the curve is there all the same"
    assert len(bundle.manifest.layers) == 4
    assert decided(bundle) == {"fragile": "note"}


def test_a_gate_out_of_reach_is_said_and_then_fails(unmet: tuple[Any, MixedSearch]) -> None:
    bundle, mixed = unmet
    assert mixed.chosen is None
    assert bundle.manifest.layers, "something is quantized, whatever the gate asks for"
    assert decided(bundle)["gates.kl_max"] == "gate-out-of-reach"
    assert bundle.manifest.state == "gate_failed"


def test_settings_are_the_recipes(files: tuple[Path, Path], tmp_path: Path) -> None:
    _, mixed = compiled(files, tmp_path / "bundle", "gates={agreement_min: 0.9}", "mixed.views=1", "mixed.samples=8")
    assert mixed.scored == "8 samples of set.npz (tune)"
    with pytest.raises(InputError, match="recipe-invalid"):
        compiled(files, tmp_path / "other", "mixed.vews=1")


def test_it_is_for_fixed_scales(files: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"scheme-unsupported.*the pass mixed"):
        compiled(files, tmp_path / "bundle", "scheme.activations.range=minmax", "scheme.activations.dynamic=true")
    assert not list(tmp_path.iterdir()), "nothing half-written"
