"""A bundle measured on two devices over a real sshd, by the commands and the runner that a user has."""

import fcntl
import json
import os
import random
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
import zoo

from devices.loopback import Loopback, left
from devices.test_device_command import said
from devices.wheels import small_python
from quantkit.bundle import Bundle
from quantkit.devices.answers import Cells
from quantkit.devices.link import Link
from quantkit.devices.named import reach
from quantkit.measurement.rows import Row
from quantkit.nightly.records import NightCell
from quantkit.nightly.store import Store
from quantkit.pipeline import Request, compile_model
from quantkit.recipe import Recipe

CHANGES = {"vocab_size": 258, "num_hidden_layers": 1}
RECIPE: dict[str, Any] = {
    "schema": 1,
    "summary": "a test",
    "models": ["decoder"],
    "calibration": {"set": "prose-en", "samples": 2, "tokens": 32},
    "scheme": {"weights": {"format": "int4", "granularity": "group", "group": 32, "symmetric": False}},
    "passes": ["rtn"],
    "export": [{"onnx": {}}],
}
TIMED = ("latency.decode_step", "latency.prefill")


@dataclass
class Home:
    """Both devices by their names, and what is measured on them.

    Args:
        path: of the model, the recipe, and `int4` and `floats`, bundles.
        python: of both, with what a device needs and nothing else.
        devices: the way to both.
        reached: seconds between the last file's arrival and the first row, of the first measuring.
    """

    path: Path
    python: Path
    devices: Loopback
    reached: float = 0.0

    def measure(
        self, capsys: pytest.CaptureFixture[str], bundle: Path, on: str, *more: object, batch: str = "1,2,3,4,5,6,7,8"
    ) -> dict[str, Any]:
        """What the command says; whether it is faster is not the question."""
        words = ("--baseline", self.path / "model", "--batch", batch, "--seconds", 1)
        return said(capsys, "measure", bundle, "--on", on, *words, *more)

    def copy(self, folder: Path) -> Path:
        """The bundle with the rows of `tiny`."""
        return Path(shutil.copytree(self.path / "int4", folder / "int4"))


def rows(bundle: Path, on: str) -> list[Row]:
    found = [Row.model_validate(row) for row in Bundle.load(bundle).measurements]
    return [row for row in found if row.on == on]


def keys(found: list[Row]) -> Counter[tuple[Any, ...]]:
    """What each row is of, whatever it says; how much is read for a ceiling goes by the memory that is there."""
    shapes = ["" if row.name.startswith("ceiling.") else str(row.shape) for row in found]
    return Counter(
        (row.name, row.batch, shape, row.runtime, row.settings.get("way"), row.settings.get("compute_type"))
        for row, shape in zip(found, shapes, strict=True)
    )


def watched(patch: pytest.MonkeyPatch, see: Callable[[str, str], None]) -> None:
    """Tell each cell that comes: of which work, and its name."""
    real = Link.run

    def run(self: Link, work: str, job: Any, progress: Any = None, *, row: Any = None, **how: Any) -> Cells:
        def come(cells: Cells, cell: str) -> None:
            see(work, cell)
            if row is not None:
                row(cells, cell)

        return real(self, work, job, progress, row=come, **how)

    patch.setattr(Link, "run", run)


@pytest.fixture(scope="module")
def home(loopback: Loopback, tmp_path_factory: pytest.TempPathFactory, byte_tokenizer: Any) -> Iterator[Home]:
    path = tmp_path_factory.mktemp("home")
    zoo.save(path / "model", byte_tokenizer, "llama", **CHANGES)
    (path / "small.yaml").write_text(yaml.safe_dump(RECIPE))
    for wire in loopback.wires.values():
        wire.fresh()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{loopback.path}{os.pathsep}{os.environ['PATH']}")
        patch.setenv("XDG_CONFIG_HOME", str(path / "settings"))
        patch.setenv("QUANTKIT_CACHE", str(path / "cache"))
        patch.setattr("quantkit.pipeline.blocks.tokens.SCORED", 300)
        patch.setattr("quantkit.pipeline.measure.float_export", lambda *_: path / "floats/onnx")
        for out, changes in (("int4", {}), ("floats", {"passes": [], "scheme": {}})):
            recipe = Recipe.from_dict({**RECIPE, **changes}, name="tiny")
            compile_model(Request.of(str(path / "model"), recipe=recipe, out=path / out, speed=False))
        yield Home(path, small_python(path / "python"), loopback)


@pytest.fixture
def known(home: Home, capsys: pytest.CaptureFixture[str]) -> Iterator[Home]:
    """Both added, the bundle measured on `tiny`; afterwards nothing is left running."""
    for wire in home.devices.wires.values():
        wire.fresh()
    if not home.reached:
        for name in ("plain", "tiny"):
            words = ("--workdir", home.path / name, "--python", home.python)
            assert said(capsys, "device", "add", name, f"ssh://{name}", *words)["error"] is None
        arrived, came = [0.0], list[float]()
        real = Link.carry

        def carry(self: Link, *words: Any) -> str:
            place = real(self, *words)
            arrived[0] = arrived[0] if came else time.monotonic()
            return place

        def see(work: str, cell: str) -> None:
            if cell.startswith("scored-") and not came:
                came.append(time.monotonic())

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Link, "carry", carry)
            watched(patch, see)
            found = home.measure(capsys, home.path / "int4", "tiny")
        assert found["exit"] in (0, 3), found["error"]
        home.reached = came[0] - arrived[0]
    yield home
    for name in ("plain", "tiny"):
        assert not left(home.path / name)


def test_a_device_of_one_core_and_a_gigabyte(known: Home, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Measures, compares and goes on with a text."""
    found = rows(known.path / "int4", "tiny")
    assert {row.name for row in found} >= {*TIMED, "accuracy.kl", "tax.break_even", "memory.peak", "ceiling.read"}
    assert {row.settings["threads"] for row in found if row.name in TIMED} == {1}
    assert set(keys(found).values()) == {1}
    assert "<summary>tiny</summary>" in (known.path / "int4/report.html").read_text()
    assert known.reached < 30
    words = ("--measure", "--batch", 1, "--seconds", 1, "--on", "tiny", "--examples", 0)
    compared = said(capsys, "compare", known.path / "floats", known.path / "int4", *words)
    assert compared["exit"] in (0, 1, 3), compared["error"]
    cells = [each for each in compared["result"]["cells"] if each["what"] == "latency"]
    assert cells
    asked = ("generate", known.path / "int4", "--prompt", "The state of", "--new-tokens", 4)
    here, there = (said(capsys, *asked, *more)["result"] for more in ((), ("--on", "tiny")))
    assert (there["text"], there["tokens"], there["device"]) == (here["text"], 4, "tiny")
    assert not (known.path / "tiny/tmp").exists()


def test_cut_20_times_every_row_is_there_once(
    known: Home, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Soon after answers, ten while it scores and ten while it times; nothing is asked of the user."""
    bundle, wire, chances = known.copy(tmp_path), known.devices.wires["plain"], random.Random(0)
    before, cells, cuts = rows(bundle, "tiny"), list[tuple[str, str]](), list[tuple[str, threading.Timer]]()

    def cut(kind: str, cell: str) -> None:
        cells.append((kind, cell))
        if sum(each == kind for each, _ in cuts) < 10:
            cuts.append((kind, threading.Timer(chances.uniform(0, 0.2), wire.cut)))
            cuts[-1][1].start()

    watched(monkeypatch, cut)
    found = known.measure(capsys, bundle, "plain")
    assert found["exit"] in (0, 3), found["error"]
    for _, timer in cuts:
        timer.join()
    assert Counter(kind for kind, _ in cuts) == {"accuracy": 10, "measure": 10}
    assert wire.cuts == 20
    assert set(Counter(cells).values()) == {1}
    assert keys(rows(bundle, "plain")) == keys(before)
    assert rows(bundle, "tiny") == before
    assert not (known.path / "plain/tmp").exists()
    assert all(check.ok for check in Bundle.load(bundle).verify())


def test_a_device_that_reboots_goes_on_and_resume_measures_what_is_missing(
    known: Home, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle, wire, there = known.copy(tmp_path), known.devices.wires["plain"], known.path / "plain"
    monkeypatch.setattr("quantkit.devices.named.Link", partial(Link, patience=1.0))
    cells: list[tuple[str, str]] = []
    resumed: list[int] = []

    def reboot() -> None:
        os.kill(json.loads((there / "lock").read_text())["runner"], signal.SIGKILL)

    def shapes(since: int = 0) -> int:
        return sum(cell.startswith("decode-") for _, cell in cells[since:])

    def see(work: str, cell: str) -> None:
        cells.append((work, cell))
        if not resumed and shapes() == 2 and not wire.off:
            wire.off = True  # and it stays away; what was already on its way may still arrive
            reboot()
            wire.cut()
        if resumed and shapes(resumed[0]) == 2 and cell.startswith("decode-"):
            reboot()  # and it is back at once

    watched(monkeypatch, see)
    gone = known.measure(capsys, bundle, "plain")
    assert (gone["exit"], gone["error"]["code"]) == (75, "device-gone"), gone["error"]
    kept, arrived = rows(bundle, "plain"), shapes()
    assert sum(row.name in TIMED for row in kept) == arrived >= 2
    assert not left(there)
    wire.off = False
    resumed.append(len(cells))
    went_on = known.measure(capsys, bundle, "plain", "--resume")
    assert went_on["exit"] in (0, 3), went_on["error"]
    assert set(Counter(cell for cell in cells if cell[1].startswith(("decode-", "prefill-"))).values()) == {1}
    assert shapes() > arrived + 2, "the device was to go away once more, with shapes still missing"
    # what was measured before is what it was, but for what ceilings of the second half say
    all_of_it = rows(bundle, "plain")
    assert keys(kept) <= keys(all_of_it)
    taken = {(row.name, row.batch, str(row.shape)): (row.value, row.n) for row in all_of_it}
    assert all(taken[row.name, row.batch, str(row.shape)] == (row.value, row.n) for row in kept if row.name in TIMED)
    assert keys(all_of_it) == keys(rows(bundle, "tiny"))
    new = [row for row in went_on["result"]["measurements"] if row["name"] in TIMED]
    assert len(new) == sum(row.name in TIMED for row in all_of_it) - arrived
    assert not {row["name"] for row in went_on["result"]["measurements"]} & {"accuracy.kl"}


def test_the_way_is_in_no_time(
    known: Home, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of what is far away are timed where it is: none takes as long as a byte to there."""
    wire, bundle = known.devices.wires["plain"], known.copy(tmp_path)
    wire.delay = 0.1
    began = time.monotonic()
    found = known.measure(capsys, bundle, "plain", batch="1")
    assert found["exit"] in (0, 3), found["error"]
    # it was as far away as that: to get in alone takes more turns
    assert time.monotonic() - began > 10 * 2 * wire.delay
    times = [row.value for row in rows(bundle, "plain") if row.name in TIMED]
    assert times
    assert max(times) < wire.delay


def test_a_night_measures_on_both_at_once(
    known: Home, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`plain`, the first, is held up until `tiny` has been committed: one after the other would never end."""
    config = {
        "models": [str(known.path / "model")],
        "recipes": [str(known.path / "small.yaml")],
        "targets": ["cpu-x86"],
        "on": ["plain", "tiny"],
        "budget": {"rounds": 2, "blocks": 2},
        "store": "store",
        "bundles": "bundles",
    }
    (tmp_path / "nightly.yaml").write_text(yaml.safe_dump(config))
    came = list[str]()

    def hold() -> None:
        with (known.path / "plain/lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            held.set()
            until = time.monotonic() + 3000
            while not came and time.monotonic() < until:
                time.sleep(0.5)
                if list((tmp_path / "store/results").rglob("*.parquet")):
                    store = Store.open(tmp_path / "store")
                    came.extend(NightCell.of(r.cell).on for n in store.nights() for r in store.results(n.night))

    with reach("plain") as found:
        found.link.install()
    held = threading.Event()
    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    ran = said(capsys, "nightly", "run", tmp_path / "nightly.yaml")
    holder.join()
    assert ran["error"] is None
    assert came == ["tiny"]
    store = Store.open(tmp_path / "store")
    (night,) = store.nights()
    results = store.results(night.night)
    assert {(NightCell.of(each.cell).on, each.state) for each in results} == {("plain", "done"), ("tiny", "done")}, [
        each.error for each in results
    ]
    assert {each.device["on"]: each.device["threads"] for each in results}["tiny"] == 1
    for each in results:
        taken = [time.seconds for time in store.times(night.night) if time.cell == each.cell]
        assert len(taken) == 2 * 2 * 4 / 2
        assert min(taken) > 0
        assert f"scored here, not on {each.device['on']}" in each.flags
    assert not list(known.path.glob("*/tmp"))
