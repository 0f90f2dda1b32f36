"""Addresses, the user's devices, and what a device says of itself."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from quantkit import machine
from quantkit.devices import named
from quantkit.devices.named import NamedDevice
from quantkit.devices.openssh import Address, OpenSSH, as_workdir, source
from quantkit.devices.probed import NEEDED, Probed, probe
from quantkit.errors import InputError


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ssh://pi5", ["--", "pi5"]),
        ("ssh://pi@raspberrypi.local", ["-l", "pi", "--", "raspberrypi.local"]),
        ("ssh://pi@10.0.0.7:2222/", ["-l", "pi", "-p", "2222", "--", "10.0.0.7"]),
        ("ssh://[fe80::1%eth0]:22", ["-p", "22", "--", "fe80::1%eth0"]),
    ],
)
def test_an_address_is_read_and_printed_back(text: str, words: list[str]) -> None:
    found = Address.read(text)
    assert found.words() == words
    assert Address.read(str(found)) == found


@pytest.mark.parametrize(
    "text",
    [
        *("pi5", "http://pi5", "ssh://", "ssh://pi:secret@host", "ssh://host:99999", "ssh://host:x", "ssh://host/home"),
        *(
            "ssh://-oProxyCommand=reboot",
            "ssh://-l@host",
            "ssh://a b",
            "ssh://host;reboot",
            "ssh://$(reboot)",
            "ssh://h\n",
        ),
    ],
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="address-invalid") as met:
        Address.read(text)
    assert "secret" not in met.value.line()


@pytest.mark.parametrize("text", ["~/quantkit", "/data/my models/q", "~/a/b"])
def test_a_valid_workdir_is_kept(text: str) -> None:
    assert as_workdir(text) == text


@pytest.mark.parametrize("text", ["", "/", "~", "quantkit", "~/../etc", "/a/./b", "/a\n", "~pi/x", "/a;b", "/a/$HOME"])
def test_what_is_no_workdir_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="workdir-invalid"):
        as_workdir(text)


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return tmp_path / "quantkit/devices"


def test_a_device_is_kept_and_found(settings: Path) -> None:
    device = NamedDevice(name="pi5", address="ssh://pi@raspberrypi.local", workdir="~/q")
    assert device.save() == settings / "pi5.yaml"
    assert named.find("pi5") == device
    assert named.names() == ["pi5"]
    with pytest.raises(InputError, match=r"unknown-device.*did you mean 'pi5'"):
        named.find("pi4")
    assert named.find("ssh://pi@Raspberrypi.local:22").name.startswith("pi-raspberrypi-local-22-")
    device.remove()
    assert named.names() == []


def test_devices_without_a_name_are_told_apart(settings: Path) -> None:
    """Rows of one must not take the place of another's; case of a host's name is none of its own."""
    texts = (
        "pi5",
        "pi@pi5",
        "pi@pi5:22",
        "pi5:22",
        "p-i@5",
        "pi@a.b",
        "pi@a-b",
        "Pi@pi5",
        "[::1]",
        "[::]",
        "pi@" + "x" * 60,
    )
    found = {named.find(f"ssh://{text}").name for text in (*texts, "pi@" + "x" * 61)}
    assert len(found) == len(texts) + 1
    assert "pi5" not in found
    assert named.find("ssh://PI5").name == named.find("ssh://pi5/").name


@pytest.mark.parametrize(
    "text", ["[]", "name: x", "name: pi5\naddress: ssh://pi:pw@h", "name: pi5\naddress: ssh://h\npw: 1"]
)
def test_a_damaged_device_is_one_line(settings: Path, text: str) -> None:
    settings.mkdir(parents=True)
    (settings / "pi5.yaml").write_text(text)
    with pytest.raises(InputError, match=r"device-invalid|address-invalid|yaml-invalid"):
        named.find("pi5")


def here() -> OpenSSH:
    return OpenSSH(Address("here"), name="here", begin=["sh", "-c"])


def test_this_machine_says_what_it_is(tmp_path: Path) -> None:
    found = probe(here(), str(tmp_path / "not/yet"))
    found.demand("here")
    assert (found.processor, found.isa, found.cores) == (machine.cpu_name(), machine.isa_features(), machine.cores())
    assert abs(found.off) < 60
    assert found.disk_free > 0
    assert not (tmp_path / "not").exists()


def test_what_is_sent_needs_the_standard_library_alone() -> None:
    program = f"import sys\n{Path(machine.__file__).read_text()}\ndescribe()\nassert 'quantkit' not in sys.modules"
    program = program.replace("from __future__ import annotations", "")
    subprocess.run([sys.executable, "-I", "-S", "-c", program], check=True)
    for name in ("probe", "files", "work", "__init__"):
        subprocess.run([sys.executable, "-I", "-S", "-c", source(name)], check=True)


def said(**changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = probe(here(), "/tmp").model_dump(mode="json")
    return {**base, **changes}


def test_a_device_is_refused_that_nothing_runs_on(tmp_path: Path) -> None:
    good = said()
    for changes, code in (
        ({"implementation": "PyPy"}, "wrong-python"),
        ({"bits": 32}, "wrong-python"),
        ({"off": -20 * 365 * 86_400.0}, "clock-off"),
    ):
        with pytest.raises(InputError, match=code):
            Probed.model_validate({**good, **changes}).demand("pi5")
    model = tmp_path / "model.onnx"
    model.write_bytes(b"")
    with model.open("r+b") as stream:
        stream.truncate(1 << 30)
    little = Probed.model_validate({**good, "memory_free": 2 << 30, "memory": 4 << 30})
    with pytest.raises(InputError, match=r"out-of-memory.*4\.7 GB.*2\.1 GB of its 4\.3"):
        little.demand_memory([model, model], "pi5")
    little.demand_memory([model][:0], "pi5")


@pytest.mark.parametrize(
    "answer",
    [
        *("", "[]", "null", "{", '{"host": 1}', "[" * 100_000, '{"cores": ' + "9" * 5000 + "}", "\x1b[2J" * 100),
        json.dumps({"error": "\x1b[31mred", "value": "x" * 10_000}),
    ],
)
def test_hostile_answers_of_a_probe_are_one_line(tmp_path: Path, answer: str) -> None:
    program = tmp_path / "python3"
    (tmp_path / "answer").write_text(answer)
    # a Python that says the mark and then what it likes
    program.write_text(
        '#!/bin/sh\ncase "$1" in -ISc) exit 0;; esac\n'
        f"head -c 100000 | grep -o 'quantkit-[0-9a-f]\\{{32\\}}' | head -1\ncat {tmp_path}/answer\n"
    )
    program.chmod(0o755)
    shell = OpenSSH(Address("box"), name="box", begin=["sh", "-c"], python=str(program))
    with pytest.raises(InputError) as met:
        probe(shell, "~/q")
    assert met.value.code in ("answer-invalid", "device-failed"), met.value.line()
    assert len(met.value.line()) < 600
    assert "\x1b" not in met.value.line()


@pytest.mark.parametrize(
    "changes",
    [
        *({"libc": "glibc-2.9999999999"}, {"libc": "glibc-" + "9" * 30}, {"libc": "glibc-.."}),
        *({"off": float("nan")}, {"off": float("inf")}, {"temperature": float("inf")}, {"temperature": float("nan")}),
    ],
)
def test_facts_that_cannot_be_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Probed.model_validate({**said(), **changes})


def test_endless_output_is_not_held(tmp_path: Path) -> None:
    program = tmp_path / "python3"
    program.write_text('#!/bin/sh\ncase "$1" in -ISc) exit 0;; esac\nyes\n')
    program.chmod(0o755)
    began = time.monotonic()
    with pytest.raises(InputError, match="answer-invalid"):
        probe(OpenSSH(Address("box"), name="box", begin=["sh", "-c"], python=str(program)), "~/q")
    assert time.monotonic() - began < 20


def test_a_python_that_is_too_old_is_said(tmp_path: Path) -> None:
    program = tmp_path / "python3"
    program.write_text("#!/bin/sh\nexit 1\n")
    program.chmod(0o755)
    shell = OpenSSH(Address("box"), name="box", begin=["sh", "-c"], python=str(program))
    with pytest.raises(InputError, match=r"wrong-python.*Python 3\.11 or later.*--python"):
        probe(shell, "~/q")


@pytest.mark.parametrize(("named", "said"), [("/nowhere/python3", "not found"), ("/bin/ls", "ls ")])
def test_a_python_that_is_none_is_named(named: str, said: str) -> None:
    shell = OpenSSH(Address("box"), name="box", begin=["sh", "-c"], python=named)
    # and not what another Python says of itself, which may be recent enough
    with pytest.raises(InputError, match=rf"wrong-python.*{said}.*--python"):
        probe(shell, "~/q")


def test_what_a_shell_says_at_login_is_no_answer(tmp_path: Path) -> None:
    (tmp_path / "rc").write_text('#!/bin/sh\necho \'Welcome {"host": 1}\'\neval "$1"\n')
    shell = OpenSSH(Address("box"), name="box", begin=["sh", str(tmp_path / "rc")])
    assert probe(shell, "~/q").cores == machine.cores()


def test_packages_are_named_as_pip_knows_them() -> None:
    assert {name.lower() for name in NEEDED} == set(NEEDED)
