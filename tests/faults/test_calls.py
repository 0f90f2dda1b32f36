"""Every fault of every work: afterwards the work is done again, and leaves what it always leaves."""

import json
import os
from pathlib import Path

import forked
import pytest

from faults.calls import FAULTS
from faults.work import WORK
from quantkit.bundle import Bundle


@pytest.mark.parametrize("name", WORK)
def test_work_that_failed_is_done_again(name: str, tmp_path: Path) -> None:
    done = forked.run("-m", "faults.calls", name, tmp_path, light=True, cwd=Path(__file__).parents[1])
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {fault: wrong for fault, wrong in found.items() if wrong} == {}
    assert len(found) == len(FAULTS)


def test_faults_have_names_and_are_many() -> None:
    assert len(set(FAULTS)) >= 40


def test_two_writers_put_into_one_bundle(tmp_path: Path) -> None:
    """Each writes the same file forty times; what is left is one's, and fits its manifest."""
    WORK["put"].prepare(tmp_path)
    children = []
    for writer in (b"one", b"two"):
        child = os.fork()
        if child == 0:
            code = 0
            for _ in range(40):
                try:
                    Bundle.load(tmp_path / "out").put("report.html", writer * 1000)
                except BaseException:
                    code = 1
            os._exit(code)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
    bundle = Bundle.load(tmp_path / "out")
    assert (bundle.path / "report.html").read_bytes() in (b"one" * 1000, b"two" * 1000)
    assert [check.name for check in bundle.verify() if not check.ok] == []
