"""The link's own logic, by `sh -c` instead of `ssh`: carrying, laying out, jobs; what a device may not do."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from devices.conftest import Links, cells, job
from quantkit.devices.collect import CollectedCells
from quantkit.devices.job import Done, Found
from quantkit.devices.probed import probe
from quantkit.devices.ssh.address import Address
from quantkit.devices.ssh.link import SSHLink
from quantkit.devices.ssh.openssh import OpenSSH
from quantkit.errors import GateError, InputError, QuantkitError, Stopped
from quantkit.pipeline.progress import Progress


def content(folder: Path, **files: bytes) -> dict[str, Path]:
    found = {}
    for name, data in files.items():
        (folder / name).write_bytes(data)
        found[hashlib.sha256(data).hexdigest()] = folder / name
    return found


def test_files_are_carried_once_and_laid_out(linked: Links, tmp_path: Path) -> None:
    link, there = linked(), tmp_path / "there"
    files = content(tmp_path, a=b"a" * 1000, b=b"", c=os.urandom(3 << 20))
    link.put(files)
    for sha in files:
        assert hashlib.sha256((there / "store" / sha).read_bytes()).hexdigest() == sha
    a, b, c = files
    place = link.lay_out("mine", {"x/a": a, "x/again": a, "b": b, "c": c})
    folder = there / place
    assert (folder / "x/a").read_bytes() == (folder / "x/again").read_bytes() == b"a" * 1000
    # each is there once, and one name leads to it: a bundle's check refuses others
    assert {path.stat().st_nlink for path in folder.rglob("*") if path.is_file()} == {1}
    assert not (there / "store" / c).exists()
    sent: list[float] = []
    link.put(files, lambda share, _: sent.append(share))
    assert not sent
    other = link.lay_out("mine", {"c": c})
    assert other != place
    assert (there / other / "c").read_bytes() == files[c].read_bytes()
    assert link.lay_out("mine", {"c": c}) == other


def test_a_broken_transfer_goes_on_where_it_was(linked: Links, tmp_path: Path) -> None:
    link = linked()
    files = content(tmp_path, big=os.urandom(4 << 20))
    (sha,) = files
    link.put({})  # makes the folder
    link.put(content(tmp_path, small=b"s"))
    part = tmp_path / "there/store" / f"{sha}.part"
    part.write_bytes(files[sha].read_bytes()[: 3 << 20])
    shares: list[float] = []
    link.put(files, lambda share, _: shares.append(share))
    assert len(shares) == (1 << 20) / (1 << 18)
    assert not part.exists()


def test_what_arrives_damaged_is_sent_again(linked: Links, tmp_path: Path) -> None:
    link = linked()
    files = content(tmp_path, big=os.urandom(1 << 20))
    (sha,) = files
    link.put(content(tmp_path, small=b"s"))
    (tmp_path / "there/store" / f"{sha}.part").write_bytes(b"x" * 1000)
    link.put(files)
    assert (tmp_path / "there/store" / sha).read_bytes() == files[sha].read_bytes()
    with pytest.raises(InputError, match="transfer-damaged"):
        link.put({"0" * 64: files[sha]})


def test_a_job_answers_and_is_forgotten(linked: Links, tmp_path: Path) -> None:
    link = linked()
    link.install()
    assert not list((tmp_path / "there").rglob("left_out.py"))
    name = link.start(job())
    answers = list(link.follow(name))
    assert [each.n for each in answers] == list(range(6))
    assert isinstance(answers[-1], Done)
    assert not (tmp_path / "there/jobs" / name).exists()
    # asked again, it is measured again
    assert link.start(job()) == name
    assert len(cells(link, name)) == 5


def test_a_job_is_taken_up_and_not_doubled(linked: Links) -> None:
    link = linked()
    link.install()
    name = link.start(job(rounds=20))
    assert linked().start(job(rounds=20)) == name
    seen = link.follow(name)
    first = [next(seen) for _ in range(3)]
    rest = cells(linked(), linked().start(job(rounds=20)), 3)
    assert [each.cell for each in first if isinstance(each, Found)] + rest == [f"cell {n}" for n in range(20)]


def test_a_job_is_as_long_as_what_it_asks(linked: Links) -> None:
    # as the layers of a large model make it; Linux gives a word of a command line 128 KiB
    asked = job("x" * (1 << 20), rounds=2)
    link = linked()
    link.install()
    assert cells(link, link.start(asked)) == ["cell 0", "cell 1"]


def test_a_device_does_one_job_at_a_time(linked: Links) -> None:
    link = linked()
    link.install()
    link.start(job(rounds=40))
    with pytest.raises(InputError, match=r"device-busy.*has it, for: measure"):
        linked().start(job(rounds=41))
    link.cancel(link.start(job(rounds=40)))
    linked().cancel(linked().start(job(rounds=41)))


def test_a_command_that_was_killed_here_has_no_device(linked: Links, tmp_path: Path) -> None:
    """A device cannot tell that from a connection which broke, this machine can: the next one ends its job."""
    linked().install()
    program = (
        "import sys; sys.path[:0] = sys.argv[1:3]\n"
        "from pathlib import Path\nfrom devices.conftest import job\n"
        "from quantkit.devices.ssh.address import Address\nfrom quantkit.devices.ssh.link import SSHLink\n"
        "from quantkit.devices.ssh.openssh import OpenSSH\n"
        "shell = OpenSSH(Address('here'), name='here', begin=['sh', '-c'])\n"
        "link = SSHLink(shell, sys.argv[3], wheels={sys.argv[4]: Path(sys.argv[5])}, lease=600)\n"
        "list(link.follow(link.start(job('slow', rounds=100))))\n"
    )
    ((sha, wheel),) = linked()._wheels.items()
    root = Path(__file__).parents[1]
    words = [root, root.parent, tmp_path / "there", sha, wheel]
    other = subprocess.Popen([sys.executable, "-c", program, *map(str, words)])
    keeper(tmp_path / "there")
    held = json.loads((tmp_path / "there/lock").read_text())
    with pytest.raises(InputError, match="device-busy"):
        linked().start(job())  # it lives
    other.kill()
    other.wait()
    link = linked()
    assert len(cells(link, link.start(job()))) == 5
    # what it had answered is kept, and goes on
    assert (tmp_path / "there/jobs" / held["job"] / "rows.jsonl").read_bytes().count(b"\n") > 0


def test_users_and_workdirs_of_a_machine_take_turns(
    linked: Links, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link, other = linked(), linked(workdir=tmp_path / "there/other")
    link.install()
    other.install()
    monkeypatch.setenv("QUANTKIT_LOCK", str(tmp_path / "lock"))
    name = link.start(job("slow", rounds=40))
    assert (tmp_path / "lock").stat().st_mode & 0o777 == 0o666
    with pytest.raises(InputError, match=r"device-busy.*has it, for: measure"):
        other.start(job())
    here = OpenSSH(Address("here"), name="here", begin=["sh", "-c"])
    for workdir in ("there", "there/other", "elsewhere"):
        assert probe(here, str(tmp_path / workdir)).busy.endswith("has it, for: measure")
    link.cancel(name)
    assert probe(here, str(tmp_path / "elsewhere")).busy == ""
    assert len(cells(other, other.start(job()))) == 5
    # one of somebody else's making keeps its mode
    (tmp_path / "lock").chmod(0o640)
    other.cancel(other.start(job()))
    assert (tmp_path / "lock").stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("name", ["there/lock", "there/store/coming", "there/store/laying", "shared"])
def test_what_is_no_lock_of_ours_is_neither_written_nor_waited_for(
    linked: Links, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    link, lock, precious = linked(), tmp_path / name, tmp_path / "precious"
    here, cleaning = (
        OpenSSH(Address("here"), name="here", begin=["sh", "-c"]),
        {"workdir": str(tmp_path / "there"), "do": "clean"},
    )
    link.install()
    monkeypatch.setenv("QUANTKIT_LOCK", str(tmp_path / "shared"))
    precious.write_text("kept")
    precious.chmod(0o600)
    for make in (lock.symlink_to, lock.hardlink_to, lambda _: os.mkfifo(lock), lambda _: lock.mkdir()):
        lock.unlink(missing_ok=True)
        make(precious)
        with pytest.raises(InputError, match=rf"lock-foreign.*{lock} is a link"):
            link.start(job()) if "store" not in name else here.call("store", cleaning)
    assert precious.read_text() == "kept" and precious.stat().st_mode & 0o777 == 0o600
    lock.rmdir()
    assert len(cells(link, link.start(job()))) == 5


def test_what_does_not_end_keeps_no_lock_for_ever() -> None:
    """In a process of its own: it waits for its children."""
    program = (
        "import subprocess, time\nfrom quantkit.devices.sent import jobs\n"
        "work = subprocess.Popen(['sleep', '600'])\nassert jobs._children() == [work.pid]\n"
        "there, jobs._GRACE, jobs._children = jobs._children, 0.3, list\nbegan = time.monotonic()\njobs._reap()\n"
        "assert time.monotonic() - began < 5\njobs._children = there\njobs._reap()\nassert not there()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_who_stops_listening_ends_the_work(linked: Links, tmp_path: Path) -> None:
    link = linked()
    link.install()
    name = link.start(job("leaves", rounds=100))
    answers = link.follow(name)
    assert next(answers).n == 0
    answers.close()  # type: ignore[attr-defined]
    assert json.loads((tmp_path / "there/jobs" / name / "ended").read_text())["why"] == "cancelled"


def test_a_job_that_nobody_listens_to_ends_and_goes_on(linked: Links, tmp_path: Path) -> None:
    link = linked(lease=1)
    link.install()
    name = link.start(job(rounds=60))
    ended = tmp_path / "there/jobs" / name / "ended"
    until = time.monotonic() + 20
    while not ended.exists() and time.monotonic() < until:
        time.sleep(0.1)
    assert json.loads(ended.read_text())["why"] == "left"
    again = linked()
    found = [each for each in again.follow(again.start(job(rounds=60))) if isinstance(each, Found)]
    assert [each.cell for each in found] == [f"cell {n}" for n in range(60)]
    assert len({each.rows[0]["pid"] for each in found}) == 2


def keeper(workdir: Path) -> int:
    """Of the job that is under way."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        with contextlib.suppress(FileNotFoundError, ValueError, KeyError):
            return int(json.loads((workdir / "lock").read_text())["keeper"])
        time.sleep(0.05)
    raise AssertionError("no job is under way")


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_machine_that_starts_again_goes_on(linked: Links, tmp_path: Path, how: signal.Signals) -> None:
    """Asked to end as by a shutdown, and off at once: nobody has cancelled it."""
    link, seen = linked(), []
    link.install()
    name = link.start(job(rounds=30))
    for each in link.follow(name):
        assert isinstance(each, Found | Done)
        if isinstance(each, Found):
            seen.append(each)
            if len(seen) == 5:
                os.kill(keeper(tmp_path / "there"), how)
    assert [each.cell for each in seen] == [f"cell {n}" for n in range(30)]
    assert len({each.rows[0]["pid"] for each in seen}) == 2


def test_what_never_reached_the_disk_is_answered_again(linked: Links) -> None:
    """Progress that was told and is gone with the machine, and a line it wrote a part of: no cell is passed over."""
    link = linked()
    link.install()
    assert cells(link, link.start(job("cut-off", rounds=6))) == [f"cell {n}" for n in range(6)]


def test_a_job_that_failed_is_taken_up_without_its_error(linked: Links, tmp_path: Path) -> None:
    link = linked()
    link.install()
    name = link.start(job("fails"))
    ended = tmp_path / "there/jobs" / name / "ended"
    until = time.monotonic() + 20
    while not ended.exists() and time.monotonic() < until:
        time.sleep(0.05)
    with (ended.parent / "rows.jsonl").open("a") as rows:
        rows.write('{"n": 3, "kind": "r')
    assert cells(linked(), linked().start(job("fails"))) == [f"cell {n}" for n in range(5)]


def test_a_job_that_somebody_else_ends_says_so(linked: Links) -> None:
    link = linked()
    link.install()
    answers = link.follow(link.start(job(rounds=100)))
    next(answers)
    other = linked()
    other.cancel(other.start(job(rounds=100)))
    with pytest.raises(InputError, match="job-cancelled"):
        list(answers)


def network(folder: Path) -> list[str]:
    """A shell that has a network unless there is a file `down`, with what OpenSSH says without one."""
    program = folder / "network"
    program.write_text(
        f'#!/bin/sh\n[ -e {folder}/down ] || exec sh -c "$1"\n'
        "echo 'ssh: connect to host pi5 port 22: Connection refused' >&2\nexit 255\n"
    )
    program.chmod(0o755)
    return [str(program)]


def test_a_device_that_starts_again_is_waited_for(linked: Links, tmp_path: Path) -> None:
    begin = network(tmp_path)
    link = linked(begin=begin)
    (tmp_path / "down").touch()
    with pytest.raises(InputError, match=r"device-unreachable.*Connection refused"):
        link.install()  # it was never there
    (tmp_path / "down").unlink()
    link.install()
    (tmp_path / "down").touch()
    threading.Timer(1.0, (tmp_path / "down").unlink).start()
    assert len(cells(link, link.start(job()))) == 5


def test_what_a_job_started_ends_with_it(linked: Links) -> None:
    link = linked()
    link.install()
    assert len(cells(link, link.start(job("leaves", rounds=2)))) == 2


def test_a_job_that_dies_says_why_and_keeps_its_answers(linked: Links) -> None:
    link = linked()
    link.install()
    with pytest.raises(InputError, match=r"job-died.*exit code 9.*Segmentation fault"):
        cells(link, link.start(job("dies")))


def why(workdir: Path) -> str:
    """The only job there has ended."""
    (ended,) = workdir.glob("jobs/*/ended")
    return str(json.loads(ended.read_text())["why"])


@pytest.mark.parametrize("manner", ["long-line", "nonsense"])
def test_hostile_answers_are_refused_and_their_work_ends(linked: Links, tmp_path: Path, manner: str) -> None:
    link = linked()
    link.install()
    with pytest.raises(InputError, match=r"answer-invalid|line-too-long") as met:
        cells(link, link.start(job(manner, rounds=100)))
    assert "\x1b" not in met.value.line()
    assert why(tmp_path / "there") == "cancelled"


def test_what_is_refused_of_an_answer_ends_its_work(linked: Links, tmp_path: Path) -> None:
    link = linked()
    link.install()

    def refuse(answers: CollectedCells, cell: str) -> None:
        raise GateError("planted")

    with pytest.raises(GateError, match="planted"):
        CollectedCells.of(link, job(rounds=100), Progress(), "speed", refuse)
    assert why(tmp_path / "there") == "cancelled"


def test_ctrl_c_does_not_wait_for_a_network(linked: Links, tmp_path: Path) -> None:
    link = linked(begin=network(tmp_path), lease=2)
    link.install()

    def interrupt(answers: CollectedCells, cell: str) -> None:
        (tmp_path / "down").touch()
        raise KeyboardInterrupt

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        CollectedCells.of(link, job(rounds=100), Progress(), "speed", interrupt)
    assert time.monotonic() - began < 15
    (tmp_path / "down").unlink()


def test_what_a_device_met_is_said_by_it(linked: Links) -> None:
    link = linked()
    link.install()
    with pytest.raises(Stopped, match=r"\[planted\] here says: timing"):
        CollectedCells.of(link, job("fails"), Progress(), "speed")


def test_a_folder_of_something_else_is_left_alone(linked: Links, tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.mkdir()
    (there / "photos").write_text("mine")
    with pytest.raises(InputError, match="workdir-foreign"):
        linked().put(content(tmp_path, a=b"a"))
    assert [path.name for path in there.iterdir()] == ["photos"]
    (there / "quantkit.json").write_text('{"layout": 99}')
    with pytest.raises(InputError, match=r"workdir-version.*layout 99"):
        linked().put(content(tmp_path, a=b"a"))


def test_a_full_disk_is_said_before_anything_is_carried(
    linked: Links, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = linked()
    monkeypatch.setattr(link, "_missing", lambda sizes: (dict.fromkeys(sizes, 0), 1000))
    with pytest.raises(InputError, match="device-full"):
        link.put(content(tmp_path, a=b"a"))
    with pytest.raises(InputError, match="device-full"):
        link.install()


def test_threads_that_put_the_same_file_do_not_disturb_each_other(linked: Links, tmp_path: Path) -> None:
    files = content(tmp_path, big=os.urandom(8 << 20))
    (sha,) = files
    linked().put(content(tmp_path, small=b"s"))
    met: list[QuantkitError] = []

    def put(link: SSHLink) -> None:
        try:
            link.put(files)
        except QuantkitError as problem:
            met.append(problem)

    threads = [threading.Thread(target=put, args=(linked(),)) for _ in range(3)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not met
    assert hashlib.sha256((tmp_path / "there/store" / sha).read_bytes()).hexdigest() == sha
