"""A device as a target: what was measured there stands in a file that `--target` reads."""

from datetime import date
from pathlib import Path

import pytest

from quantkit.devices.asked import target_of, write_target
from quantkit.devices.openssh import Address, OpenSSH
from quantkit.devices.probed import probe
from quantkit.measurement.operators.ceilings import Ceiling
from quantkit.target import Target, write_measured

WHEN = date(2026, 11, 24)


def ceiling(name: str, value: float, compute: str | None = None) -> Ceiling:
    unit = "B/s" if compute is None else "op/s" if compute == "int8" else "flop/s"
    return Ceiling(f"ceiling.{name}", unit, (value,) if value else (), {"compute_type": compute}, {})


@pytest.mark.parametrize(("machine", "vendor"), [("aarch64", "arm"), ("x86_64", "x86")])
def test_a_target_has_the_device_s_figures(
    machine: str, vendor: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path / "cache"))
    # of this machine, whose they are not
    write_measured("cpu-arm", {"figures": {"memory.read_bandwidth": 1e12, "compute.int8": 7.0}})
    about = probe(OpenSSH(Address("here"), name="here", begin=["sh", "-c"]), "~/quantkit").model_copy(
        update={"machine": machine, "isa": ["neon_dotprod", "neon"], "memory": 8 << 30, "last_level_cache": None}
    )
    found = [
        ceiling("read", 1.5e10),
        ceiling("copy", 1.2e10),
        ceiling("compute", 9e10, "fp32"),
        ceiling("compute", 0, "int8"),
    ]
    path = write_target(target_of("pi5", about, found, WHEN))
    read = Target.load(path)
    assert (read.name, read.arch.vendor, read.arch.isa) == ("pi5", vendor, ["neon_dotprod", "neon"])
    assert read.memory.read_bandwidth.value == 1.5e10
    assert read.memory.capacity.value == 8 << 30
    assert read.compute["fp32"].value == 9e10
    assert "device doctor pi5" in read.memory.read_bandwidth.source
    # what was not measured waits, and is not made up
    assert read.unmeasured() == ["memory.last_level_cache", "compute.int8"]
    assert read.formats == Target.load(f"cpu-{vendor}").formats
