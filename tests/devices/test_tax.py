"""Linears timed on a device: products are made here and run there by a Python that has neither torch nor onnx."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from devices.local import ABSENT, local
from devices.loopback import Loopback
from devices.planted import Planted, about, reached
from devices.test_device_command import said
from quantkit.cli import run
from quantkit.devices.answers import CeilingSamples, Cells, ProductTimes, Times, dumped
from quantkit.devices.openssh import Lost
from quantkit.devices.probed import Probed, probe
from quantkit.devices.tax import TaxDevice
from quantkit.errors import InputError
from quantkit.exporters.onnx.single_op import SingleProduct
from quantkit.measurement.operators.ceilings import Ceiling
from quantkit.measurement.operators.onnxruntime import OnnxRuntimeBench
from quantkit.measurement.operators.run import ALL, SweepJob
from quantkit.measurement.rows import Row, read_rows
from quantkit.measurement.timing.clocks import Clocks
from quantkit.model.sizes.shapes import LinearShape
from quantkit.pipeline.tax import Question, measure_tax, prepare

UP, DOWN = LinearShape(name="up", K=128, N=96, count=2), LinearShape(name="down", K=96, N=128)
VARIANTS, BATCHES, CACHE = ("int4.g32.level4", "int8.dynamic", "int8.static"), (1, 16), 1 << 16
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


def test_products_are_timed_where_nothing_can_make_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = SingleProduct.save

    def save(self: SingleProduct, file: Path) -> None:
        if self.variant.name == "int8.static":  # a weight that is not what its answers are of
            w = self.stored["w"]
            self = replace(self, stored={**self.stored, "w": replace(w, raw=np.roll(w.raw, 1, axis=0))})
        real(self, file)

    monkeypatch.setattr(SingleProduct, "save", save)
    device = local(tmp_path / "there", "pi5", absent=ABSENT, last_level_cache=CACHE)
    seen: list[str] = []
    real_run = device.link.run

    def run(*asked: Any, **how: Any) -> Cells:
        """As it runs, but for ceilings that are known, and a way that breaks once a product of the second has come."""

        def come(cells: Cells, cell: str) -> None:
            if cell.startswith("linear-1-1-int8.dynamic") and "cut" not in seen:
                seen.append("cut")
                del cells._texts[cell]
                raise Lost("device-gone", where="pi5")
            if cell.startswith("ceilings"):
                cells._texts[cell] = json.dumps([dumped(CeilingSamples(ceilings=CEILINGS))]).encode()
            seen.append(cell)

        return real_run(*asked, **{**how, "row": come})

    monkeypatch.setattr(device.link, "run", run)
    found = TaxDevice(device)(job(), quiet)
    # each cell once: of a linear that was timed in part what is missing
    seen.remove("cut")
    assert len(set(seen)) == len(seen) == 1 + 2 + 2 * 2 * 4
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


RAGGED: dict[str, Any] = {"subject": [[[1.0], [2.0, 3.0]]], "baseline": []}


def times(n: int, M: int, variant: str, **changes: Any) -> dict[str, Any]:
    slow = 2e-3 if variant == "float32" else 1e-3
    noise = 1 + 0.01 * np.random.default_rng(n + M).standard_normal((40, 2, 2))
    sides = {"subject": (slow * noise).tolist(), "baseline": (2e-3 * noise[::-1]).tolist()}
    times = Times(seconds=sides, rounds=(20, 20))
    settings = {"kernel": "MatMulNBits", "variant": variant}
    one = dumped(ProductTimes(linear=n, M=M, variant=variant, prepared=True, settings=settings, times=times))
    within = {name: changes.pop(name) for name in [*changes] if name in one["times"]}
    return {**one, "times": {**one["times"], **within}, **changes}


def told(rows: list[dict[str, Any]], **facts: Any) -> Planted:
    """A device whose answers are written down."""
    ceilings = [dumped(CeilingSamples(ceilings=CEILINGS))]
    cells = [(f"linear-{number}", [row]) for number, row in enumerate(rows)]
    return Planted(about(**facts), ("ceilings", ceilings), *cells, ("ceilings-after", ceilings))


def sweep(link: Planted, **probed: Any) -> TaxDevice:
    room = {"memory": 4 << 30, "memory_free": 2 << 30, "disk_free": 8 << 30, "last_level_cache": CACHE}
    return TaxDevice(reached(link, Probed.model_construct(**{**room, **probed})))


ONE = job(linears=[UP.model_dump()], model="", variants=("int4.g32.level4",), batches=(1,))


def answered(*rows: dict[str, Any], **facts: Any) -> list[Row]:
    given = list(rows) or [times(0, 1, "float32"), times(0, 1, "int4.g32.level4")]
    return sweep(told(given, **facts))(ONE, quiet)


def test_its_times_are_compared_here() -> None:
    (row,) = [row for row in answered() if row.name == "latency.op" and row.settings["variant"] != "float32"]
    assert row.baseline is not None
    assert row.baseline.ratio == pytest.approx(2.0, rel=0.01)
    assert row.device is not None
    assert (row.device.id, row.device.name, row.on, row.device.machine) == ("x", "Cortex", "pi5", "aarch64")


@pytest.mark.parametrize(
    "rows",
    [
        [times(0, 1, "float32")],
        [times(0, 1, "float32"), times(0, 1, "int4.g32.level4"), times(0, 1, "int4.g32.level4")],
        [times(0, 1, "float32"), times(0, 1, "nf4.g64")],
        [times(0, 1, "float32"), times(3, 1, "int4.g32.level4")],
        [times(0, 1, "float32"), times(0, 1, "int4.g32.level4", rounds=[20])],
        [
            times(0, 1, "float32"),
            times(0, 1, "int4.g32.level4", seconds={"subject": [[[1.0], [2.0, 3.0]]], "baseline": []}),
        ],
        [times(0, 1, "float32"), times(0, 1, "int4.g32.level4", seconds={}, rounds=[])],
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
    none: dict[str, Any] = {"prepared": False, "seconds": {}, "rounds": [], "skipped": "out-of-memory"}
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


def judged(**facts: Any) -> Any:
    plan = prepare(Question(shapes=["128x96"], formats=["int4.g32.level4"], batches=[1], threads=[4], cores=4))
    rows = [times(0, 1, "float32"), times(0, 1, "int4.g32.level4")]
    return measure_tax(plan, None, sweep(told(rows, **facts)))


def test_an_emulator_s_times_are_not_judged() -> None:
    real, emulated = judged(), judged(emulated=True)
    assert [each.answer for each in real.advice.values()] == ["ship_it"]
    assert (emulated.advice, emulated.verdicts, emulated.inconclusive) == ({}, {}, False)
    assert all("emulated" in row.flags for row in emulated.rows)
    assert "an emulator" in " ".join(emulated.notes)
    from quantkit.report.kit import html
    from quantkit.report.taxed import document

    assert "ship" not in html.page(document(emulated.reported())).partition("<main")[2].partition("explained")[0]


@pytest.mark.parametrize(
    # three times float32's copies beyond three times the cache; the disk holds each weight once
    ("room", "code"),
    [
        ({"memory_free": 3 * 4 * 256 * 256 - 1}, "out-of-memory"),
        ({"disk_free": 4 * 256 * 256 + 2 * 4 * 128 * 96}, "device-full"),
    ],
)
def test_what_does_not_fit_is_said_before_anything_is_made_or_carried(room: dict[str, int], code: str) -> None:
    link = told([])
    with pytest.raises(InputError, match=code):
        sweep(link, **room)(job(), quiet)
    assert not link.carried and not link.asked


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
    device = TaxDevice(reached(told([]), Probed.model_construct(machine="aarch64", cores=64, last_level_cache=None)))
    asked = device.asked(Question(shapes=["64x32"], threads=[48]))
    plan = prepare(asked)
    assert (plan.on.target.name, list(plan.threads)) == ("cpu-arm", [48])
    with pytest.raises(InputError, match=r"threads-invalid.*64 cores"):
        prepare(replace(asked, threads=[65]))
    with pytest.raises(InputError, match=r"usage.*log in there"):
        device.asked(Question(shapes=["64x32"], device="cuda"))


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

    monkeypatch.setattr("quantkit.devices.probed.probe", small)
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
    assert not (there / "tmp").exists()
