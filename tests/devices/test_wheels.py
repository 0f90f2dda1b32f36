"""What travels to be installed: quantkit's own wheel, and wheels for the device's platform and Python."""

import hashlib
import subprocess
import sys
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from devices.wheels import wheelhouse
from quantkit.devices import probed as wheels
from quantkit.devices.link import Link
from quantkit.devices.openssh import Address, OpenSSH
from quantkit.devices.probed import NEEDED, Probed, probe
from quantkit.errors import InputError

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wheelhouse(tmp_path_factory.mktemp("house"))


@pytest.fixture(scope="module")
def about() -> Probed:
    """This machine, where nothing is installed."""
    found = probe(OpenSSH(Address("here"), name="here", begin=["sh", "-c"], python=sys.executable), "~/quantkit")
    return found.model_copy(update={"packages": {}})


def test_own_wheel_is_the_package_and_always_the_same(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first, second = wheels.own_wheel(tmp_path / "a"), wheels.own_wheel(tmp_path / "b")
    assert first.read_bytes() == second.read_bytes()
    assert first.stat().st_size < 5e6
    with zipfile.ZipFile(first) as made:
        names = set(made.namelist())
    assert {"quantkit/devices/sent/work.py", "quantkit/content/export/cpu-arm.yaml"} <= names
    assert not any(name.startswith("quantkit/content/calibration") or name.endswith(".pyc") for name in names)


def test_who_needs_wheels_at_one_time_has_whole_ones(about: Probed, tmp_path: Path) -> None:
    """Devices side by side, in processes and threads of their own: nobody's file changes while it is carried."""
    have = about.model_copy(update={"packages": dict.fromkeys(NEEDED, "99")})
    stop = threading.Event()

    def again(_: int) -> set[str]:
        found = set()
        while not stop.is_set():
            for sha, path in wheels.wheels(have, wheelhouse=None, where="here").items():
                found.add(sha)
                if hashlib.sha256(path.read_bytes()).hexdigest() != sha:
                    found.add("changed")
        return found

    threading.Timer(1.5, stop.set).start()
    with ThreadPoolExecutor(3) as pool:
        assert len(set.union(*pool.map(again, range(3)))) == 1


def test_what_is_installed_there_runs_and_is_small(house: Path, about: Probed, tmp_path: Path) -> None:
    """With nothing else: no site-packages, no network."""
    shell = OpenSSH(Address("here"), name="here", begin=["sh", "-c"], python=sys.executable)
    there = tmp_path / "there"
    link = Link(shell, str(there), wheels=wheels.wheels(about, wheelhouse=house, where="here"))
    link.install()
    path = [str(each) for each in (there / "wheels").iterdir()]
    program = f"import sys; sys.path[:0] = {path!r}; import onnxruntime, pydantic, yaml, numpy; "
    program += "import quantkit.devices.there; "
    program += "assert all('site-packages' not in path for path in sys.path); print(quantkit.__file__)"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert str(there) in done.stdout
    assert sum(file.stat().st_size for file in there.rglob("*") if file.is_file()) < 150e6


def test_only_what_is_lacking_travels(about: Probed) -> None:
    asked = wheels.requirements({})
    assert [each.partition(">=")[0] for each in asked] == list(NEEDED)
    assert wheels.requirements({"numpy": "99.1", "onnxruntime": "1.0", "pyyaml": "6.0.2"}) == [
        each for each in asked if each.startswith(("onnxruntime", "pydantic"))
    ]


@pytest.mark.parametrize(
    ("changes", "first", "last"),
    [
        ({"libc": "glibc-2.36", "machine": "aarch64"}, "manylinux_2_36_aarch64", "linux_aarch64"),
        ({"libc": "glibc-2.17", "machine": "x86_64"}, "manylinux_2_17_x86_64", "linux_x86_64"),
        ({"libc": "-", "machine": "x86_64"}, "musllinux_1_2_x86_64", "linux_x86_64"),
        ({"system": "Darwin", "libc": "-", "machine": "arm64"}, "macosx_26_0_arm64", "macosx_11_0_arm64"),
    ],
)
def test_a_platform_gives_its_wheel_tags(about: Probed, changes: dict[str, Any], first: str, last: str) -> None:
    found = wheels.tags(Probed.model_validate({**about.model_dump(mode="json"), "system": "Linux", **changes}))
    assert (found[0], found[-1]) == (first, last)


def test_no_wheel_for_a_platform_is_said(house: Path, about: Probed) -> None:
    pi = about.model_copy(update={"machine": "riscv64", "libc": "glibc-2.36"})
    with pytest.raises(InputError, match=r"no-wheel.*manylinux_2_36_riscv64 and Python 3.*--wheelhouse") as met:
        wheels.wheels(pi, wheelhouse=house, where="board")
    assert met.value.where == "board"
    with pytest.raises(InputError, match="no-wheel"):
        wheels.wheels(about, wheelhouse=house.parent / "nothing", where="board")
