"""Nights of builds that only pretend: from beginning to decisions, killed, resumed, and two at once."""

import os
import re
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import forked
import pytest
import yaml

from quantkit.errors import InputError, Stopped
from quantkit.nightly.config import Nightly
from quantkit.nightly.records import BuildJob, NightCell
from quantkit.nightly.run import KEPT, Summary, run_night
from quantkit.nightly.store import FILE, Store
from quantkit.pipeline.many.executors import Local
from quantkit.pipeline.many.jobs import JobOutcome, Work
from quantkit.pipeline.progress import Progress

from .fake_work import work

SMALL = {
    "models": ["smollm2-135m"],
    "recipes": ["rtn-int4", "int8-weights"],
    "targets": ["cpu-x86"],
    "batches": [1],
    "set": ["export=[{onnx: {dialect: onnxruntime}}]"],
    "store": "store",
}


class Here:
    """An executor without processes."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.jobs: list[BuildJob] = []
        self.stop_after = stop_after

    def ready(self) -> None:
        pass

    def run(self, jobs: Sequence[BuildJob], work: Work, progress: Progress) -> Iterator[JobOutcome]:
        for job in jobs:
            if len(self.jobs) == self.stop_after:
                raise KeyboardInterrupt
            self.jobs.append(job)
            try:
                work(job, progress)
                yield JobOutcome(job, "done")
            except InputError as problem:
                yield JobOutcome.of(job, problem)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    write(tmp_path)
    return tmp_path


def write(home: Path, **changes: Any) -> None:
    (home / "nightly.yaml").write_text(yaml.safe_dump({**SMALL, **changes}))


def night_of(home: Path, executor: Any = None, **options: Any) -> Summary:
    return run_night(home / "nightly.yaml", executor or Here(), work=work, **options)


def store_of(home: Path) -> Store:
    return Store.open(home / "store")


def answers(found: Summary, what: str = "latency") -> set[str]:
    return {each.answer for each in found.decisions if each.what == what}


def test_the_second_night_has_the_first_for_its_baseline(home: Path) -> None:
    first = night_of(home)
    assert {each.state for each in first.results} == {"done"} and len(first.results) == 2
    assert answers(first) == {"inconclusive"}
    assert all("this night becomes the baseline" in each.because for each in first.decisions if each.what == "latency")
    second = night_of(home)
    assert answers(second) == {"same"} and not second.repeated
    store = store_of(home)
    assert [each.night for each in store.nights()] == [first.night, second.night]
    assert store.nights()[0].matrix == tuple(cell.key for cell in Nightly.load(home / "nightly.yaml").cells())
    assert len(store.decisions(second.night)) == len(second.decisions)


def test_what_alarms_is_measured_once_more_and_then_called_worse(home: Path) -> None:
    night_of(home)
    (home / "slower").touch()
    executor = Here()
    found = night_of(home, executor)
    assert answers(found) == {"worse"}
    assert {each.confirmed for each in found.decisions if each.what == "latency"} == {True}
    assert len(found.repeated) == 2 and {each.attempt for each in found.results} == {2}
    assert [job.attempt for job in executor.jobs] == [1, 1, 2, 2]
    # and it is no baseline: the next night is set against the first
    store = store_of(home)
    assert set(store.accepted()) == {each.cell for each in found.results}
    assert {each.night for each in store.accepted().values()} == {store.nights()[0].night}


def test_a_build_that_fails_is_a_result_and_the_others_go_on(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(job: BuildJob, progress: Progress) -> None:
        if "rtn-int4" in job.name:
            raise InputError("planted", where="here", remedy="mend it")
        work(job, progress)

    found = run_night(home / "nightly.yaml", Here(), work=failing)
    states = {each.cell: each.state for each in found.results}
    assert Counter(states.values()) == {"failed": 1, "done": 1}
    failed = [each for each in found.results if each.state == "failed"]
    assert failed[0].error == {"code": "planted", "where": "here", "value": "", "rule": "", "remedy": "mend it"}
    assert {each.answer for each in found.decisions if each.cell == failed[0].cell} == {"failed"}


def test_a_stopped_night_says_how_to_go_on_and_nothing_is_done_twice(home: Path) -> None:
    with pytest.raises(Stopped) as caught:
        night_of(home, Here(stop_after=1))
    assert caught.value.exit == 75 and "1 of 2 cells are kept" in caught.value.value
    assert caught.value.remedy == f"quantkit nightly run {home / 'nightly.yaml'} --resume"
    with pytest.raises(InputError, match="no-such-cells"):
        night_of(home, resume=True, only="*|int9|*")
    executor = Here()
    found = night_of(home, executor, resume=True)
    (night,) = store_of(home).nights()
    assert found.night == night.night and [len(job.cells) for job in executor.jobs] == [1]
    assert len(found.results) == 2
    with pytest.raises(InputError, match="is finished") as refused:
        night_of(home, resume=True)
    assert refused.value.code == "nothing-to-resume"


def test_a_night_that_was_stopped_before_its_second_attempt_goes_on_there(home: Path) -> None:
    night_of(home)
    (home / "slower").touch()
    with pytest.raises(Stopped):
        night_of(home, Here(stop_after=3))
    executor = Here()
    found = night_of(home, executor, resume=True)
    assert [job.attempt for job in executor.jobs] == [2] and answers(found) == {"worse"}


def test_another_file_is_another_night(home: Path) -> None:
    with pytest.raises(Stopped):
        night_of(home, Here(stop_after=1))
    write(home, batches=[2])
    with pytest.raises(InputError, match="this file, in its current form, has no night"):
        night_of(home, resume=True)


def test_only_some_cells(home: Path) -> None:
    found = night_of(home, only="*|int8-weights|*|1")
    assert [NightCell.of(each.cell).recipe for each in found.results] == ["int8-weights"]
    with pytest.raises(InputError, match=re.escape("smollm2-135m|rtn-int4|cpu-x86|onnxruntime|1")):
        night_of(home, only="*|int9|*")
    assert len(store_of(home).nights()) == 1, "a night without cells began"


def test_the_repository_s_commit_is_kept(home: Path) -> None:
    night_of(home)
    settings = ["-c", "user.name=x", "-c", "user.email=x@example.com", "-c", "commit.gpgsign=false"]
    for arguments in (["init", "-q"], [*settings, "commit", "-q", "--allow-empty", "-m", "x"]):
        subprocess.run(["git", "-C", str(home), *arguments], check=True)
    night_of(home)
    head = subprocess.run(["git", "-C", str(home), "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    assert [each.commit for each in store_of(home).nights()] == [None, head.stdout.strip()]


def test_bundles_that_nothing_is_set_against_are_deleted_after_some_nights(home: Path) -> None:
    bundles = home / "nightly" / "bundles"
    old = time.time() - 10 * 86400
    for name in ("a" * 20 + "-" + "1" * 20, "b" * 20 + "-" + "2" * 20):
        (bundles / name).mkdir(parents=True)
        (bundles / name / "manifest.json").write_text("{}")
        os.utime(bundles / name, (old, old))
    for name, when in ((".making-" + "3" * 20 + ".partial", old), (".making-" + "4" * 20 + ".partial", time.time())):
        (bundles / name).mkdir()
        os.utime(bundles / name, (when, when))
    night_of(home)
    left = sorted(path.name for path in bundles.iterdir())
    assert [name[8] for name in left] == ["4", "a"], "what was accepted stays, and what is being made; the others go"
    assert KEPT >= 2


def _run(home: Path, resume: bool) -> None:
    os.environ["QUANTKIT_CACHE"] = str(home / "cache")
    run_night(home / "nightly.yaml", Local(), work=work, resume=resume)


def _started(home: Path, *, resume: bool = False) -> subprocess.Popen[bytes]:
    program = f"import sys; sys.path.insert(0, {str(Path(__file__).parents[1])!r})\n"
    program += f"from pathlib import Path; from nightly.test_run import _run\n_run(Path(sys.argv[1]), {resume})"
    return subprocess.Popen(forked.python("-c", program, str(home)))


def _committed(home: Path) -> int:
    return len(store_of(home).results()) if (home / "store" / FILE).exists() else 0


def test_killed_for_real_it_goes_on_with_what_is_missing(home: Path) -> None:
    write(home, batches=[1, 8])
    (home / "seconds").write_text("0.3")
    process = _started(home)
    while _committed(home) < 1:
        time.sleep(0.05)
    forked.kill(process)
    kept = _committed(home)
    assert kept < 4, "it ended before it could be killed"
    (home / "seconds").write_text("0")
    found = night_of(home, resume=True)
    assert len(found.results) == 4
    store = store_of(home)
    assert len(store.nights()) == 1 and len(store.results()) == 4 and not store.warnings


@pytest.mark.thorough
def test_two_at_once_share_a_night(home: Path) -> None:
    write(home, batches=[1, 8])
    with pytest.raises(Stopped):
        night_of(home, Here(stop_after=0))
    (home / "seconds").write_text("0.1")
    both = [_started(home, resume=True) for _ in range(2)]
    for process in both:
        assert process.wait() == 0
    store = store_of(home)
    assert len(store.results()) == 4 and not store.warnings
    assert {each.state for each in store.results()} == {"done"}
