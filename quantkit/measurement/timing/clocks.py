"""How fast and how warm a device is while something is timed on it, as far as the operating system tells.

    clock_hz        of a CPU the mean over its cores, of a GPU that of its multiprocessors
    temperature_c   of a CPU the warmest sensor of the package
    throttles       how often a core has lowered its clock since the start of the machine; of a GPU 1 while it does
    slowed          of a CPU whether its clock is held down now, for warmth or want of power: by a cooling device of the
                    kernel's, or a Raspberry Pi's firmware (`get_throttled`)

A virtual machine mostly tells nothing of its host: what the CPU claims to run at there is no measurement, and not read.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

# throttle reasons: bit 0 is idle, bit 1 a setting of the user's; the others slow the card down against its will
_SLOWED = ~0b11
_QUERY = "clocks.sm,clocks.max.sm,temperature.gpu,clocks_throttle_reasons.active"
# a card at its power limit names that reason under any dense product, and takes a hundredth of its clock for it: below
# this share of its highest clock it is slowed
_NEAR = 0.95
# sensors of a CPU's package, by the kernel's names for them
_PACKAGE = ("x86_pkg_temp", "cpu-thermal", "cpu_thermal", "soc-thermal", "acpitz", "CPU-therm", "tj-thermal")
# cooling devices that hold a clock down: a fan is none. `cpufreq-cpu0`, `thermal-cpufreq-0` on Arm, `Processor` by ACPI
_HOLDS = ("cpufreq-", "thermal-cpufreq", "Processor")
# of `get_throttled`: the clock is capped, it is throttled, the soft limit of temperature is reached; and 16 bits
# further that any of these was so before
_CAPPED, _BEFORE = 0b1110, 16
# a clock that falls below such a share was lowered, where nothing else tells
_FELL = 0.65


@dataclass(frozen=True)
class Clocks:
    """What a device is at; see the module."""

    clock_hz: float | None = None
    temperature_c: float | None = None
    throttles: int | None = None
    slowed: bool | None = None


@dataclass(frozen=True)
class Between:
    """From one look at a device to the next.

    Args:
        clock_hz: the mean of both.
        temperature_c: at the end.
        throttled: whether it lowered its clock in between.
    """

    clock_hz: float | None = None
    temperature_c: float | None = None
    throttled: bool | None = None

    @classmethod
    def of(cls, before: Clocks, after: Clocks, *, counted: bool) -> Between:
        """Put both looks together; `counted`: throttles are counted since the start, else told as they are."""
        clocks = [look.clock_hz for look in (before, after) if look.clock_hz is not None]
        throttled = None
        if before.throttles is not None and after.throttles is not None:
            throttled = after.throttles > before.throttles if counted else bool(before.throttles or after.throttles)
        held = [look.slowed for look in (before, after) if look.slowed is not None]
        if held:
            throttled = bool(throttled) or any(held)
        if throttled is None and counted and before.clock_hz and after.clock_hz:
            throttled = after.clock_hz < _FELL * before.clock_hz
        return cls(sum(clocks) / len(clocks) if clocks else None, after.temperature_c, throttled)


def settings_of(before: Clocks, after: Clocks) -> dict[str, float]:
    """Give settings of rows: `clock_hz_before`, `temperature_c_after`, ...; none where the system does not tell."""
    looks = {"before": before, "after": after}
    told = {f"{name}_{when}": getattr(looks[when], name) for when in looks for name in ("clock_hz", "temperature_c")}
    return {name: value for name, value in told.items() if value is not None}


def of_cpu(root: Path = Path("/")) -> Clocks:
    """Look at the processor; `root` is where `/sys` stands, for tests."""
    cores, thermal = root / "sys/devices/system/cpu", root / "sys/class/thermal"
    clocks = _numbers(cores.glob("cpu[0-9]*/cpufreq/scaling_cur_freq"))
    throttles = _numbers(cores.glob("cpu[0-9]*/thermal_throttle/core_throttle_count"))
    cooling = [path for path in thermal.glob("cooling_device*") if _text(path / "type").startswith(_HOLDS)]
    held = [state > 0 for state in _numbers(path / "cur_state" for path in cooling)]
    firmware = _firmware(root)
    if firmware is not None:
        throttles.append((firmware >> _BEFORE & _CAPPED).bit_count())
        held.append(bool(firmware & _CAPPED))
    warmth = _numbers(zone / "temp" for zone in thermal.glob("thermal_zone*") if _text(zone / "type") in _PACKAGE)
    return Clocks(
        1e3 * sum(clocks) / len(clocks) if clocks else None,
        max(warmth) / 1e3 if warmth else None,
        sum(throttles) if throttles else None,
        any(held) if held else None,
    )


def _firmware(root: Path) -> int | None:
    """What a Raspberry Pi's firmware says, by the kernel or by its own program; None of other machines."""
    if "Raspberry Pi" not in _text(root / "proc/device-tree/model"):
        return None
    # `soc/soc:firmware`, `soc@107c000000/soc@107c000000:firmware`
    words = [_text(path) for path in (root / "sys/devices/platform").glob("*/*firmware*/get_throttled")]
    if not words:
        words = [_asked(["vcgencmd", "get_throttled"]).removeprefix("throttled=0x")]
    with contextlib.suppress(ValueError):
        return int(words[0].strip(), 16)
    return None


def of_gpu() -> Clocks:
    """Look at the first NVIDIA GPU; empty where the driver does not answer."""
    try:
        clock, highest, temperature, reasons = asked_of_gpu(_QUERY).split(",")
        return Clocks(1e6 * float(clock), float(temperature), int(gpu_slowed(clock, highest, reasons)))
    except ValueError:
        return Clocks()


def gpu_slowed(clock: str, highest: str, reasons: str) -> bool:
    """Tell whether a card's clock is held well below its highest, not by idleness or a user's setting.

    Args:
        clock, highest: megahertz, as `nvidia-smi` says them.
        reasons: its `clocks_throttle_reasons.active`.

    Raises ValueError: one of them is no number.
    """
    return bool(int(reasons, 16) & _SLOWED) and float(clock) < _NEAR * float(highest)


def asked_of_gpu(query: str) -> str:
    """Ask `nvidia-smi` about the first GPU: its answers with commas between, or why there is none."""
    return _asked(["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits", "--id=0"])


def _asked(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"not known: {error}"
    return done.stdout.strip() or done.stderr.strip()


def _numbers(paths: Iterable[Path]) -> list[int]:
    numbers = []
    for path in paths:
        with contextlib.suppress(ValueError):
            numbers.append(int(_text(path)))
    return numbers


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
