"""Whether a process that asked is still there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from quantkit.devices.ssh import client as clients
from quantkit.devices.ssh.client import client, is_gone


def test_who_lives_is_not_gone_and_who_ended_is() -> None:
    assert not is_gone(client())
    program = "from quantkit.devices.ssh.client import client; print(client())"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip()
    assert is_gone(ended)
    # its number is another process's by now
    kernel, _, began = ended.rsplit(":", 2)
    assert is_gone(f"{kernel}:{os.getpid()}:{began}")


@pytest.mark.parametrize("said", ["", None, {}, "x", "a:b:1:2", f"{client().split(':')[0]}:1:1:1", "../..:1:1:1"])
def test_of_what_is_not_certain_nobody_is_gone(said: object) -> None:
    assert not is_gone(said)


@pytest.mark.parametrize("number", ["-1", "x", "1/../2", "9" * 400])
def test_what_a_device_says_names_no_file(number: str) -> None:
    kernel, _, began = client().rsplit(":", 2)
    assert is_gone(f"{kernel}:{number}:{began}") in (True, False)


def test_where_the_system_does_not_tell_nobody_is_gone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    known = client()
    monkeypatch.setattr(clients, "_PROC", tmp_path)
    assert (client(), is_gone(known)) == ("", False)
