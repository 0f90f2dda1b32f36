"""Linears timed on a device: products are made here and run there by a Python that has neither torch nor onnx."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from devices.local_link import LocalLink
from devices.loopback import Loopback
from devices.test_device_command import said
from quantkit.cli import run
from quantkit.devices.answers import CeilingSamples, DeviceFacts, ProductTimes, dumped
from quantkit.devices.job import At, Done, Failed, Found, Job, Note, Tax
from quantkit.devices.probed import Probed, probe
from quantkit.devices.tax.needs import ProductNeeds
from quantkit.devices.tax.sweep import DeviceSweep, TaxDevice
from quantkit.errors import InputError, Stopped
from quantkit.exporters.onnx.single_product import SingleProduct
from quantkit.measurement.operators.ceilings import Ceiling
from quantkit.measurement.operators.onnxruntime import OnnxRuntimeBench
from quantkit.measurement.operators.rows import ALL
from quantkit.measurement.operators.run import SweepJob
from quantkit.measurement.rows import Row, read_rows
from quantkit.measurement.timing.clocks import Clocks
from quantkit.model.sizes.shapes import LinearShape
from quantkit.pipeline.tax.question import Question, prepare
from quantkit.pipeline.tax.tax import measure_tax

UP, DOWN = LinearShape(name="up", K=128, N=96, count=2), LinearShape(name="down", K=96, N=128)
VARIANTS, BATCHES, CACHE = ("int4.g32.level4", "int8.dynamic", "int8.static"), (1, 16), 1 << 16
# a device has none of these
ABSENT = ("torch", "transformers", "scipy", "onnx", "onnx_ir", "tokenizers", "plotly", "psutil")
CEILINGS = (
    Ceiling("ceiling.read", "B/s", (10e9,) * 7, {"threads": 1}, {"bytes": 1}),
    Ceiling("ceiling.compute", "flop/s", (100e9,) * 7, {"compute_type": "fp32"}, {"M": 1}),
    Ceiling("ceiling.compute", "op/s", (400e9,) * 7, {"compute_type": "int8"}, {"M": 1}),
    Ceiling("ceiling.launch", "s", (8e-6,) * 7, {"threads": 1}, {"M": 1}),
)


def job(**changes: Any) -> SweepJob:
    linears = [each.model_dump() for each in (UP, DOWN)]
    return replace(SweepJob(linears, "a model", "float32", VARIANTS, BATCHES, 1, 0.4, rounds=2), **changes)


def quiet(share: float, words: str) -> None:
    pass


class Cut(LocalLink):
    """A device on which ceilings are known before, and which goes when a linear has been answered."""

    lasts = 1

    def start(self, job: Job) -> str:
        folder = self.workdir / "jobs" / job.id
        if not folder.exists():
            folder.mkdir(parents=True)
            rows = [dumped(CeilingSamples(ceilings=CEILINGS))]
            cells = ({"kind": "row", "cell": cell, "rows": rows} for cell in ("ceilings", "ceilings-after"))
            lines = [json.dumps({"n": n, **cell}) for n, cell in enumerate(cells)]
            (folder / "rows.jsonl").write_text("".join(f"{line}\n" for line in lines))
        return super().start(job)

    def follow(self, job: str, after: int = 0) -> Iterator[At | Note | Found | Failed | Done]:
        for line in super().follow(job, after):
            if isinstance(line, Found) and line.cell.startswith("linear-1"):
                self.lasts -= 1
                if self.lasts == 0:
                    os.killpg(self._jobs[job].pid, signal.SIGKILL)
                    raise Stopped("device-gone", where=self.name)
            yield line


def test_products_are_timed_where_nothing_can_make_them_and_a_cut_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = tmp_path / "absent"
    absent.mkdir()
    for name in ABSENT:
        (absent / f"{name}.py").write_text(f"raise ModuleNotFoundError('{name}', name='{name}')\n")
    real = SingleProduct.save

    def save(self: SingleProduct, file: Path) -> None:
        if self.variant.name == "int8.static":  # a weight that is not what its answers are of
            w = self.stored["w"]
            self = replace(self, stored={**self.stored, "w": replace(w, raw=np.roll(w.raw, 1, axis=0))})
        real(self, file)

    monkeypatch.setattr(SingleProduct, "save", save)
    path = os.pathsep.join([str(absent), os.environ.get("PYTHONPATH", "")])
    link = Cut(tmp_path / "there", "pi5", environment={"PYTHONPATH": path})
    with pytest.raises(Stopped):
        DeviceSweep(link, CACHE)(job(), quiet)
    (rows,) = (tmp_path / "there" / "jobs").glob("*/rows.jsonl")
    before = [line for line in rows.read_text().splitlines() if '"cell":"linear-0' in line]
    assert len(before) == 2  # a line for each batch
    seen: list[Found] = []
    follow = link.follow

    def heard(name: str, after: int = 0) -> Iterator[At | Note | Found | Failed | Done]:
        for line in follow(name, after):
            seen.extend([line] if isinstance(line, Found) else [])
            yield line

    monkeypatch.setattr(link, "follow", heard)
    found = DeviceSweep(link, CACHE)(job(), quiet)
    # each cell once; what was there before the cut is what is there now
    assert len({line.cell for line in seen}) == len(seen) == 1 + 2 + 2 * 2
    assert [json.loads(line)["rows"] for line in before] == [
        list(x.rows) for x in seen if x.cell.startswith("linear-0")
    ]
    assert {row.on for row in found} == {"pi5"}
    timed = {
        (row.op.K, row.batch, row.settings["variant"]): row for row in found if row.name == "latency.op" and row.op
    }
    # what ran there is what a bench here makes of the same linear
    bench = OnnxRuntimeBench(1, CACHE)
    for linear in (UP, DOWN):
        for name, side in bench.prepare(linear, ["float32", *VARIANTS], BATCHES).items():
            assert not isinstance(side, str)
            for M in BATCHES:
                row = timed[linear.K, M, name]
                if name == "int8.static":
                    assert (row.value, row.flags) == (None, ["wrong-result"])
                    continue
                assert row.value and row.value > 0
                assert side.settings(M).items() <= row.settings.items()
                assert row.settings["products_a_run"] == side.products(M)
                assert row.resident_bytes == side.resident_bytes
                assert row.op is not None and row.op.bound_s is not None
                moved, compute = side.cost.bytes(M, 1, 0) / 10e9, 2.0 * M * linear.K * linear.N
                assert row.op.bound_s == pytest.approx(max(moved, compute / (4e11 if "int" in name else 1e11)))
    sums = [row for row in found if row.op and row.op.layer == ALL and row.settings["variant"] == "int8.dynamic"]
    assert {row.name for row in sums} == {"latency.op", "tax.total", "tax.break_even"}
    assert any(row.name == "tax.activation" for row in found)


# --- what a device says is data ---------------------------------------------------------------------------------------


def about(**changes: Any) -> DeviceFacts:
    facts = {"id": "cpu-1", "name": "a board", "machine": "aarch64", "isa": "neon", "cores": 4, "memory": 1 << 30}
    return DeviceFacts.model_validate({**facts, "versions": {"onnxruntime": "1"}, **changes})


def times(n: int, M: int, variant: str, **changes: Any) -> dict[str, Any]:
    slow = 2e-3 if variant == "float32" else 1e-3
    noise = 1 + 0.01 * np.random.default_rng(n + M).standard_normal((40, 2, 2))
    sides = {"ours": (slow * noise).tolist(), "theirs": (2e-3 * noise[::-1]).tolist()}
    settings = {"kernel": "MatMulNBits", "variant": variant}
    one = ProductTimes(linear=n, M=M, variant=variant, prepared=True, settings=settings, rounds=(20, 20), **sides)
    return {**dumped(one), **changes}


class Told:
    """A device whose answers are written down."""

    name = "pi5"

    def __init__(self, facts: DeviceFacts, rows: list[dict[str, Any]]) -> None:
        ceilings = [dumped(CeilingSamples(ceilings=CEILINGS))]
        self.cells = {"about": [dumped(facts)], "ceilings": ceilings, "linear-0": rows, "ceilings-after": ceilings}
        self.carried: list[str] = []
        self.asked: list[Tax] = []

    def put(self, files: Mapping[str, Path], progress: Any = None) -> None:
        self.carried += [path.name for path in files.values()]

    def lay_out(self, name: str, files: Mapping[str, str]) -> str:
        return f"bundles/{name}"

    def start(self, job: Job) -> str:
        assert isinstance(job.work, Tax)
        self.asked.append(job.work)
        return "job"

    def follow(self, job: str, after: int = 0) -> Iterator[At | Note | Found | Failed | Done]:
        for n, (cell, rows) in enumerate(self.cells.items()):
            yield Found(n=n, cell=cell, rows=tuple(rows))
        yield Done(n=len(self.cells))

    def cancel(self, job: str) -> None:
        pass


ONE = job(linears=[UP.model_dump()], model="", variants=("int4.g32.level4",), batches=(1,))


def answered(*rows: dict[str, Any], **facts: Any) -> list[Row]:
    given = list(rows) or [times(0, 1, "float32"), times(0, 1, "int4.g32.level4")]
    return DeviceSweep(Told(about(**facts), given), CACHE)(ONE, quiet)


def test_its_times_are_compared_here() -> None:
    (row,) = [row for row in answered() if row.name == "latency.op" and row.settings["variant"] != "float32"]
    assert row.baseline is not None
    assert row.baseline.ratio == pytest.approx(2.0, rel=0.01)
    assert row.device is not None
    assert (row.device.id, row.device.name, row.on, row.device.machine) == ("cpu-1", "a board", "pi5", "aarch64")


@pytest.mark.parametrize(
    "rows",
    [
        [times(0, 1, "float32")],
        [times(0, 1, "float32"), times(0, 1, "int4.g32.level4"), times(0, 1, "int4.g32.level4")],
        [times(0, 1, "float32"), times(0, 1, "nf4.g64")],
        [times(0, 1, "float32"), times(3, 1, "int4.g32.level4")],
        [times(0, 1, "float32"), times(0, 1, "int4.g32.level4", rounds=[20])],
        [times(0, 1, "float32"), times(0, 1, "int4.g32.level4", ours=[[[1.0], [2.0, 3.0]]])],
        [times(0, 1, "float32"), times(0, 1, "int4.g32.level4", ours=[], theirs=[], rounds=[])],
        [times(0, 1, "float32"), times(0, 1, "int4.g32.level4", skipped="too-slow")],
        [times(0, 1, "float32"), times(0, 1, "int4.g32.level4", prepared=False)],
        [times(0, 1, "float32"), times(0, 1, "int4.g32.level4", hot=-1.0)],
        [times(0, 1, "float32"), times(0, 1, "int4.g32.level4", skipped="\x1b[2J")],
        [times(0, 1, "float32"), times(0, 1, "int4.g32.level4", settings={"a" * 300: 1})],
    ],
)
def test_what_was_not_asked_for_is_refused_in_one_line(rows: list[dict[str, Any]]) -> None:
    with pytest.raises(InputError) as met:
        answered(*rows)
    assert met.value.code == "answer-invalid"
    assert met.value.line().isprintable()


def test_a_baseline_that_ran_nowhere_is_its_flag() -> None:
    none: dict[str, Any] = {"prepared": False, "ours": [], "theirs": [], "rounds": [], "skipped": "out-of-memory"}
    with pytest.raises(InputError, match=r"out-of-memory.*float32 cannot run"):
        answered(times(0, 1, "float32", **none), times(0, 1, "int4.g32.level4", **none))


def test_clocks_stand_in_the_rows_and_one_that_fell_is_said() -> None:
    looks = {"before": dumped_clocks(2.4e9, 50.0, 3), "after": dumped_clocks(1.5e9, 85.0, 9)}
    rows = answered(times(0, 1, "float32", **looks), times(0, 1, "int4.g32.level4", **looks))
    for row in rows:
        assert ("throttled" in row.flags) == (row.op is not None), row.name
    (row,) = [row for row in rows if row.name == "tax.total" and row.settings["variant"] != "float32"]
    assert (row.settings["clock_hz_before"], row.settings["clock_hz_after"]) == (2.4e9, 1.5e9)
    assert row.settings["temperature_c_after"] == 85.0


def dumped_clocks(hz: float, warmth: float, throttles: int) -> dict[str, Any]:
    return dict(vars(Clocks(hz, warmth, throttles)))


def told(**facts: Any) -> Any:
    plan = prepare(Question(shapes=["128x96"], formats=["int4.g32.level4"], batches=[1], threads=[4], cores=4))
    rows = [times(0, 1, "float32"), times(0, 1, "int4.g32.level4")]
    return measure_tax(plan, None, DeviceSweep(Told(about(**facts), rows), CACHE))


def test_an_emulator_s_times_are_not_judged() -> None:
    real, emulated = told(), told(emulated=True)
    assert [each.answer for each in real.advice.values()] == ["ship_it"]
    assert (emulated.advice, emulated.verdicts, emulated.inconclusive) == ({}, {}, False)
    assert all("emulated" in row.flags for row in emulated.rows)
    assert "an emulator" in " ".join(emulated.notes)
    from quantkit.report.kit import html
    from quantkit.report.tax.document import document

    assert "ship" not in html.page(document(emulated.reported())).partition("<main")[2].partition("explained")[0]


def test_what_does_not_fit_is_said_before_anything_is_made_or_carried() -> None:
    link = Told(about(), [])
    asked: list[ProductNeeds] = []

    def refuse(needs: ProductNeeds) -> None:
        asked.append(needs)
        raise InputError("out-of-memory", where="pi5")

    with pytest.raises(InputError):
        DeviceSweep(link, CACHE, refuse)(job(), quiet)
    assert not link.carried and not link.asked
    # three times float32's copies beyond three times the cache; the disk holds each weight once
    assert asked[0].memory == 3 * 4 * 256 * 256
    assert asked[0].disk > 4 * 256 * 256 + 2 * 4 * 128 * 96


@pytest.mark.parametrize(
    ("needs", "code"), [((3e9, 0.0), "out-of-memory"), ((0.0, 9e9), "device-full"), ((1e9, 1e9), "")]
)
def test_a_device_without_room_is_one_line(needs: tuple[float, float], code: str) -> None:
    room = Probed.model_construct(memory=4 << 30, memory_free=2 << 30, disk_free=8 << 30)
    if not code:
        room.demand_room(*needs, "the products", "pi5")
        return
    with pytest.raises(InputError) as met:
        room.demand_room(*needs, "the products", "pi5")
    assert met.value.code == code
    assert met.value.line().isprintable()


def test_a_device_is_asked_about_its_own_cores_and_processor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    reached: Any = type("R", (), {"about": Probed.model_construct(machine="aarch64", cores=64)})()
    reached.device = type("D", (), {"name": "pi5"})()
    asked = TaxDevice(reached).asked(Question(shapes=["64x32"], threads=[48]))
    plan = prepare(asked)
    assert (plan.on.target.name, list(plan.threads)) == ("cpu-arm", [48])
    with pytest.raises(InputError, match=r"threads-invalid.*64 cores"):
        prepare(replace(asked, threads=[65]))
    with pytest.raises(InputError, match=r"usage.*log in there"):
        TaxDevice(reached).asked(Question(shapes=["64x32"], device="cuda"))


def test_an_unknown_device_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert run(["tax", "--shape", "64x64", "--on", "pi5", "--out", str(tmp_path / "rows")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not list(tmp_path.iterdir())


# --- the whole way ----------------------------------------------------------------------------------------------------


def test_tax_over_a_real_sshd(
    devices: Loopback, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def small(*asked: Any) -> Probed:
        """A device with a cache that few weights fill."""
        return probe(*asked).model_copy(update={"last_level_cache": CACHE})

    monkeypatch.setattr("quantkit.devices.reached.probe", small)
    there = tmp_path / "there"
    words = ("device", "add", "plain", "ssh://plain", "--workdir", there, "--python", sys.executable)
    assert said(capsys, *words)["error"] is None
    page, rows = tmp_path / "tax.html", tmp_path / "rows.jsonl"
    asked = ("--shape", "256x256", "--format", "int4", "--batch", "1", "--seconds", 1, "--threads", 1)
    found = said(capsys, "tax", *asked, "--on", "plain", "--html", page, "--out", rows)
    assert found["exit"] in (0, 3), found["error"]  # whether noise hides it is not the question
    assert found["result"]["on"] == "plain"
    read = read_rows(rows)
    assert {row.on for row in read} == {"plain"}
    assert {row.name for row in read} >= {"latency.op", "tax.total", "tax.break_even", "ceiling.read", "ceiling.launch"}
    assert all(row.value for row in read if row.name in ("latency.op", "ceiling.launch"))
    assert ", plain" in page.read_text()
    assert not list((there / "jobs").iterdir())
