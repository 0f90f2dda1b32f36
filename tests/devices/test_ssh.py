"""The link over a real sshd on the loopback address, cut wherever it may be."""

import os
import random
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import forked
import pytest

from devices.conftest import Links, job, numbered
from devices.loopback import Loopback, Wire
from quantkit.devices.answers import Cells
from quantkit.devices.link import Link
from quantkit.devices.openssh import Address, OpenSSH
from quantkit.devices.probed import probe
from quantkit.errors import InputError


def test_a_device_says_what_it_is(devices: Loopback, tmp_path: Path) -> None:
    for name, cores in (("plain", len(os.sched_getaffinity(0))), ("tiny", 1)):
        with OpenSSH(Address(name), name=name) as shell:
            about = probe(shell, str(tmp_path / "there"))
        about.demand(name)
        assert about.cores == cores
        assert (about.memory == 1 << 30) == (name == "tiny")
        assert abs(about.off) < 60
        assert about.system == os.uname().sysname


def test_one_connection_is_shared(devices: Loopback, tmp_path: Path) -> None:
    log = devices.folder / "log-plain"
    before = log.read_text().count("Accepted publickey")
    with OpenSSH(Address("plain"), name="plain") as shell:
        for _ in range(3):
            probe(shell, str(tmp_path))
    assert log.read_text().count("Accepted publickey") - before == 1


@pytest.mark.parametrize("host", ["plain", "tiny"])
def test_files_are_carried_and_a_job_runs_there(devices: Loopback, linked: Links, tmp_path: Path, host: str) -> None:
    link, content = linked(host), os.urandom(1 << 20)
    (tmp_path / "file").write_bytes(content)
    assert (tmp_path / "there" / link.carry("x", {"a/b": tmp_path / "file"}) / "a/b").read_bytes() == content
    link.install()
    assert list(link.run("measure", job())) == numbered(5)


CUTS = 20


def carried(link: Link, turn: int, folder: Path, cut: Callable[[], None]) -> None:
    content, file = os.urandom(1 << 18), folder / f"file-{turn}"
    file.write_bytes(content)
    cut()
    assert (folder / "there" / link.carry("x", {"a": file}) / "a").read_bytes() == content


def installed(link: Link, turn: int, folder: Path, cut: Callable[[], None]) -> None:
    shutil.rmtree(folder / "there/wheels", ignore_errors=True)
    cut()
    link.install()
    assert len(list((folder / "there/wheels").glob("[0-9a-f]*/quantkit"))) == 1


def ran(link: Link, turn: int, folder: Path, cut: Callable[[], None]) -> None:
    if not turn:
        link.install()
    cut()
    assert list(link.run("measure", job(rounds=3))) == numbered(3)


def heard(link: Link, turn: int, folder: Path, cut: Callable[[], None]) -> None:
    """One work, in the middle of which all the cuts are."""
    if turn:
        return
    link.install()
    seen: list[str] = []

    def row(cells: Cells, cell: str) -> None:
        seen.append(cell)
        cut()

    link.run("measure", job("slow", rounds=CUTS), row=row)
    assert seen == numbered(CUTS)


def test_cut_20_times_in_each_phase_every_answer_comes_once(devices: Loopback, linked: Links, tmp_path: Path) -> None:
    """All phases side by side, each by a wire of its own; that no process is left there, `linked` looks."""

    def run(phase: Callable[..., None]) -> tuple[int, str]:
        name, cuts = phase.__name__.replace("_", "-"), []
        wire, chances = devices.wires[name], random.Random(name)
        folder = tmp_path / name
        folder.mkdir()
        link = linked(name, workdir=folder / "there")

        def cut() -> None:
            cuts.append(threading.Timer(chances.uniform(0, 0.3), wire.cut))
            cuts[-1].start()

        try:
            for turn in range(CUTS):
                phase(link, turn, folder, cut)
        except Exception as problem:
            return wire.cuts, repr(problem)
        for each in cuts:
            each.join()
        return wire.cuts, ""

    every = (carried, installed, ran, heard)
    for phase in every:
        devices.wire(phase.__name__.replace("_", "-"))
    with ThreadPoolExecutor(len(every)) as pool:
        assert list(pool.map(run, every)) == [(CUTS, "")] * len(every)


def test_a_transfer_goes_on_where_it_was_cut(devices: Loopback, linked: Links, tmp_path: Path) -> None:
    wire, link = devices.wires["plain"], linked("plain")
    content = os.urandom(3 << 20)
    (tmp_path / "file").write_bytes(content)
    wire.rate = 2e6
    for seconds in (0.8, 1.6):
        threading.Timer(seconds, wire.cut).start()
    place = link.carry("x", {"a": tmp_path / "file"})
    assert wire.cuts
    # of each connection at most what sshd had not handed on was lost
    assert wire.carried < 1.6 * len(content)
    assert (tmp_path / "there" / place / "a").read_bytes() == content


def test_a_wire_is_late_and_not_slow() -> None:
    """Each byte is on its way for so long, however many are: of 256 pieces one after the other it would be a minute."""
    with socket.create_server(("127.0.0.1", 0)) as behind:
        wire = Wire(behind.getsockname()[1])
        wire.delay = 0.25
        content, came = os.urandom(1 << 22), b""
        began = time.monotonic()
        with socket.create_connection(("127.0.0.1", wire.port)) as here, behind.accept()[0] as there:
            sender = threading.Thread(target=here.sendall, args=(content,))
            sender.start()
            while len(came) < len(content) and (part := there.recv(1 << 20)):
                came += part
            took = time.monotonic() - began
            there.sendall(b"!")
            assert here.recv(1) == b"!"
            back = time.monotonic() - began - took
            sender.join()
        wire.close()
    assert came == content
    assert took >= wire.delay <= back
    assert took < 256 * wire.delay / 2


def test_a_client_that_is_killed_leaves_nothing(devices: Loopback, linked: Links, tmp_path: Path) -> None:
    """Killed, not interrupted: the work ends, at the latest when its lease does."""
    link = linked("plain")
    link.install()
    program = (
        "from pathlib import Path\nimport sys\nsys.path[:0] = sys.argv[2:]\n"
        "from devices.conftest import job\nfrom quantkit.devices.link import Link\n"
        "from quantkit.devices.openssh import Address, OpenSSH\n"
        f"wheels = {dict(link._wheels)!r}\n"
        "link = Link(OpenSSH(Address('plain'), name='plain'), sys.argv[1], wheels=wheels, lease=2)\n"
        "link.run('measure', job('leaves', rounds=100), row=lambda cells, cell: print(cell, flush=True))\n"
    ).replace("PosixPath", "Path")
    paths = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]
    client = subprocess.Popen(
        forked.python("-c", program, str(tmp_path / "there"), *paths, light=True), stdout=subprocess.PIPE, text=True
    )
    assert client.stdout is not None
    assert client.stdout.readline() == "cell 0\n"
    forked.kill(client)
    client.stdout.close()
    time.sleep(4)


def test_what_keeps_one_out_is_said(devices: Loopback, tmp_path: Path) -> None:
    folder, real = devices.folder, shutil.which("ssh", path=os.environ["PATH"].partition(os.pathsep)[2])
    assert real is not None
    config = (folder / "config").read_text()
    (tmp_path / "known").write_text(f"plain {' '.join((folder / 'other.pub').read_text().split()[:2])}\n")
    for code, text in {
        "key-refused": config.replace(f"{folder}/key", f"{folder}/other"),
        "host-key-changed": config.replace(f"{folder}/known", f"{tmp_path}/known"),
        "host-key-unknown": config.replace(f"{folder}/known", f"{tmp_path}/nothing"),
        "device-unreachable": f"Host plain\n  Port 1\n{config}",
        "no-such-host": f"Host plain\n  HostName nothing.invalid\n{config}",
        "ssh-config-invalid": f"Nonsense yes\n{config}",
    }.items():
        (tmp_path / "config").write_text(text)
        begin = [real, "-F", str(tmp_path / "config"), "-oBatchMode=yes", "plain"]
        with pytest.raises(InputError) as met:
            probe(OpenSSH(Address("plain"), name="box", begin=begin), "~/quantkit")
        assert met.value.code == code, met.value.line()
        assert met.value.remedy
        assert len(met.value.line()) < 500
