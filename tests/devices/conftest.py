"""Devices for tests: this machine by `sh -c`, and by a real sshd where there is one."""

from __future__ import annotations

import hashlib
import os
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from devices.loopback import ABSENT, SSHD, Loopback, left
from quantkit.devices.job import Found, Job, Measure, PlacedModel, ShapeCell
from quantkit.devices.ssh.address import Address
from quantkit.devices.ssh.link import SSHLink
from quantkit.devices.ssh.openssh import OpenSSH

Links = Callable[..., SSHLink]


@pytest.fixture(scope="session")
def loopback(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loopback]:
    if SSHD is None:
        pytest.skip(ABSENT)
    found = Loopback(tmp_path_factory.mktemp("sshd"))
    found.begin()
    yield found
    found.close()


@pytest.fixture
def devices(loopback: Loopback, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Loopback:
    """Both devices, as `ssh plain` and `ssh tiny` find them."""
    monkeypatch.setenv("PATH", f"{loopback.path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    for wire in loopback.wires.values():
        wire.fresh()
    return loopback


@pytest.fixture(scope="session")
def fake(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A wheel with a runner that needs nothing."""
    wheel = tmp_path_factory.mktemp("fake") / "quantkit-0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as made:
        for name in ("quantkit/__init__.py", "quantkit/devices/__init__.py", "quantkit/devices/there/__init__.py"):
            made.writestr(name, "")
        made.write(Path(__file__).parent / "fake_there.py", "quantkit/devices/there/__main__.py")
        made.writestr("quantkit/tests/left_out.py", "")
    return {hashlib.sha256(wheel.read_bytes()).hexdigest(): wheel}


@pytest.fixture
def linked(fake: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Links]:
    """A link to a workdir, whose shell is `sh -c` where no host is named; no process may stay there."""
    # this machine is many devices
    monkeypatch.setenv("QUANTKIT_LOCK", "")
    made: list[SSHLink] = []
    workdir = tmp_path / "there"

    def link(
        host: str | None = None, workdir: Path = workdir, begin: Sequence[str] = ("sh", "-c"), **more: object
    ) -> SSHLink:
        shell = OpenSSH(Address(host or "here"), name=host or "here", begin=None if host else begin)
        wanted: dict[str, object] = {"wheels": fake, "lease": 20, "patience": 30.0, **more}
        made.append(SSHLink(shell, str(workdir), **wanted))  # type: ignore[arg-type]
        return made[-1]

    yield link
    for each in made:
        each.close()
    assert not left(workdir)


def job(manner: str = "", rounds: int = 5) -> Job:
    """A job for the runner in `fake_there.py`."""
    side = PlacedModel(place="bundles/x", subject=manner, format="int4")
    shapes = (ShapeCell(kind="decode", batch=1, size=16),)
    return Job(
        work=Measure(
            ours=side,
            theirs=side,
            runtime="onnxruntime",
            floats="onnxruntime",
            shapes=shapes,
            graphs="graphs",
            rounds=rounds,
        )
    )


def cells(link: SSHLink, name: str, after: int = 0) -> list[str]:
    """What a job has answered."""
    return [each.cell for each in link.follow(name, after) if isinstance(each, Found)]
