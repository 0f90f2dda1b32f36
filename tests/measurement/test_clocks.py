"""What a device is at, from a planted /sys and a planted driver; nothing where there is nothing."""

from pathlib import Path

import pytest

from quantkit.measurement.timing import clocks
from quantkit.measurement.timing.clocks import Between, Clocks


def put(root: Path, path: str, text: str) -> None:
    place = root / path
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(f"{text}\n")


def test_a_cpu_gives_clock_temperature_and_throttles(tmp_path: Path) -> None:
    for core, (clock, count) in enumerate([(2_000_000, 3), (3_000_000, 4)]):
        put(tmp_path, f"sys/devices/system/cpu/cpu{core}/cpufreq/scaling_cur_freq", str(clock))
        put(tmp_path, f"sys/devices/system/cpu/cpu{core}/thermal_throttle/core_throttle_count", str(count))
    for zone, (kind, warmth) in enumerate([("x86_pkg_temp", "61000"), ("iwlwifi_1", "99000"), ("acpitz", "broken")]):
        put(tmp_path, f"sys/class/thermal/thermal_zone{zone}/type", kind)
        put(tmp_path, f"sys/class/thermal/thermal_zone{zone}/temp", warmth)
    assert clocks.of_cpu(tmp_path) == Clocks(2.5e9, 61.0, 7)


@pytest.mark.parametrize(
    ("kind", "state", "slowed"),
    [
        ("cpufreq-cpu0", "2", True),
        ("thermal-cpufreq-1", "0", False),
        ("Processor", "1", True),
        ("pwm-fan", "4", None),
        ("intel_powerclamp", "-1", None),
    ],
)
def test_a_cooling_device_holds_the_clock(kind: str, state: str, slowed: bool | None, tmp_path: Path) -> None:
    put(tmp_path, "sys/class/thermal/cooling_device0/type", kind)
    put(tmp_path, "sys/class/thermal/cooling_device0/cur_state", state)
    assert clocks.of_cpu(tmp_path) == Clocks(slowed=slowed)


# bits as the firmware's documentation has them: 0x1 too little voltage, 0x2 capped, 0x4 throttled, 0x8 soft limit; the
# same times 0x10000 since the start
@pytest.mark.parametrize(
    ("said", "now", "before"),
    [
        ("0", False, 0),
        ("50005", True, 1),
        ("0x80008", True, 1),
        ("60000", False, 2),
        ("10001", False, 0),
        ("e000e", True, 3),
    ],
)
@pytest.mark.parametrize("way", ["soc/soc:firmware", "soc@107c000000/soc@107c000000:firmware", "vcgencmd"])
def test_a_raspberry_pi_gives_its_firmware_throttling(
    said: str, now: bool, before: int, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, "proc/device-tree/model", "Raspberry Pi 5 Model B Rev 1.0\0")
    if way == "vcgencmd":
        put(tmp_path, "bin/vcgencmd", f"#!/bin/sh\necho throttled=0x{said.removeprefix('0x')}")
        (tmp_path / "bin/vcgencmd").chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    else:
        put(tmp_path, f"sys/devices/platform/{way}/get_throttled", said)
    assert clocks.of_cpu(tmp_path) == Clocks(throttles=before, slowed=now)


def test_a_raspberry_pi_that_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, "proc/device-tree/model", "Raspberry Pi 4 Model B")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert clocks.of_cpu(tmp_path) == Clocks()
    put(tmp_path, "sys/devices/platform/soc/soc:firmware/get_throttled", "what?")
    assert clocks.of_cpu(tmp_path) == Clocks()


@pytest.mark.parametrize(
    ("before", "after", "throttled"),
    [
        (Clocks(throttles=0, slowed=False), Clocks(throttles=1, slowed=False), True),
        (Clocks(throttles=1, slowed=False), Clocks(throttles=1, slowed=True), True),
        (Clocks(throttles=1, slowed=False), Clocks(throttles=1, slowed=False), False),
        (Clocks(2.4e9, slowed=False), Clocks(1.0e9, slowed=False), False),
        (Clocks(2.4e9), Clocks(1.5e9), True),
        (Clocks(2.4e9), Clocks(2.0e9), False),
        (Clocks(slowed=True), Clocks(), True),
    ],
)
def test_what_tells_that_a_clock_was_lowered(before: Clocks, after: Clocks, throttled: bool) -> None:
    assert Between.of(before, after, counted=True).throttled is throttled


def test_a_machine_that_tells_nothing(tmp_path: Path) -> None:
    assert clocks.of_cpu(tmp_path) == Clocks(None, None, None)
    assert Between.of(Clocks(), Clocks(), counted=True) == Between(None, None, None)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("1410, 1980, 55, 0x0000000000000000", Clocks(1.41e9, 55.0, 0)),
        ("345, 1980, 55, 0x0000000000000001", Clocks(3.45e8, 55.0, 0)),
        ("900, 1980, 88, 0x0000000000000020", Clocks(9e8, 88.0, 1)),
        # what an H200 said in the midst of dense products: at its power limit, with nearly all of its clock
        ("1965, 1980, 42, 0x0000000000000004", Clocks(1.965e9, 42.0, 0)),
        ("1500, 1980, 42, 0x0000000000000004", Clocks(1.5e9, 42.0, 1)),
        ("[N/A], 1980, 88, 0x20", Clocks()),
        ("no devices were found", Clocks()),
    ],
)
def test_a_gpu_gives_the_driver_state(
    answer: str, expected: Clocks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = tmp_path / "nvidia-smi"
    driver.write_text(f"#!/bin/sh\necho '{answer}'\n")
    driver.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert clocks.of_gpu() == expected


def test_a_gpu_without_a_driver_gives_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert clocks.of_gpu() == Clocks()


def test_throttles_are_counted_of_a_cpu_and_told_of_a_gpu() -> None:
    before, same, more = Clocks(throttles=3), Clocks(throttles=3), Clocks(throttles=4)
    assert Between.of(before, same, counted=True).throttled is False
    assert Between.of(before, more, counted=True).throttled is True
    assert Between.of(Clocks(throttles=0), Clocks(throttles=1), counted=False).throttled is True
    assert Between.of(Clocks(throttles=0), Clocks(throttles=0), counted=False).throttled is False
