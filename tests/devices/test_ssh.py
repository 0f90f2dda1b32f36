"""The link over a real sshd on the loopback address, cut wherever it may be."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from devices.conftest import Links, cells, job
from devices.loopback import Loopback, Wire
from quantkit.devices.job import Found
from quantkit.devices.probed import probe
from quantkit.devices.ssh.address import Address
from quantkit.devices.ssh.link import SSHLink
from quantkit.devices.ssh.openssh import OpenSSH
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
def test_files_and_jobs(devices: Loopback, linked: Links, tmp_path: Path, host: str) -> None:
    link = linked(host)
    content = os.urandom(1 << 20)
    sha = hashlib.sha256(content).hexdigest()
    (tmp_path / "file").write_bytes(content)
    link.put({sha: tmp_path / "file"})
    assert (tmp_path / "there" / link.lay_out("x", {"a/b": sha}) / "a/b").read_bytes() == content
    link.install()
    found = [each.cell for each in link.follow(link.start(job())) if isinstance(each, Found)]
    assert found == [f"cell {n}" for n in range(5)]


CUTS = 20


def carried(link: SSHLink, turn: int, folder: Path, cut: Callable[[], None]) -> None:
    content = os.urandom(1 << 18)
    sha, file = hashlib.sha256(content).hexdigest(), folder / f"file-{turn}"
    file.write_bytes(content)
    cut()
    link.put({sha: file})
    assert (folder / "there/store" / sha).read_bytes() == content


def installed(link: SSHLink, turn: int, folder: Path, cut: Callable[[], None]) -> None:
    shutil.rmtree(folder / "there/wheels", ignore_errors=True)
    cut()
    link.install()
    assert len(list((folder / "there/wheels").glob("[0-9a-f]*/quantkit"))) == 1


def laid_out(link: SSHLink, turn: int, folder: Path, cut: Callable[[], None]) -> None:
    if not turn:
        link.put({SHA: SMALL})
    cut()
    assert (folder / "there" / link.lay_out(f"x{turn}", {"a": SHA}) / "a").read_bytes() == SMALL.read_bytes()


def started(link: SSHLink, turn: int, folder: Path, cut: Callable[[], None]) -> None:
    if not turn:
        link.install()
    cut()
    name = link.start(job(rounds=3))
    assert cells(link, name) == [f"cell {n}" for n in range(3)]
    assert not (folder / "there/jobs" / name).exists()


def followed(link: SSHLink, turn: int, folder: Path, cut: Callable[[], None]) -> None:
    """One job, in the middle of which all the cuts are."""
    if turn:
        return
    link.install()
    name, seen = link.start(job("slow", rounds=CUTS)), []
    for each in link.follow(name):
        if isinstance(each, Found):
            seen.append(each.cell)
            cut()
    assert seen == [f"cell {n}" for n in range(CUTS)]


SMALL = Path(__file__)
SHA = hashlib.sha256(SMALL.read_bytes()).hexdigest()


@pytest.mark.slow
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

    every = (carried, installed, laid_out, started, followed)
    for phase in every:
        devices.wire(phase.__name__.replace("_", "-"))
    with ThreadPoolExecutor(len(every)) as pool:
        assert list(pool.map(run, every)) == [(CUTS, "")] * len(every)


def test_a_transfer_goes_on_where_it_was_cut(devices: Loopback, linked: Links, tmp_path: Path) -> None:
    wire, link = devices.wires["plain"], linked("plain")
    content = os.urandom(3 << 20)
    sha = hashlib.sha256(content).hexdigest()
    (tmp_path / "file").write_bytes(content)
    wire.rate = 2e6
    for seconds in (0.8, 1.6):
        threading.Timer(seconds, wire.cut).start()
    link.put({sha: tmp_path / "file"})
    assert wire.cuts
    # of each connection at most what sshd had not handed on was lost
    assert wire.carried < 1.6 * len(content)
    assert (tmp_path / "there/store" / sha).read_bytes() == content


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
    """Killed, not interrupted: the job ends when its lease does, and what it answered is there."""
    link = linked("plain")
    link.install()
    program = (
        "from pathlib import Path\nimport sys\nsys.path[:0] = sys.argv[2:]\n"
        "from devices.conftest import job\nfrom quantkit.devices.ssh.link import SSHLink\n"
        "from quantkit.devices.ssh.openssh import OpenSSH\nfrom quantkit.devices.ssh.address import Address\n"
        f"wheels = {dict(link._wheels)!r}\n"
        "link = SSHLink(OpenSSH(Address('plain'), name='plain'), sys.argv[1], wheels=wheels, lease=2)\n"
        "for each in link.follow(link.start(job('leaves', rounds=100))):\n    print(each.n, flush=True)\n"
    ).replace("PosixPath", "Path")
    paths = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]
    client = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "there"), *paths], stdout=subprocess.PIPE, text=True
    )
    assert client.stdout is not None
    assert client.stdout.readline() == "0\n"
    client.kill()
    client.wait()
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
