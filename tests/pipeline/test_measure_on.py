"""A bundle measured on a device: a folder of this machine, in which the runner works as it does elsewhere."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import networks
import pytest
import small_onnx
from devices.local_link import LocalLink

from quantkit.bundle import Bundle, Manifest
from quantkit.cli import run
from quantkit.devices.asked.room import unasked
from quantkit.devices.asked.verify import verify_on
from quantkit.devices.job import At, Done, Failed, Found, Job, Note
from quantkit.devices.measure import _kept, measure_on
from quantkit.devices.named import NamedDevice
from quantkit.devices.probed import probe
from quantkit.devices.reached import Reached
from quantkit.devices.rounds import DeviceTimer, generate_on
from quantkit.devices.ssh.address import Address
from quantkit.devices.ssh.openssh import OpenSSH
from quantkit.errors import InputError, Stopped
from quantkit.measurement.rows import Baseline, Device, Row
from quantkit.measurement.timing.rounds import RoundsJob
from quantkit.measurement.timing.shapes import Shape, TimingPlan
from quantkit.pipeline.compare.sides import open_sides
from quantkit.pipeline.compare.times import prepare
from quantkit.pipeline.finished.export import export_bundle
from quantkit.pipeline.keep import keep
from quantkit.pipeline.progress import Progress
from quantkit.pipeline.verdict import by_device
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


def measured(bundle: Bundle, link: Any, made: Made, **how: Any) -> list[Row]:
    return measure_on(bundle, link, str(made.model), runtime="onnxruntime", plan=PLAN, **how)


# a device has none of these
ABSENT = ("torch", "transformers", "scipy", "onnx", "onnx_ir", "tokenizers", "plotly", "psutil")


def absent(folder: Path, *names: str) -> dict[str, str]:
    """The environment of a Python in which these cannot be imported."""
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / f"{name}.py").write_text(f"raise ModuleNotFoundError('{name}', name='{name}')\n")
    return {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return absent(tmp_path_factory.mktemp("absent"), *ABSENT)


class Cut(LocalLink):
    """A connection that ends after some cells; what works there is ended by the power."""

    def __init__(self, workdir: Path, after: int, cells: tuple[str, ...] = ("decode", "prefill")) -> None:
        super().__init__(workdir, "pi5")
        self.left, self.cells = after, cells

    def follow(self, job: str, after: int = 0) -> Iterator[At | Note | Found | Failed | Done]:
        for line in super().follow(job, after):
            if isinstance(line, Found) and line.cell.startswith(self.cells):
                self.left -= 1
                if self.left < 0:
                    os.killpg(self._jobs[job].pid, signal.SIGKILL)
                    raise Stopped("device-gone", where=self.name)
            yield line


def test_rows_of_two_devices_stand_in_one_bundle(
    made: Made, copied: Copy, bare: dict[str, str], tmp_path: Path
) -> None:
    bundle = copied(made.both)
    before = {row.line() for row in stored(bundle)}
    rows = measured(bundle, LocalLink(tmp_path / "a", "pi5", environment=bare), made)
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
    measured(bundle, LocalLink(tmp_path / "b", "box"), made)
    assert len([row for row in stored(bundle) if row.name in TIMED and row.on]) == 2 * 3
    page = (bundle.path / "report.html").read_text()
    assert "<summary>pi5</summary>" in page
    assert "<summary>box</summary>" in page
    assert "All devices at once" in page
    assert all(check.ok for check in Bundle.load(bundle.path).verify())


def test_a_connection_that_is_cut_leaves_what_has_come_and_resume_measures_the_rest(
    made: Made, copied: Copy, tmp_path: Path
) -> None:
    bundle, link = copied(made.both), Cut(tmp_path / "there", after=1)
    with pytest.raises(Stopped):
        measured(bundle, link, made)
    (first,) = [row for row in stored(bundle) if row.on == "pi5" and row.name in TIMED]
    # and again, behind the last shape
    link.left, link.cells = 0, ("ceilings-after",)
    with pytest.raises(Stopped):
        measured(bundle, link, made, resume=True)
    after = [row for row in stored(bundle) if row.on == "pi5" and row.name in TIMED]
    assert len(after) == 3
    assert first in after
    page = (bundle.path / "report.html").read_text()
    link.left = 100
    assert [row.name for row in measured(bundle, link, made, resume=True)] == ["memory.peak"]
    assert [row for row in stored(bundle) if row.on == "pi5" and row.name in TIMED] == after
    assert (bundle.path / "report.html").read_text() != page
    assert measured(bundle, link, made, resume=True) == []
    assert not list((tmp_path / "there" / "jobs").glob("*/pid")) or link._jobs.popitem()[1].poll() is not None


def test_resume_counts_rows_of_the_runtime_and_ends_what_has_none_missing(
    made: Made, copied: Copy, tmp_path: Path
) -> None:
    bundle, link = copied(made.both), LocalLink(tmp_path, "pi5")
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
    assert measure_on(bundle, link, str(made.model), runtime="onnxruntime", plan=plan, resume=True) == []
    assert not list((tmp_path / "jobs").glob("*"))
    assert "<summary>pi5</summary>" in (bundle.path / "report.html").read_text()


def original_of(bundle: Bundle) -> Baseline:
    return Baseline(subject=bundle.manifest.model.source.sha256, value=1.0)


def test_work_that_was_ended_goes_on_where_it_was(made: Made, copied: Copy, tmp_path: Path) -> None:
    bundle, link = copied(made.both), Cut(tmp_path / "there", after=1)
    with pytest.raises(Stopped):
        measured(bundle, link, made)
    (folder,) = (tmp_path / "there" / "jobs").iterdir()
    link.left = 100
    lines = (folder / "rows.jsonl").read_bytes()
    (folder / "rows.jsonl").write_bytes(lines + b'{"n": 99, "kind": "ro')  # the power went while it wrote
    job = Job.read((folder / "job.json").read_text())
    cells = [line.cell for line in link.follow(link.start(job)) if isinstance(line, Found)]
    assert len(cells) == len(set(cells))
    assert {"decode-1-16", "decode-2-16", "prefill-1-8", "ceilings-after"} <= set(cells)


def test_too_little_memory_is_said_before_anything_is_carried(made: Made, copied: Copy, tmp_path: Path) -> None:
    """By what a plan knows of cache, activations and logits, beside the weights."""
    bundle, link = copied(made.both), LocalLink(tmp_path / "there", "pi5")
    weights = 2.2 * sum(
        path.stat().st_size for folder in (bundle.path, made.floating) for path in (folder / "onnx").rglob("*.*")
    )
    about = probe(OpenSSH(Address("here"), name="here", begin=["sh", "-c"]), str(tmp_path)).model_copy(
        update={"memory_free": int(weights) + 1000}
    )
    reached = Reached(NamedDevice(name="pi5", address="ssh://pi5"), about, link)  # type: ignore[arg-type]
    rows = stored(bundle)
    with pytest.raises(InputError, match="out-of-memory"):
        measured(bundle, link, made, ready=reached.ready())
    assert not (tmp_path / "there").exists()
    assert stored(bundle) == rows
    # without times nothing but the weights is asked for
    about.demand_memory([], "pi5", weights)


def test_a_bundle_is_loaded_there_without_torch(made: Made, tmp_path: Path, bare: dict[str, str]) -> None:
    bundle = Bundle.load(made.both)
    checks, notes = verify_on(bundle, LocalLink(tmp_path, "pi5", environment=bare))
    assert [check.name for check in checks] == [*(check.name for check in bundle.verify()), "onnxruntime.loads"]
    assert all(check.ok for check in checks)
    assert not notes


def test_a_graph_is_loaded_there(tmp_path: Path, bare: dict[str, str]) -> None:
    (tmp_path / "net/onnx").mkdir(parents=True)
    networks.write(tmp_path / "net/onnx/model.onnx")
    bundle = small_onnx.bundle(tmp_path / "net", kind="network")
    checks, _ = verify_on(bundle, LocalLink(tmp_path / "there", "pi5", environment=bare))
    assert checks[-1].name == "onnxruntime.loads"
    assert all(check.ok for check in checks)
    (tmp_path / "net/onnx/model.onnx").write_bytes(b"no graph")
    checks, _ = verify_on(
        small_onnx.bundle(tmp_path / "net", kind="network"), LocalLink(tmp_path / "b", "pi5", environment=bare)
    )
    assert [check.name for check in checks if not check.ok] == ["onnxruntime.loads"]
    assert "onnx-unreadable" in checks[-1].where


def test_a_device_goes_on_with_the_same_words(made: Made, tmp_path: Path, bare: dict[str, str]) -> None:
    bundle = Bundle.load(made.both)
    here = load_runtime("onnxruntime").generate(bundle, "The state of", new_tokens=6)
    link = LocalLink(tmp_path, "pi5", environment=bare)
    there = generate_on(bundle, link, "The state of", runtime="onnxruntime", new_tokens=6)
    assert there["text"] == here["text"]
    assert there["tokens"] == here["tokens"]


def test_generate_on_a_device(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @contextmanager
    def reach(on: str, **_: Any) -> Iterator[Any]:
        yield SimpleNamespace(link=LocalLink(tmp_path, on), ready=lambda progress: unasked)

    monkeypatch.setattr("quantkit.devices.reached.reach", reach)
    words = ["generate", str(made.both), "--prompt", "The state of", "--new-tokens", "4", "--json"]
    answers = []
    for more in ([], ["--on", "pi5"]):
        assert run([*words, *more]) == 0
        answers.append(json.loads(capsys.readouterr().out)["result"])
    here, there = answers
    assert (there["text"], there["tokens"], there["device"]) == (here["text"], 4, "pi5")


def test_two_bundles_are_timed_in_turns_there(made: Made, tmp_path: Path) -> None:
    shapes = [Shape("decode", 1, 16), Shape("prefill", 1, 8)]
    job = RoundsJob(str(made.both / "onnx"), str(made.floating / "onnx"), shapes, threads=1, seconds=0.2)
    taken = DeviceTimer(LocalLink(tmp_path, "pi5"))(job, lambda share, words: None)
    assert [each.shape for each in taken] == shapes
    for each in taken:
        assert len(each.rounds) >= 6
        assert {len(times) for times in each.seconds.values()} == {sum(each.rounds)}


def test_a_comparison_that_was_cut_off_goes_on_with_the_round_that_is_missing(made: Made, tmp_path: Path) -> None:
    class Heard(LocalLink):
        def follow(self, job: str, after: int = 0) -> Iterator[At | Note | Found | Failed | Done]:
            for line in super().follow(job, after):
                if isinstance(line, Found) and line.cell.startswith("round-"):
                    heard.setdefault(line.cell, []).append(line.rows)
                yield line

    heard: dict[str, list[Any]] = {}
    job = RoundsJob(str(made.both / "onnx"), str(made.floating / "onnx"), [Shape("decode", 1, 16)], 1, seconds=0.2)
    with pytest.raises(Stopped, match="device-gone"):
        DeviceTimer(Cut(tmp_path, 3, ("round",)))(job, lambda share, words: None)
    (kept,) = tmp_path.glob("jobs/*/rows.jsonl")
    before = [line for line in kept.read_bytes().splitlines() if b'"round-' in line]
    (taken,) = DeviceTimer(Heard(tmp_path, "pi5"))(job, lambda share, words: None)
    assert len(before) >= 4
    assert len(heard) == len(taken.rounds) == max(6, len(before))
    assert [json.loads(line)["rows"] for line in before] == [[*found[0]] for found in heard.values()][: len(before)]


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
    with small_onnx.traced_once("llama", CHANGES):
        bundle = export_bundle(copied(made.both), "openvino").bundle
    here = load_runtime("openvino").generate(bundle, "The state of", new_tokens=6)
    there = generate_on(bundle, LocalLink(tmp_path / "a"), "The state of", runtime="openvino", new_tokens=6)
    assert (there["text"], there["tokens"]) == (here["text"], here["tokens"])
    sides = open_sides(bundle, made.both)
    timer = DeviceTimer(LocalLink(tmp_path / "b", environment=absent(tmp_path / "absent", "openvino")))
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
    (taken,) = replace(short, timer=DeviceTimer(LocalLink(tmp_path / "c"))).run(Progress())
    assert not taken.skipped
