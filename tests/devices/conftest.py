"""Devices for tests: this machine by `sh -c`, and by a real sshd where there is one."""

import hashlib
import os
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from devices.local import Near
from devices.loopback import ABSENT, SSHD, Loopback, left
from quantkit.devices.link import Link
from quantkit.devices.openssh import Address, OpenSSH

Links = Callable[..., Link]


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
        for name in ("quantkit/__init__.py", "quantkit/runtimes/__init__.py"):
            made.writestr(name, "")
        made.write(Path(__file__).parent / "fake_there.py", "quantkit/runtimes/child.py")
        made.writestr("quantkit/tests/left_out.py", "")
    return {hashlib.sha256(wheel.read_bytes()).hexdigest(): wheel}


@pytest.fixture
def linked(fake: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Links]:
    """Make links to a workdir, whose shell is `sh -c` where no host is named; no process may stay there.

    One to this machine carries no wheels, unless it is asked for as `kind=Link`.
    """
    # this machine is many devices
    monkeypatch.setenv("QUANTKIT_LOCK", "")
    made: list[Link] = []
    workdir = tmp_path / "there"

    def link(
        host: str | None = None,
        workdir: Path = workdir,
        begin: Sequence[str] = ("sh", "-c"),
        kind: type[Link] = Near,
        **more: Any,
    ) -> Link:
        shell = OpenSSH(Address(host or "here"), name=host or "here", begin=None if host else begin)
        own = Link if host else kind
        made.append(own(shell, str(workdir), **{"wheels": fake, "lease": 20, "patience": 30.0, **more}))
        return made[-1]

    yield link
    for each in made:
        each.close()
    assert not left(workdir)


def job(manner: str = "", rounds: int = 5) -> dict[str, Any]:
    """A job for the runner in `fake_there.py`."""
    return {"manner": manner, "rounds": rounds}


def numbered(count: int) -> list[str]:
    """The cells that it answers."""
    return [f"cell {n}" for n in range(count)]
