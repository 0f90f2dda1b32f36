"""An engine looked into, and what a bundle keeps of it; the engine is `fake_tensorrt`'s."""

import contextlib
import io
from dataclasses import asdict
from pathlib import Path
from typing import Any

import fake_tensorrt
import numpy as np
import pytest
import small_onnx
from fake_tensorrt import GPU

from quantkit.bundle import Bundle, LayerEntry
from quantkit.devices import scores, there
from quantkit.devices.answers import ScoredStretch
from quantkit.errors import GateError, InputError
from quantkit.exporters import load_exporter
from quantkit.measurement.engine_layers import stored
from quantkit.measurement.timing.speed import SpeedSide
from quantkit.pipeline import engines as engine
from quantkit.pipeline.gates import refuse
from quantkit.pipeline.verdict import _with_engine
from quantkit.recipe import Recipe
from quantkit.runtimes import child
from quantkit.runtimes.tensorrt import TensorrtRuntime
from quantkit.scheme import WeightScheme
from quantkit.target import Profile

pytestmark = pytest.mark.usefixtures("one_thread")
SCHEME = WeightScheme(format="int4", granularity="group", group=32, symmetric=True)
PROFILE = Profile(name="decode", batch=(1, 1, 2), length=(1, 1, 4), context=(1, 16, 60))
LINEAR = "model.layers.0.mlp.down_proj"
HALF = [{"Name": "x", "Datatype": "Half"}]


def layers(*, fused: bool) -> list[dict[str, Any]]:
    nodes = [f"{LINEAR}.values", f"{LINEAR}/output"]
    parts = [nodes] if fused else [[node] for node in nodes]
    return [
        {
            "Name": f"layer {place}",
            "LayerType": "gemm",
            "Inputs": HALF,
            "Outputs": HALF,
            "Metadata": "\x1f".join(f"[ONNX Layer: {node}]" for node in part),
        }
        for place, part in enumerate(parts)
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = small_onnx.export(
        tmp_path_factory.mktemp("look"),
        "llama",
        SCHEME,
        exporter=load_exporter("tensorrt"),
        engine=False,
        changes=small_onnx.LAYERS,
        profiles=[PROFILE.model_dump()],
    )
    return made.folder


def bundle(folder: Path, *, fused: bool) -> Bundle:
    fake_tensorrt.engine(folder / "engine", [PROFILE], layers=layers(fused=fused))
    entry = LayerEntry(name=LINEAR, shape=[64, 96], scheme=SCHEME.model_dump(mode="json"), bits_per_weight=4.5)
    return small_onnx.bundle(folder, layers=[entry])


def test_what_is_found_is_kept_and_strict_refuses_it(folder: Path) -> None:
    made = bundle(folder, fused=False)
    runtime = TensorrtRuntime("tensorrt_rtx", library=fake_tensorrt.library(), gpus=lambda: ([GPU], ""), device="cpu")
    found = engine.look(runtime.load(made), made.manifest.layers)
    assert found.gpu == GPU["name"] and found.library == "tensorrt_rtx 1.7.1.116"
    assert [each.layer for each in found.costliest] == ["layer 1", "layer 0"]
    kept = _with_engine(made, found)
    assert stored(kept.path) == [found]
    assert kept.manifest.content_sha256 == made.manifest.content_sha256
    assert all(check.ok for check in kept.verify())
    (check,) = kept.manifest.checks
    assert (check.name, check.value, check.ok) == ("engine.precision", 1, False)
    with pytest.raises(GateError, match="precision-fallback") as caught:
        refuse(kept.manifest.decisions)
    assert caught.value.where == LINEAR
    # built anew, and as asked: nothing of the first look stays
    again = bundle(folder, fused=True)
    again = Bundle(again.path, again.manifest.model_copy(update={"decisions": kept.manifest.decisions}))
    found = engine.look(runtime.load(again), again.manifest.layers)
    after = _with_engine(again, found)
    assert after.manifest.decisions == []
    assert [each.ok for each in after.manifest.checks] == [True]


def test_measure_scores_an_engine_and_keeps_what_it_says(
    tmp_path: Path, made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from conftest import recipe

    from quantkit.measurement.cuda.device import GpuDevice
    from quantkit.measurement.timing import cuda as speed_cuda
    from quantkit.measurement.timing.schedule import TimingPlan
    from quantkit.model.source.open import open_model
    from quantkit.pipeline import Request, compile_model, measure_bundle
    from quantkit.runtimes import tensorrt_rtx

    scheme = {"weights": {"format": "int4", "granularity": "group", "group": 32, "symmetric": True}}
    options = {"engine": False, "profiles": [PROFILE.model_dump(mode="json")]}
    exports = [{"checkpoint": {}}, {"tensorrt": options}]
    monkeypatch.setattr("quantkit.pipeline.blocks.tokens.SCORED", 60)
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path / "cache"))
    chosen = recipe("checkpoint", scheme=scheme).as_dict() | {"export": exports}
    request = Request.of(
        str(made.model), recipe=Recipe.from_dict(without_name(chosen), name="tiny"), out=tmp_path / "b", speed=False,
        target="rtx-4090",
    )  # fmt: skip
    done = compile_model(request).bundle
    notes = [each.reason for each in done.manifest.decisions if each.where == "engine"]
    assert any("not run" in reason for reason in notes)
    path = fake_tensorrt.engine(done.path / "engine", [PROFILE], layers=layers(fused=False))
    done = done.put_all({f"engine/{each.name}": each.read_bytes() for each in (path, path.with_suffix(".json"))})
    fake = TensorrtRuntime("tensorrt_rtx", library=fake_tensorrt.library(), gpus=lambda: ([GPU], ""), device="cpu")
    monkeypatch.setattr(tensorrt_rtx, "RUNTIME", fake)
    rows = measure_bundle(done, str(made.model), runtime="tensorrt_rtx")
    kl = next(row for row in rows if row.name == "accuracy.kl")
    assert kl.device is not None and kl.device.name == GPU["name"]
    assert kl.settings["library"] == "tensorrt_rtx 1.7.1.116"
    assert 0 < (kl.value or 0) < 1
    after = Bundle.load(done.path)
    assert all(check.ok for check in after.verify())
    assert after.manifest.state == done.manifest.state
    assert stored(after.path)[0].products[0].linear.startswith("model.layers.0")
    assert {each.code for each in after.manifest.decisions} >= {"precision-fallback"}
    assert "What the engine does" in (after.path / "report.html").read_text()
    # timed beside torch, on the CPU: plumbing
    plan = TimingPlan((1, 3), (3,), (4,), seconds=0.01, cell_seconds=0.01, rounds=1)
    source = open_model(str(made.model))
    rows = speed_cuda.run_engine(fake.load(after), after, source, plan, GpuDevice("cpu", dry=True))
    step, absent = [row for row in rows if row.name == "latency.decode_step"]
    assert (step.runtime, step.batch, step.settings["baseline_format"]) == ("tensorrt_rtx", 1, "bfloat16")
    assert step.quantiles is not None and {"p50", "p90", "p99"} <= step.quantiles.keys()
    assert absent.value is None and any("shape-unsupported" in flag for flag in absent.flags)
    (tax,) = [row for row in rows if row.name == "tax.total" and row.batch == 1 and row.shape == step.shape]
    assert tax.op is not None and (tax.op.hp_bound_s or 0) > (tax.op.bound_s or 0)
    there_too(tmp_path, after, made.model)


def there_too(workdir: Path, bundle: Bundle, model: Path) -> None:
    """What runs on a device asks an engine the same, and executes what has the hashes of the job alone."""
    (workdir / "floats").symlink_to(model)
    np.savez(workdir / "ids.npz", ids=np.random.default_rng(0).integers(0, 258, (2, 17)))
    hashes = {entry.path: entry.sha256 for entry in bundle.manifest.files if "sm89." in entry.path}
    ours = SpeedSide(bundle.path.name, "a", "int4", runtime="tensorrt_rtx")
    sides: dict[str, Any] = {"ours": asdict(ours), "theirs": asdict(SpeedSide("floats", "b", "bfloat16"))}
    sides |= {"built": hashes, "saved_bytes": 1e3}
    asked = {"of": "decoder", "data": "ids.npz", "streams": True, **sides}
    cells = done_there(scores.score, workdir, asked)
    assert list(cells) == ["settings", "scored--0-0", "scored--1-0"]
    found = [ScoredStretch.model_validate(cells[name]) for name in ("scored--0-0", "scored--1-0")]
    assert [(each.sequence, len(each.numbers["kl"])) for each in found] == [(0, 16), (1, 16)]
    assert 0 < np.mean([each.numbers["kl"] for each in found]) < 1
    # what it has answered it does not do again
    assert done_there(scores.score, workdir, asked, cells) == {}
    shapes = [{"kind": "decode", "batch": batch, "size": 3} for batch in (1, 3)]
    short: dict[str, Any] = {"seconds": 0.01, "cell_seconds": 0.01, "rounds": 1, "seed": 0, "samples": None}
    cells = done_there(there.measure, workdir, {**sides, **short, "shapes": shapes})
    assert list(cells) == ["sides", "ceilings", "decode-1-3", "decode-3-3", "ceilings-after"]
    assert (cells["sides"]["ours"]["format"], cells["sides"]["theirs"]["format"]) == ("int4", "bfloat16")
    assert set(cells["decode-1-3"]["seconds"]) == {"subject", "baseline"}
    assert cells["decode-3-3"]["skipped"] == "shape-unsupported"
    for built, code in ((dict.fromkeys(hashes, "0" * 64), "hash-mismatch"), ({}, "bundle-without-engine")):
        with pytest.raises(InputError, match=code):
            done_there(scores.score, workdir, {**asked, "built": built})


def done_there(work: Any, workdir: Path, asked: Any, cells: Any = ()) -> dict[str, Any]:
    """Cell -> its row, of what a job's process does."""
    said = io.StringIO()
    known = {cell: [row] for cell, row in dict(cells).items()}
    with contextlib.chdir(workdir):
        work(asked, scores.Outbox(child.Caller(said), known))
    return {row["cell"]: row["rows"][0] for row in child.heard(said.getvalue().splitlines())}


def without_name(data: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in data.items() if key != "name"}


def test_where_no_engine_runs_nothing_is_looked_into(folder: Path) -> None:
    from quantkit.recipe import ExportStep

    steps = [ExportStep(name="tensorrt", options={}), ExportStep(name="checkpoint", options={})]
    assert engine.of_exports(steps, folder, [], {}) == []
