"""Read the clock and temperature of a device while something is timed on it, as far as the operating system reports
them.

    clock_hz        CPU: mean over its cores; GPU: clock of the multiprocessors
    temperature_c   CPU: warmest sensor of the package
    throttles       CPU: times that a core has lowered its clock since boot; GPU: 1 while it is throttled
    slowed          CPU: True while heat or lack of power holds the clock down, as told by a cooling device of the
                    kernel or by a Raspberry Pi's firmware (`get_throttled`)

A virtual machine rarely reports its host. The clock that its CPU claims is not a measurement, so it is not read.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

# throttle reasons: bit 0 is idle, bit 1 a setting of the user; all others slow the card down unasked
_SLOWED = ~0b11
_QUERY = "clocks.sm,clocks.max.sm,temperature.gpu,clocks_throttle_reasons.active"
# a card at its power limit reports that reason under any dense product, at the cost of 1 % of its clock;
# it counts as slowed below this share of its highest clock
_NEAR = 0.95
# sensors of a CPU package, as the kernel names them
_PACKAGE = ("x86_pkg_temp", "cpu-thermal", "cpu_thermal", "soc-thermal", "acpitz", "CPU-therm", "tj-thermal")
# cooling devices that lower a clock (not fans): `cpufreq-cpu0`, `thermal-cpufreq-0` on Arm, `Processor` by ACPI
_HOLDS = ("cpufreq-", "thermal-cpufreq", "Processor")
# bits of `get_throttled`: clock capped, throttled, soft temperature limit reached; the same 16 bits higher for the past
_CAPPED, _BEFORE = 0b1110, 16
# share of the first clock; a lower one counts as throttled where nothing else reports it
_FELL = 0.65


@dataclass(frozen=True)
class Clocks:
    """State of a device at one moment; the module explains the fields."""

    clock_hz: float | None = None
    temperature_c: float | None = None
    throttles: int | None = None
    slowed: bool | None = None


@dataclass(frozen=True)
class Between:
    """Change of a device between two readings.

    Args:
        clock_hz: mean of both readings.
        temperature_c: reading at the end.
        throttled: True if the device lowered its clock in between.
    """

    clock_hz: float | None = None
    temperature_c: float | None = None
    throttled: bool | None = None

    @classmethod
    def of(cls, before: Clocks, after: Clocks, *, counted: bool) -> Between:
        """Combine two readings. `counted`: True where `throttles` counts events since boot (CPU), False for a state
        (GPU)."""
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
    """Return settings of rows, such as `clock_hz_before` and `temperature_c_after`, as far as the system reports
    them."""
    looks = {"before": before, "after": after}
    told = {f"{name}_{when}": getattr(looks[when], name) for when in looks for name in ("clock_hz", "temperature_c")}
    return {name: value for name, value in told.items() if value is not None}


def of_cpu(root: Path = Path("/")) -> Clocks:
    """Read the processor's state. `root` is the folder that holds `/sys`, for tests."""
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
    """Read a Raspberry Pi's throttle bits from the kernel or from its own program; None on other machines."""
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
    """Read the state of the first NVIDIA GPU; all fields are None if the driver does not answer."""
    try:
        clock, highest, temperature, reasons = asked_of_gpu(_QUERY).split(",")
        return Clocks(1e6 * float(clock), float(temperature), int(gpu_slowed(clock, highest, reasons)))
    except ValueError:
        return Clocks()


def gpu_slowed(clock: str, highest: str, reasons: str) -> bool:
    """Tell whether a card's clock is well below its highest for a reason other than idleness or a user's setting.

    Args:
        clock, highest: clocks in MHz, as printed by `nvidia-smi`.
        reasons: `clocks_throttle_reasons.active` of `nvidia-smi`, hexadecimal.

    Raises ValueError: one of them is not a number.
    """
    return bool(int(reasons, 16) & _SLOWED) and float(clock) < _NEAR * float(highest)


def asked_of_gpu(query: str) -> str:
    """Ask `nvidia-smi` about the first GPU. Return its answers separated by commas, or the reason for having none."""
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
