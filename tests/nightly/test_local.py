"""A build's process: what it commits, what it says, and every way in which it can end."""

import os
import signal
import subprocess
import time
from pathlib import Path

import forked
import pytest

from quantkit.devices.named import NamedDevice
from quantkit.errors import Stopped
from quantkit.nightly.records import BuildJob, NightCell
from quantkit.nightly.store import Store
from quantkit.pipeline.many.executors import Local
from quantkit.pipeline.many.jobs import JobOutcome
from quantkit.pipeline.progress import Progress

from . import fake_work
from .conftest import FIRST, night


class Heard(Progress):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def at(self, stage: str, done: float, detail: str = "") -> None:
        self.lines.append(f"{stage} {detail}")


def job(home: Path, recipe: str, limit: float = 30.0) -> BuildJob:
    cells = tuple(NightCell("tiny", recipe, "cpu-x86", "onnxruntime", batch).key for batch in (1, 8))
    return BuildJob(FIRST, str(home / "nightly.yaml"), "", cells, 1, limit)


def store_of(home: Path) -> Store:
    store = Store.open(home / "store", create=True)
    store.begin(night())
    return store


def test_jobs_end_one_by_one_whatever_becomes_of_them(tmp_path: Path) -> None:
    store, heard = store_of(tmp_path), Heard()
    jobs = [job(tmp_path, name) for name in ("raises", "breaks", "killed")]
    jobs += [job(tmp_path, "hangs", 1.0), job(tmp_path, "fine")]
    found: list[JobOutcome] = list(Local().run(jobs, fake_work.work, heard))
    assert [each.job for each in found] == jobs
    assert [each.state for each in found] == ["failed"] * 4 + ["done"]
    raised, broken, killed, hung, fine = (each.error for each in found)
    assert raised == {"code": "planted", "where": "here", "value": "1", "rule": "2", "remedy": "3"}
    assert broken is not None and broken["code"] == "internal-error" and "by zero" in broken["value"]
    assert "fake_work.py" in broken["rule"]
    assert killed is not None and killed["code"] == "process-died" and "SIGKILL" in killed["value"]
    assert hung is not None and hung["code"] == "timeout"
    assert fine is None and store.committed(FIRST) == {*jobs[-1].cells}
    assert any("fine" in line and "measure" in line for line in heard.lines)


def on(home: Path, device: str, recipe: str) -> BuildJob:
    cell = NightCell("tiny", recipe, "cpu-x86", f"onnxruntime@{device}", 1)
    known = NamedDevice(name=device, address=f"ssh://pi@{device}").text()
    return BuildJob(FIRST, str(home / "nightly.yaml"), "", (cell.key,), 1, 30.0, known)


def test_devices_work_side_by_side_and_this_machine_after_them(tmp_path: Path) -> None:
    store_of(tmp_path)
    (tmp_path / "seconds").write_text("1.5")
    jobs = [
        job(tmp_path, "fine"),
        on(tmp_path, "pi5", "fine"),
        on(tmp_path, "box", "fine"),
        on(tmp_path, "pi5", "raises"),
    ]
    jobs.append(on(tmp_path, "box", "unprepared"))
    found = list(Local(prepare=fake_work.prepare).run(jobs, fake_work.work, Progress()))
    assert {each.job: each.state for each in found} == dict(
        zip(jobs, ["done", "done", "done", "failed", "failed"], strict=True)
    )
    began = [line.split() for line in (tmp_path / "log").read_text().splitlines()]
    order = [line[0] for line in began]
    assert order[:4] == ["prepare"] * 4
    assert {line.rpartition("|")[2] for line in order[4:6]} == {"onnxruntime@pi5", "onnxruntime@box"}
    assert order[-1].endswith("|onnxruntime")
    # the second began before the first had its cell measured
    first, second = (float(line[2]) for line in began[4:6])
    assert abs(first - second) < 1.5


def test_outcomes_come_one_by_one_and_an_interrupt_waits_for_no_word(tmp_path: Path) -> None:
    store_of(tmp_path)
    jobs = [on(tmp_path, "pi5", "fine"), on(tmp_path, "pi5", "hangs")]
    outcomes = Local(prepare=fake_work.prepare).run(jobs, fake_work.work, Progress())
    assert next(outcomes) == JobOutcome(jobs[0], "done")
    log = tmp_path / "log"
    while "hangs" not in log.read_text():
        time.sleep(0.05)
    began = time.monotonic()
    outcomes.close()  # type: ignore[attr-defined]
    assert time.monotonic() - began < 15


def _night(home: Path, recipe: str) -> None:
    list(Local().run([job(home, recipe)], fake_work.work, Progress()))


def test_nothing_goes_on_when_the_night_is_killed(tmp_path: Path) -> None:
    store_of(tmp_path)
    program = f"import sys; sys.path.insert(0, {str(Path(__file__).parents[1])!r})\n"
    program += "from pathlib import Path; from nightly.test_local import _night\n_night(Path(sys.argv[1]), 'hangs')"
    process = subprocess.Popen(forked.python("-c", program, str(tmp_path)))
    log = tmp_path / "log"
    while not (log.exists() and log.read_text().endswith("\n")):
        time.sleep(0.01)
    pid = int(log.read_text().split()[1])
    forked.kill(process)
    for _ in range(500):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    raise AssertionError("the build outlived its night")


@pytest.mark.usefixtures("fresh_children")
def test_a_build_that_is_stopped_stops_the_night(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    store_of(tmp_path)
    with pytest.raises(Stopped):
        list(Local().run([job(tmp_path, "fine")], stopped, Progress()))
    assert "Traceback" not in capfd.readouterr().err, "its last words were broken off"


def stopped(job: BuildJob, progress: Progress) -> None:
    raise Stopped("disk-full", where="here")
