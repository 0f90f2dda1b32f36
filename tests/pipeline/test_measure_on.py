"""A bundle measured on a device: a folder of this machine, in which the runner works as it does elsewhere."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import networks
import pytest
import small_onnx
from devices.local import ABSENT, Cut, local

from quantkit.bundle import Bundle, Manifest
from quantkit.cli import run
from quantkit.devices.answers import Cells
from quantkit.devices.asked import DeviceTimer, generate_on, verify_on
from quantkit.devices.measure import _kept, measure_on
from quantkit.devices.named import Reached
from quantkit.devices.openssh import Lost
from quantkit.errors import InputError, Stopped
from quantkit.measurement.rows import Baseline, Device, Row
from quantkit.measurement.timing.rounds import RoundsJob
from quantkit.measurement.timing.schedule import Shape, TimingPlan
from quantkit.pipeline.export import export_bundle
from quantkit.pipeline.progress import Progress
from quantkit.pipeline.sides import open_sides, prepare
from quantkit.pipeline.verdict import by_device, keep
from quantkit.runtimes import load_runtime

if TYPE_CHECKING:
    from conftest import Made

# of the model that bundles are of: `conftest.CHANGES`
CHANGES = {"vocab_size": 258, "num_hidden_layers": 1}

Copy = Callable[[Path], Bundle]
PLAN = TimingPlan(batches=(1, 2), contexts=(16,), prefills=(8,), seconds=0.3, cell_seconds=0.3, rounds=2)
TIMED = {"latency.decode_step", "latency.prefill"}


@pytest.fixture(autouse=True)
def small(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUANTKIT_CACHE", str(made.model.parent / "cache"))
    monkeypatch.setattr("quantkit.pipeline.blocks.tokens.SCORED", 300)
    monkeypatch.setattr(
        "quantkit.pipeline.measure.float_export", lambda source, exporter, options: made.floating / "onnx"
    )


def stored(bundle: Bundle) -> list[Row]:
    return [Row.model_validate(row) for row in Bundle.load(bundle.path).measurements]


def measured(bundle: Bundle, device: Reached, made: Made, plan: TimingPlan = PLAN, **how: Any) -> list[Row]:
    return measure_on(bundle, device, str(made.model), runtime="onnxruntime", plan=plan, **how)


def cut(workdir: Path, after: int, cells: tuple[str, ...] = ("decode", "prefill")) -> tuple[Reached, Any]:
    """A device whose connection ends after some cells; and the way to it."""
    device = local(workdir, "pi5", link=Cut)
    link: Any = device.link
    link.left, link.cells = after, cells
    return device, link


def test_rows_of_two_devices_stand_in_one_bundle(made: Made, copied: Copy, tmp_path: Path) -> None:
    bundle = copied(made.both)
    before = {row.line() for row in stored(bundle)}
    rows = measured(bundle, local(tmp_path / "a", "pi5", absent=ABSENT), made)
    assert {row.on for row in rows} == {"pi5"}
    names = {row.name for row in rows}
    assert names >= {*TIMED, "accuracy.kl", "tax.break_even", "memory.peak", "ceiling.read"}
    # the same positions in the same runtime: what this machine's score of the export has found
    kept = {row.line() for row in stored(bundle)}
    assert before <= kept
    here = {row.name: row for row in stored(bundle) if row.on is None and row.runtime == "onnxruntime"}
    there = {row.name: row for row in rows}
    for name in ("accuracy.kl", "accuracy.perplexity", "accuracy.top1_agreement"):
        assert there[name].value == pytest.approx(here[name].value, rel=1e-3), name
        assert there[name].data == here[name].data
    measured(bundle, local(tmp_path / "b", "box"), made, replace(PLAN, batches=(1,), prefills=()))
    assert Counter(row.on for row in stored(bundle) if row.name in TIMED and row.on) == {"pi5": 3, "box": 1}
    page = (bundle.path / "report.html").read_text()
    assert "<summary>pi5</summary>" in page
    assert "<summary>box</summary>" in page
    assert "All devices" in page
    assert all(check.ok for check in Bundle.load(bundle.path).verify())


@pytest.mark.thorough
def test_a_connection_that_is_cut_leaves_what_has_come_and_resume_measures_the_rest(
    made: Made, copied: Copy, tmp_path: Path
) -> None:
    bundle, (device, link) = copied(made.both), cut(tmp_path / "there", after=1)
    with pytest.raises(Stopped):
        measured(bundle, device, made)
    (first,) = [row for row in stored(bundle) if row.on == "pi5" and row.name in TIMED]
    # and again, behind the last shape
    link.left, link.cells = 0, ("ceilings-after",)
    with pytest.raises(Stopped):
        measured(bundle, device, made, resume=True)
    after = [row for row in stored(bundle) if row.on == "pi5" and row.name in TIMED]
    assert len(after) == 3
    assert first in after
    page = (bundle.path / "report.html").read_text()
    link.left = 100
    assert [row.name for row in measured(bundle, device, made, resume=True)] == ["memory.peak"]
    assert [row for row in stored(bundle) if row.on == "pi5" and row.name in TIMED] == after
    assert (bundle.path / "report.html").read_text() != page
    assert measured(bundle, device, made, resume=True) == []
    assert not (tmp_path / "there" / "tmp").exists()


def test_resume_counts_rows_of_the_runtime_and_ends_what_has_none_missing(
    made: Made, copied: Copy, tmp_path: Path
) -> None:
    bundle, device = copied(made.both), local(tmp_path / "there", "pi5")
    rows = [
        *planted(bundle.manifest),
        *(row.model_copy(update={"batch": 2, "value": None, "baseline": None}) for row in planted(bundle.manifest)),
        Row(
            name="accuracy.kl", value=0.01, unit="nat", subject="x", runtime="onnxruntime", baseline=original_of(bundle)
        ),
        Row(name="memory.peak", value=1, unit="B", subject="x", runtime="onnxruntime", baseline=original_of(bundle)),
    ]
    there = Device(id="cpu-1", kind="cpu", name="Cortex", on="pi5", machine="aarch64")
    rows = [row.model_copy(update={"device": there}) for row in rows]
    keep(bundle, rows, None, "onnxruntime", bundle.manifest.model.source.sha256, Progress(), more=True)
    source = bundle.manifest.model.source.sha256
    assert len(_kept(bundle, "pi5", source, "onnxruntime")) == 4
    assert _kept(bundle, "pi5", source, "llama_cpp") == _kept(bundle, "box", source, "onnxruntime") == []
    plan = TimingPlan(batches=(1, 2), contexts=(16,), prefills=())
    assert measure_on(bundle, device, str(made.model), runtime="onnxruntime", plan=plan, resume=True) == []
    assert "<summary>pi5</summary>" in (bundle.path / "report.html").read_text()


def original_of(bundle: Bundle) -> Baseline:
    return Baseline(subject=bundle.manifest.model.source.sha256, value=1.0)


def test_too_little_memory_is_said_before_anything_is_carried(made: Made, copied: Copy, tmp_path: Path) -> None:
    """By what a plan knows of cache, activations and logits, beside the weights."""
    bundle = copied(made.both)
    weights = 2.2 * sum(
        path.stat().st_size for folder in (bundle.path, made.floating) for path in (folder / "onnx").rglob("*.*")
    )
    device = local(tmp_path / "there", "pi5", memory_free=int(weights) + 1000)
    rows = stored(bundle)
    with pytest.raises(InputError, match="out-of-memory"):
        measured(bundle, device, made)
    assert not (tmp_path / "there").exists()
    assert stored(bundle) == rows
    # without times nothing but the weights is asked for
    device.about.demand_memory([], "pi5", weights)


def test_a_bundle_is_loaded_there_without_torch(made: Made, tmp_path: Path) -> None:
    bundle = Bundle.load(made.both)
    checks, notes = verify_on(bundle, local(tmp_path / "there", "pi5", absent=ABSENT))
    assert [check.name for check in checks] == [*(check.name for check in bundle.verify()), "onnxruntime.loads"]
    assert all(check.ok for check in checks)
    assert not notes


def test_a_graph_is_loaded_there(tmp_path: Path) -> None:
    (tmp_path / "net/onnx").mkdir(parents=True)
    networks.write(tmp_path / "net/onnx/model.onnx")
    bundle = small_onnx.bundle(tmp_path / "net", kind="network")
    checks, _ = verify_on(bundle, local(tmp_path / "there", "pi5", absent=ABSENT))
    assert checks[-1].name == "onnxruntime.loads"
    assert all(check.ok for check in checks)
    (tmp_path / "net/onnx/model.onnx").write_bytes(b"no graph")
    checks, _ = verify_on(
        small_onnx.bundle(tmp_path / "net", kind="network"), local(tmp_path / "b", "pi5", absent=ABSENT)
    )
    assert [check.name for check in checks if not check.ok] == ["onnxruntime.loads"]
    assert "onnx-unreadable" in checks[-1].where


def test_a_device_goes_on_with_the_same_words(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @contextmanager
    def reach(on: str, **_: Any) -> Iterator[Any]:
        yield local(tmp_path / "there", on, absent=ABSENT)

    monkeypatch.setattr("quantkit.devices.named.reach", reach)
    words = ["generate", str(made.both), "--prompt", "The state of", "--new-tokens", "4", "--json"]
    answers = []
    for more in ([], ["--on", "pi5"]):
        assert run([*words, *more]) == 0
        answers.append(json.loads(capsys.readouterr().out)["result"])
    here, there = answers
    assert (there["text"], there["tokens"], there["device"]) == (here["text"], 4, "pi5")
    assert there["tokens"] == here["tokens"]


def test_two_bundles_are_timed_in_turns_there(made: Made, tmp_path: Path) -> None:
    shapes = [Shape("decode", 1, 16), Shape("prefill", 1, 8)]
    job = RoundsJob(str(made.both / "onnx"), str(made.floating / "onnx"), shapes, threads=1, seconds=0.2)
    taken = DeviceTimer(local(tmp_path / "there", "pi5"))(job, lambda share, words: None)
    assert [each.shape for each in taken] == shapes
    for each in taken:
        assert len(each.rounds) >= 6
        assert {len(times) for times in each.seconds.values()} == {sum(each.rounds)}


def test_a_comparison_over_a_line_that_breaks_goes_on_with_the_round_that_is_missing(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, heard = local(tmp_path / "there", "pi5"), list[str]()
    real = device.link.run

    def run(*asked: Any, row: Any, **how: Any) -> Cells:
        def come(cells: Cells, cell: str) -> None:
            heard.append(cell)
            row(cells, cell)
            if cell in ("round-2", "round-4"):
                raise Lost("device-gone", where="pi5")

        return real(*asked, row=come, **how)

    monkeypatch.setattr(device.link, "run", run)
    job = RoundsJob(str(made.both / "onnx"), str(made.floating / "onnx"), [Shape("decode", 1, 16)], 1, seconds=0.2)
    (taken,) = DeviceTimer(device)(job, lambda share, words: None)
    assert heard == ["about", *(f"round-{n}" for n in range(len(taken.rounds)))]
    assert len(heard) > 6


def test_an_emulator_s_times_are_in_no_verdict(made: Made, copied: Copy) -> None:
    manifest = copied(made.both).manifest
    device = {"id": "cpu-1", "kind": "cpu", "name": "aarch64", "on": "qemu", "machine": "aarch64"}
    rows = [row.model_copy(update={"device": Device.model_validate(device)}) for row in planted(manifest)]
    assert [each.verdict is None for each in by_device(manifest, rows)] == [False]
    flagged = [row.model_copy(update={"flags": ["emulated"]}) for row in rows]
    assert [each.verdict for each in by_device(manifest, flagged)] == [None]


def planted(manifest: Manifest) -> list[Row]:
    return [
        Row(
            name="latency.decode_step",
            value=0.01,
            unit="s",
            n=100,
            aa_spread=0.001,
            quantiles={"p50": 0.01, "p99": 0.01},
            subject=manifest.content_sha256,
            baseline=Baseline(subject=manifest.model.source.sha256, value=0.02, ratio=2.0, ratio_ci95=(1.9, 2.1)),
            settings={"p99_ratio": 2.0, "p99_ratio_low": 1.9, "p99_ratio_high": 2.1},
            batch=1,
            shape={"new_tokens": 1, "context": 16},
            runtime="onnxruntime",
        )
    ]


def test_text_and_times_come_from_the_runtime_that_was_asked_for(made: Made, copied: Copy, tmp_path: Path) -> None:
    pytest.importorskip("openvino")
    bundle = export_bundle(copied(made.both), "openvino").bundle
    here = load_runtime("openvino").generate(bundle, "The state of", new_tokens=6)
    there = generate_on(bundle, local(tmp_path / "a"), "The state of", runtime="openvino", new_tokens=6)
    assert (there["text"], there["tokens"]) == (here["text"], here["tokens"])
    sides = open_sides(bundle, made.both)
    timer = DeviceTimer(local(tmp_path / "b", absent=("openvino",)))
    how: dict[str, Any] = {"batches": [1], "seconds": 0.2, "calibration": None, "here": False}
    timing, _ = prepare(*sides[::-1], **how)
    assert timing.job.runtimes == ("onnxruntime", "onnxruntime")
    with pytest.raises(InputError, match="bundle-without-openvino"):
        prepare(*sides, **how, runtime="openvino")
    timing, _ = prepare(sides[0], sides[0], **how, runtime="openvino")
    assert timing.runtime == "openvino"
    short = replace(timing, job=replace(timing.job, shapes=[Shape("decode", 1, 16)]))
    with pytest.raises(InputError, match=r"missing-dependency.*openvino"):
        replace(short, timer=timer).run(Progress())
    (taken,) = replace(short, timer=DeviceTimer(local(tmp_path / "c"))).run(Progress())
    assert not taken.skipped
