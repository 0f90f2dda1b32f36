"""`quantkit device`: over a real sshd."""

import json
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from devices.loopback import Loopback
from quantkit.cli import run
from quantkit.devices.named import NamedDevice
from quantkit.devices.openssh import Address, OpenSSH, held
from quantkit.devices.probed import probe


def said(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    code = run([*map(str, words), "--json"])
    envelope: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert envelope["exit"] == code
    return envelope


def test_a_device_is_added_shown_and_removed(
    devices: Loopback, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for name in ("plain", "tiny"):
        added = said(capsys, "device", "add", name, f"ssh://{name}", "--workdir", tmp_path / "there")
        assert added["error"] is None
        assert added["result"]["about"]["disk_free"] > 0
    found = said(capsys, "device", "list")["result"]["devices"]
    assert [(each["name"], each["about"]["memory"] == 1 << 30) for each in found] == [("plain", False), ("tiny", True)]
    assert run(["device", "list"]) == run(["device", "show", "tiny"]) == run(["device", "probe", "plain"]) == 0
    shown = capsys.readouterr().out
    assert "ssh://tiny" in shown
    assert "1 core" in shown
    assert said(capsys, "device", "remove", "tiny")["result"]["removed"] == "tiny"
    assert said(capsys, "device", "show", "tiny")["error"]["code"] == "unknown-device"
    # nothing was written there: to look changes nothing
    assert not (tmp_path / "there").exists()


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("add", "Pi 5", "ssh://plain"), "usage"),
        (("add", "pi5", "plain"), "address-invalid"),
        (("add", "pi5", "ssh://plain", "--workdir", "~"), "workdir-invalid"),
        (("add", "pi5", "ssh://plain", "--python", "python3; reboot"), "device-invalid"),
        (("show", "pi5"), "unknown-device"),
        (("probe", "ssh://-oProxyCommand=x"), "address-invalid"),
    ],
)
def test_bad_words_are_one_line(
    words: tuple[str, ...],
    code: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert said(capsys, "device", *words)["error"]["code"] == code
    assert not list(tmp_path.rglob("*.yaml"))


def test_a_device_that_is_at_work_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    about = probe(OpenSSH(Address("here"), name="here", begin=["sh", "-c"]), str(tmp_path / "there"))
    for busy, line in (("", None), (held({"who": "ada@mill", "what": "measure"}), "ada@mill has it, for: measure")):
        known = about.model_copy(update={"busy": busy})
        NamedDevice(name="pi5", address="ssh://here", about=known, probed=date(2026, 11, 27)).save()
        assert run(["device", "show", "pi5"]) == 0
        shown = [row.split("at work")[1].strip() for row in capsys.readouterr().out.splitlines() if "at work" in row]
        assert shown == ([line] if line else [])
