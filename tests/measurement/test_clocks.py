"""What a device is at, from a planted /sys and a planted driver; nothing where there is nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from quantkit.measurement.timing import clocks
from quantkit.measurement.timing.clocks import Between, Clocks


def put(root: Path, path: str, text: str) -> None:
    place = root / path
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(f"{text}\n")


def test_a_cpu(tmp_path: Path) -> None:
    for core, (clock, count) in enumerate([(2_000_000, 3), (3_000_000, 4)]):
        put(tmp_path, f"sys/devices/system/cpu/cpu{core}/cpufreq/scaling_cur_freq", str(clock))
        put(tmp_path, f"sys/devices/system/cpu/cpu{core}/thermal_throttle/core_throttle_count", str(count))
    for zone, (kind, warmth) in enumerate([("x86_pkg_temp", "61000"), ("iwlwifi_1", "99000"), ("acpitz", "broken")]):
        put(tmp_path, f"sys/class/thermal/thermal_zone{zone}/type", kind)
        put(tmp_path, f"sys/class/thermal/thermal_zone{zone}/temp", warmth)
    assert clocks.of_cpu(tmp_path) == Clocks(2.5e9, 61.0, 7)


def test_a_machine_that_tells_nothing(tmp_path: Path) -> None:
    assert clocks.of_cpu(tmp_path) == Clocks(None, None, None)
    assert Between.of(Clocks(), Clocks(), counted=True) == Between(None, None, None)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("1410, 55, 0x0000000000000000", Clocks(1.41e9, 55.0, 0)),
        ("1410, 55, 0x0000000000000001", Clocks(1.41e9, 55.0, 0)),
        ("900, 88, 0x0000000000000020", Clocks(9e8, 88.0, 1)),
        ("[N/A], 88, 0x20", Clocks()),
        ("no devices were found", Clocks()),
    ],
)
def test_a_gpu(answer: str, expected: Clocks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = tmp_path / "nvidia-smi"
    driver.write_text(f"#!/bin/sh\necho '{answer}'\n")
    driver.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert clocks.of_gpu() == expected


def test_no_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert clocks.of_gpu() == Clocks()


def test_throttles_are_counted_of_a_cpu_and_told_of_a_gpu() -> None:
    before, same, more = Clocks(throttles=3), Clocks(throttles=3), Clocks(throttles=4)
    assert Between.of(before, same, counted=True).throttled is False
    assert Between.of(before, more, counted=True).throttled is True
    assert Between.of(Clocks(throttles=0), Clocks(throttles=1), counted=False).throttled is True
    assert Between.of(Clocks(throttles=0), Clocks(throttles=0), counted=False).throttled is False
