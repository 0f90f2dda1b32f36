"""What the checks of a written checkpoint catch, and on how much of the model they run."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import small_onnx
import torch
from exported import SCHEMES, Exported, by_name, export, llama, scheme, write_as
from safetensors.torch import load_file, save_file
from torch import Tensor

from quantkit.bundle import Bundle, Check, LayerEntry
from quantkit.errors import InputError
from quantkit.exporters.checkpoint import reload as _reload
from quantkit.exporters.checkpoint.exporter import EXPORT
from quantkit.model import layouts
from quantkit.model.layouts._compressed_tensors import CompressedTensors
from quantkit.model.layouts.pack_quantized import PackQuantized
from quantkit.model.source.open import Source
from quantkit.scheme import WeightScheme

pytestmark = pytest.mark.usefixtures("one_thread")


def _spoil(exported: Exported, change: Any, **settings: Any) -> dict[str, Check]:
    path = exported.model / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    return by_name(exported.check(**settings))


UP, NORM = "model.layers.1.mlp.up_proj", "model.layers.1.input_layernorm.weight"


def _scaled(tensors: dict[str, Tensor]) -> None:
    tensors[f"{UP}.weight_scale"][3, 1] *= 1.01


def _flipped(tensors: dict[str, Tensor]) -> None:
    tensors[f"{UP}.weight_packed"] = tensors[f"{UP}.weight_packed"].flip(0).contiguous()


def _no_scale(value: float) -> Any:
    return lambda tensors: tensors[f"{UP}.weight_scale"][3, 1].fill_(value)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (_scaled, "reload.compressed_tensors"),
        (_flipped, "reload.compressed_tensors"),
        *((_no_scale(value), "scales.finite") for value in (float("nan"), float("inf"), 0.0, -1.0)),
    ],
)
def test_wrong_scales_and_swapped_codes_are_found(tmp_path: Path, tiny: Path, change: Any, name: str) -> None:
    check = _spoil(export(tiny, tmp_path / "out", scheme()), change)[name]
    assert (check.ok, check.where) == (False, UP)


def _other_norm(tensors: dict[str, Tensor]) -> None:
    tensors[NORM] *= 1.01


def test_the_logits_find_it_too(tmp_path: Path, tiny: Path) -> None:
    exported = export(tiny, tmp_path / "out", scheme())
    checks = _spoil(exported, _other_norm)
    assert checks["reload.compressed_tensors"].ok
    assert not checks["reload.transformers"].ok
    # the first block alone is as it should be
    assert by_name(exported.check(blocks=1))["reload.transformers"].value == 0


def test_missing_and_unexpected_tensors_are_found(tmp_path: Path, tiny: Path) -> None:
    exported = export(tiny, tmp_path / "out", scheme())
    checks = _spoil(exported, lambda tensors: tensors.pop("model.layers.0.input_layernorm.weight"))
    assert not checks["reload.transformers"].ok
    assert "missing" in checks["reload.transformers"].where
    write_as(EXPORT, exported.folder, exported.source, exported.stream, exported.results, {})
    checks = _spoil(exported, lambda tensors: tensors.update({"model.layers.0.mlp.up_proj.bias": torch.ones(96)}))
    assert "unexpected" in checks["reload.transformers"].where


@pytest.mark.parametrize("how", ["group-asymmetric", "group-symmetric"])
def test_only_the_first_blocks(tmp_path: Path, how: str) -> None:
    path = llama(tmp_path / "source", num_hidden_layers=4, shards=3)
    exported = export(path, tmp_path / "out", SCHEMES[how])
    check = by_name(exported.check(blocks=2))["reload.transformers"]
    assert (check.ok, check.value) == (True, 0)


def test_of_several_schemes_the_first_blocks_are_compared_without_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from compressed_tensors.utils import match

    said: list[str] = []
    monkeypatch.setattr(match._LOGGER, "warning", said.append)

    def mixed(name: str) -> WeightScheme:
        # a scheme whose linears are all in later blocks, too
        late = "layers.3." in name
        bits = "int8" if late or "mlp" in name else "int4"
        return scheme(bits, granularity="channel", group=None, symmetric=True) if late else scheme(bits, symmetric=True)

    exported = export(llama(tmp_path / "source", num_hidden_layers=4), tmp_path / "out", mixed)
    check = by_name(exported.check(blocks=2))["reload.transformers"]
    assert (check.ok, check.value) == (True, 0)
    assert said == []


def _bundle(exported: Exported) -> Bundle:
    layers = [
        LayerEntry(name=name, shape=list(exported.weight(name).shape), scheme=how.model_dump(), bits_per_weight=4.0)
        for name, how in exported.results.schemes.items()
    ]
    return small_onnx.bundle(exported.folder, layers=layers)


@pytest.mark.parametrize("options", [{}, {"layout": "dense"}], ids=["packed", "dense"])
def test_a_finished_bundle_is_checked_without_its_source(tmp_path: Path, tiny: Path, options: dict[str, str]) -> None:
    bundle = _bundle(export(tiny, tmp_path / "out", scheme(), **options))
    assert all(check.ok for check in bundle.verify())
    checks = by_name(EXPORT.check(bundle.path))
    assert all(check.ok for check in checks.values())
    assert checks["reload.transformers"].value == 0
    if options:
        return
    path = bundle.path / "model/config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] = 16
    path.write_text(json.dumps(config))
    assert not all(check.ok for check in EXPORT.check(bundle.path))


def test_a_model_that_memory_has_no_room_for_is_compared_on_its_first_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported = export(llama(tmp_path / "source", num_hidden_layers=3), tmp_path / "out", scheme())
    asked: list[int | None] = []
    real = _reload.reload

    def spy(folder: Path, wanted: Any, *, inputs: Any, blocks: int | None, beside: Any) -> Check:
        asked.append(blocks)
        return real(folder, wanted, inputs=inputs, blocks=blocks, beside=beside)

    monkeypatch.setattr(_reload, "reload", spy)
    for limit in (10**12, 10**6):
        monkeypatch.setattr(_reload.machine, "memory_limit", lambda *_, limit=limit: limit)
        checks = exported.check()
        assert all(check.ok for check in checks)
        # the rest of the model is still covered, linear by linear
        assert "reload.compressed_tensors" in by_name(checks)
    assert asked == [None, 2]


def test_a_model_that_is_not_cut_and_does_not_fit_is_compared_tensor_by_tensor(
    tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported = export(tiny, tmp_path / "out", scheme())
    monkeypatch.setattr(Source, "can_be_cut", lambda *_: False)
    assert "reload.transformers" in by_name(exported.check(blocks=1))
    monkeypatch.setattr(_reload.machine, "memory_available", lambda: 10**4)
    monkeypatch.setattr(_reload, "reload", lambda *_, **__: pytest.fail("it was loaded as a whole"))
    checks = by_name(exported.check(blocks=1))
    assert checks["reload.compressed_tensors"].ok
    assert checks["reload.tensors"].ok
    wrong = _spoil(exported, _other_norm, blocks=1)["reload.tensors"]
    assert (wrong.ok, wrong.where) == (False, NORM)
    assert "missing" in _spoil(exported, lambda tensors: tensors.pop(NORM), blocks=1)["reload.tensors"].where


def test_tensors_that_are_compared_on_threads_fail_as_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a machine of 32 cores; of two that fail the first is named, whichever is done first."""
    monkeypatch.setattr("quantkit.machine.cores", lambda: 32)
    exported = export(llama(tmp_path / "source", num_hidden_layers=3), tmp_path / "out", scheme())
    assert by_name(exported.check())["reload.compressed_tensors"].value == 0.0
    dense = layouts.Expansion
    first, second = "model.layers.0.mlp.down_proj", "model.layers.1.mlp.up_proj"

    def expansion(*given: Any) -> layouts.Expansion:
        real = CompressedTensors.expansion(*given)

        def weight(prefix: str, read: layouts.Read) -> Tensor:
            if prefix == first:
                time.sleep(0.2)
                raise ValueError("no such code")
            if prefix == second:
                raise InputError("weights-nonfinite", where=second)
            return real.weight(prefix, read)

        return dense(real.library, weight)

    monkeypatch.setattr(PackQuantized, "expansion", expansion)
    check = by_name(exported.check())["reload.compressed_tensors"]
    assert not check.ok
    assert check.where == f"{first}.weight: no such code"
    first = ""
    with pytest.raises(InputError, match=f"weights-nonfinite.*{second}"):
        exported.check()


def test_no_more_tensors_are_compared_at_once_than_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"t{number}" for number in range(20)]
    monkeypatch.setattr(_reload.machine, "memory_available", lambda: 800)
    sizes = {**dict.fromkeys(names, 1), "t3": 1000, "t5": 60, "t6": 60}
    found = list(_reload._fitting(names, sizes))
    assert [name for some in found for name in some] == names, "each once, and in order"
    assert ["t3"] in found, "one that does not fit is compared alone"
    assert not any({"t5", "t6"} <= set(some) for some in found)
    assert max(map(len, _reload._fitting(names, {}))) == 16
