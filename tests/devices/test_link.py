"""The link's own logic, by `sh -c` instead of `ssh`: carrying, work, and what a device may not do."""

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
from typing import Any

import forked
import pytest
from thorough import beside

from devices.conftest import Links, job, numbered
from quantkit.devices import link as links
from quantkit.devices.answers import Cells
from quantkit.devices.link import Link, client, is_gone
from quantkit.devices.openssh import Address, OpenSSH
from quantkit.devices.probed import probe
from quantkit.errors import GateError, InputError, QuantkitError, Stopped


def files(folder: Path, **contents: bytes) -> dict[str, Path]:
    for name, data in contents.items():
        (folder / name).write_bytes(data)
    return {name: folder / name for name in contents}


def test_a_folder_is_carried_once(linked: Links, tmp_path: Path) -> None:
    link, there = linked(), tmp_path / "there"
    made = files(tmp_path, a=b"a" * 1000, b=b"", c=os.urandom(3 << 20))
    laid = {"x/a": made["a"], "x/again": made["a"], "b": made["b"], "c": made["c"]}
    place = link.carry("mine", laid)
    assert {name: (there / place / name).read_bytes() for name in laid} == {
        name: path.read_bytes() for name, path in laid.items()
    }
    # one name leads to each: a bundle's check refuses others
    assert {path.stat().st_nlink for path in (there / place).rglob("*") if path.is_file()} == {1}
    sent: list[float] = []
    assert link.carry("mine", laid, lambda share, _: sent.append(share)) == place
    assert not sent
    assert link.carry("mine", {"c": made["c"]}) != place
    assert not list(there.glob("files/.mine*"))


def test_a_broken_transfer_goes_on_where_it_was_and_what_is_damaged_is_sent_again(
    linked: Links, tmp_path: Path
) -> None:
    link, made = linked(), files(tmp_path, big=os.urandom(4 << 20))
    whole = made["big"].read_bytes()
    place = link.carry("x", made)
    folder, coming = tmp_path / "there" / place, tmp_path / "there/files" / f".{Path(place).name}"
    for begun, pieces in ((whole[: 3 << 20], 4), (b"x" * (3 << 20), 4 + 16)):
        folder.rename(coming)
        (coming / "big").unlink()
        (coming / "big.part").write_bytes(begun)
        shares: list[float] = []
        assert link.carry("x", made, lambda share, _: shares.append(share)) == place  # noqa: B023
        assert len(shares) == pieces
        assert (folder / "big").read_bytes() == whole
        assert not coming.exists()


def test_what_arrives_damaged_twice_is_refused(linked: Links, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = files(tmp_path, big=b"big")
    monkeypatch.setattr(links, "sha256", lambda path: "0" * 64)
    with pytest.raises(InputError, match="transfer-damaged"):
        linked().carry("x", made)


def test_cells_come_once_and_nothing_is_left(linked: Links, tmp_path: Path) -> None:
    link, seen, shares = linked(kind=Link), list[str](), list[str]()
    link.install()
    assert not list((tmp_path / "there").rglob("left_out.py"))
    cells = link.run(
        "measure", job("twice"), lambda _, words: shares.append(words), row=lambda _, cell: seen.append(cell)
    )
    assert seen == list(cells) == numbered(5)
    assert cells["cell 0"][0]["pid"] > 0
    assert shares[0] == "words, on here"
    assert sorted(path.name for path in (tmp_path / "there").iterdir()) == ["files", "lock", "quantkit.json", "wheels"]
    # asked again, it is measured again
    assert link.run("measure", job())["cell 0"] != cells["cell 0"]


def test_a_job_is_as_long_as_what_it_asks(linked: Links) -> None:
    # as the layers of a large model make it; Linux gives a word of a command line 128 KiB
    link = linked()
    link.install()
    assert list(link.run("measure", job("x" * (1 << 20), rounds=2))) == numbered(2)


class Running:
    """Work in a thread, until it is ended."""

    def __init__(self, link: Link, asked: dict[str, Any]) -> None:
        self.link, self.asked, self.met = link, asked, list[BaseException]()
        self._begun, self._over = threading.Event(), False
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Running:
        self._thread.start()
        assert self._begun.wait(30)
        return self

    def __exit__(self, *_: object) -> None:
        self._over = True
        self._thread.join()

    def _run(self) -> None:
        def row(cells: Cells, cell: str) -> None:
            self._begun.set()
            if self._over:
                raise GateError("over")

        with contextlib.suppress(GateError):
            self.link.run("measure", self.asked, row=row)


def test_a_device_does_one_thing_at_a_time(linked: Links) -> None:
    link = linked()
    link.install()
    with Running(link, job(rounds=400)), pytest.raises(InputError, match=r"device-busy.*has it, for: measure"):
        linked().run("tax", job())
    assert list(linked().run("tax", job())) == numbered(5)


def runner(workdir: Path) -> int:
    """The process that keeps what is under way."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        with contextlib.suppress(FileNotFoundError, ValueError, KeyError):
            return int(json.loads((workdir / "lock").read_text())["runner"])
        time.sleep(0.05)
    raise AssertionError("nothing is under way")


def test_a_command_that_was_killed_here_has_no_device(linked: Links, tmp_path: Path) -> None:
    """A device cannot tell that from a connection which broke, this machine can: the next one ends its work."""
    linked().install()
    # its connection outlives it: as one that broke does
    program = (
        "import os, sys; sys.path[:0] = sys.argv[1:3]\n"
        "from pathlib import Path\nfrom devices.conftest import job\n"
        "from quantkit.devices.openssh import Address, OpenSSH\nfrom quantkit.devices.link import Link\n"
        "shell = OpenSSH(Address('here'), name='here', begin=['sh', '-c'])\n"
        "link = Link(shell, sys.argv[3], wheels={sys.argv[4]: Path(sys.argv[5])}, lease=600)\n"
        "link.run('measure', job('slow', rounds=100))\n"
    )
    ((sha, wheel),) = linked()._wheels.items()
    root = Path(__file__).parents[1]
    words = [root, root.parent, tmp_path / "there", sha, wheel]
    other = subprocess.Popen(forked.python("-c", program, *map(str, words), light=True))
    keeper = runner(tmp_path / "there")
    os.kill(keeper, signal.SIGSTOP)  # it hears of nothing
    with pytest.raises(InputError, match="device-busy"):
        linked().run("measure", job())  # it lives
    forked.kill(other)
    threading.Timer(1.0, os.kill, (keeper, signal.SIGCONT)).start()
    assert list(linked().run("measure", job())) == numbered(5)


def test_users_and_workdirs_of_a_machine_take_turns(
    linked: Links, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link, other = linked(), linked(workdir=tmp_path / "there/other")
    link.install()
    other.install()
    monkeypatch.setenv("QUANTKIT_LOCK", str(tmp_path / "lock"))
    here = OpenSSH(Address("here"), name="here", begin=["sh", "-c"])
    with Running(link, job("slow", rounds=40)):
        assert (tmp_path / "lock").stat().st_mode & 0o777 == 0o666
        with pytest.raises(InputError, match=r"device-busy.*has it, for: measure"):
            other.run("measure", job())
        for workdir in ("there", "there/other", "elsewhere"):
            assert probe(here, str(tmp_path / workdir)).busy.endswith("has it, for: measure")
    assert list(other.run("measure", job())) == numbered(5)
    assert probe(here, str(tmp_path / "elsewhere")).busy == ""
    # one of somebody else's making keeps its mode
    (tmp_path / "lock").chmod(0o640)
    other.run("measure", job())
    assert (tmp_path / "lock").stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("name", beside(["shared"], ["there/lock", "there/files/.coming", "shared"]))
def test_what_is_no_lock_of_ours_is_neither_written_nor_waited_for(
    linked: Links, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    link, lock, precious = linked(), tmp_path / name, tmp_path / "precious"
    here = OpenSSH(Address("here"), name="here", begin=["sh", "-c"])
    link.install()
    monkeypatch.setenv("QUANTKIT_LOCK", str(tmp_path / "shared"))
    precious.write_text("kept")
    precious.chmod(0o600)
    for make in (lock.symlink_to, lock.hardlink_to, lambda _: os.mkfifo(lock), lambda _: lock.mkdir()):
        lock.unlink(missing_ok=True)
        make(precious)
        with pytest.raises(InputError, match=rf"lock-foreign.*{lock} is a link"):
            if "files" in name:
                here.call("files", {"workdir": str(tmp_path / "there"), "do": "clean"})
            else:
                link.run("measure", job())
    assert precious.read_text() == "kept" and precious.stat().st_mode & 0o777 == 0o600
    lock.rmdir()
    assert list(link.run("measure", job())) == numbered(5)


def test_what_does_not_end_keeps_no_lock_for_ever() -> None:
    """In a process of its own: it waits for its children."""
    program = (
        "import subprocess, time\nfrom quantkit.devices.sent import work as works\n"
        "work = subprocess.Popen(['sleep', '600'])\nassert works._children() == [work.pid]\n"
        "there, works._GRACE, works._children = works._children, 0.3, list\nbegan = time.monotonic()\nworks._reap()\n"
        "assert time.monotonic() - began < 5\nworks._children = there\nworks._reap()\nassert not there()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("how", beside([signal.SIGKILL], [signal.SIGTERM, signal.SIGKILL]))
def test_a_machine_that_starts_again_goes_on(linked: Links, tmp_path: Path, how: signal.Signals) -> None:
    """Asked to end as by a shutdown, and off at once: what has come is not done again."""
    link, seen = linked(), list[str]()
    link.install()

    def row(cells: Cells, cell: str) -> None:
        seen.append(cell)
        if len(seen) == 5:
            os.kill(runner(tmp_path / "there"), how)

    cells = link.run("measure", job(rounds=30), row=row)
    assert list(cells) == seen == numbered(30)
    assert len({rows[0]["pid"] for rows in cells.values()}) == 2


def test_who_stops_listening_ends_the_work(linked: Links, tmp_path: Path) -> None:
    """Whatever is refused of an answer; and Ctrl-C, which waits for no network."""
    link = linked(begin=network(tmp_path), lease=2)
    link.install()

    def refuse(cells: Cells, cell: str) -> None:
        raise GateError("planted")

    def interrupt(cells: Cells, cell: str) -> None:
        (tmp_path / "down").touch()
        raise KeyboardInterrupt

    with pytest.raises(GateError, match="planted"):
        link.run("measure", job("leaves", rounds=100), row=refuse)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        link.run("measure", job(rounds=100), row=interrupt)
    assert time.monotonic() - began < 15
    (tmp_path / "down").unlink()
    assert list(link.run("measure", job())) == numbered(5)


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
    link = linked(kind=Link, begin=network(tmp_path))
    (tmp_path / "down").touch()
    with pytest.raises(InputError, match=r"device-unreachable.*Connection refused"):
        link.install()  # it was never there
    (tmp_path / "down").unlink()
    link.install()
    (tmp_path / "down").touch()
    threading.Timer(1.0, (tmp_path / "down").unlink).start()
    assert list(link.run("measure", job())) == numbered(5)


def test_what_work_started_ends_with_it(linked: Links) -> None:
    link = linked()
    link.install()
    assert list(link.run("measure", job("leaves", rounds=2))) == numbered(2)


@pytest.mark.parametrize(
    ("manner", "says"),
    [
        ("dies", r"job-died.*exit code 9.*Segmentation fault"),
        ("nonsense", "answer-invalid"),
        pytest.param("long-line", "answer-invalid", marks=pytest.mark.thorough),
        pytest.param("nan", "answer-invalid", marks=pytest.mark.thorough),
    ],
)
def test_what_is_no_answer_is_refused_and_its_work_ends(linked: Links, manner: str, says: str) -> None:
    link = linked()
    link.install()
    with pytest.raises(InputError, match=says) as met:
        link.run("measure", job(manner, rounds=100))
    assert "\x1b" not in met.value.line()


@pytest.mark.parametrize(
    "line",
    [
        b"at nan x",
        b"at x y",
        b"at",
        b"row",
        b"row []",
        b'row {"cell": "a"}',
        b'row {"cell": "a", "rows": [1]}',
        b'row {"cell": 1, "rows": []}',
        b'row {"cell": "a", "rows": [{"x": 1e999}]}',
        b'note {"x": 1}',
        b"note " + b"[" * 100_000,
        b'error {"code": "A B"}',
        b'error {"code": "x", "exit": 0}',
        b"error 1",
        b'{"why"',
        b"else 1",
        b"\xff\xfe",
    ],
)
def test_lines_that_are_none(linked: Links, line: bytes) -> None:
    link, cells = linked(), Cells("here")
    with pytest.raises(InputError, match="answer-invalid"):
        link._take(line, cells, lambda share, words: None, lambda cells, cell: None, lambda note: None)
    assert not cells


def test_what_a_device_met_is_said_by_it(linked: Links) -> None:
    link = linked()
    link.install()
    with pytest.raises(Stopped, match=r"\[planted\] here says: timing"):
        link.run("measure", job("fails"))


def test_a_folder_of_something_else_is_left_alone(linked: Links, tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.mkdir()
    (there / "photos").write_text("mine")
    with pytest.raises(InputError, match="workdir-foreign"):
        linked().carry("x", files(tmp_path, a=b"a"))
    assert [path.name for path in there.iterdir()] == ["photos"]
    (there / "quantkit.json").write_text('{"layout": 99}')
    with pytest.raises(InputError, match=r"workdir-version.*layout 99"):
        linked().carry("x", files(tmp_path, a=b"a"))


def test_a_full_disk_is_said_before_anything_is_carried(
    linked: Links, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = linked(kind=Link)
    full = {"whole": False, "there": {}, "free": 1000, "wheels": []}
    monkeypatch.setattr(link, "_have", lambda *_: links._Have.model_validate(full))
    with pytest.raises(InputError, match="device-full"):
        link.carry("x", files(tmp_path, a=b"a"))
    with pytest.raises(InputError, match="device-full"):
        link.install()


def test_threads_that_carry_the_same_folder_do_not_disturb_each_other(linked: Links, tmp_path: Path) -> None:
    made, met = files(tmp_path, big=os.urandom(8 << 20)), list[QuantkitError]()

    def carry(link: Link) -> None:
        try:
            link.carry("x", made)
        except QuantkitError as problem:
            met.append(problem)

    threads = [threading.Thread(target=carry, args=(linked(),)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not met
    ((folder),) = (tmp_path / "there/files").glob("x-*")
    assert hashlib.sha256((folder / "big").read_bytes()).digest() == hashlib.sha256(made["big"].read_bytes()).digest()


def test_who_lives_is_not_gone_and_who_ended_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert not is_gone(client())
    program = "from quantkit.devices.link import client; print(client())"
    ended = forked.run("-c", program, light=True, check=True).stdout.strip()
    assert is_gone(ended)
    # its number is another process's by now
    kernel, _, began = ended.rsplit(":", 2)
    assert is_gone(f"{kernel}:{os.getpid()}:{began}")
    # of what is not certain nobody is gone, and what a device says names no file
    for said in ("", None, {}, "x", "a:b:1:2", f"{client().split(':')[0]}:1:1:1", "../..:1:1:1"):
        assert not is_gone(said)
    for number in ("-1", "x", "1/../2", "9" * 400):
        assert is_gone(f"{kernel}:{number}:{began}") in (True, False)
    # where the system does not tell, nobody ever is
    known = client()
    monkeypatch.setattr(links, "_PROC", tmp_path)
    assert (client(), is_gone(known)) == ("", False)
