"""What the machine says of itself: limits read from a made-up /proc and /sys, names from made-up flags."""

import resource
import subprocess
import sys
from pathlib import Path

import forked
import pytest

from quantkit import machine


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A process in /a/b of a version 2 hierarchy, with no limits yet."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/a/b\n")
    (tmp_path / "sys/fs/cgroup/a/b").mkdir(parents=True)
    return tmp_path


def test_memory_without_limits_is_physical(root: Path) -> None:
    (root / "sys/fs/cgroup/a/b/memory.max").write_text("max\n")
    assert machine.memory_limit(root) == machine.physical_memory()


def test_a_limit_of_an_outer_group_holds_inside(root: Path) -> None:
    (root / "sys/fs/cgroup/a/b/memory.max").write_text("900000000\n")
    (root / "sys/fs/cgroup/a/memory.max").write_text("500000000\n")
    assert machine.memory_limit(root) == 500_000_000


def test_version_1_limits_count_and_its_no_limit_does_not(root: Path) -> None:
    (root / "proc/self/cgroup").write_text("5:cpu,cpuacct:/x\n4:memory:/a\n")
    folder = root / "sys/fs/cgroup/memory/a"
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert machine.memory_limit(root) == machine.physical_memory()
    (folder / "memory.limit_in_bytes").write_text("300000000\n")
    assert machine.memory_limit(root) == 300_000_000


def test_rlimit_limits_the_memory() -> None:
    cap = 2 * 2**30
    program = "from quantkit.machine import memory_limit; print(memory_limit())"
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (cap, cap)),
    )
    assert int(done.stdout) == min(cap, machine.memory_limit())


def test_a_share_of_time_limits_cores_rounded_up(root: Path) -> None:
    free = machine.cores(root)
    (root / "sys/fs/cgroup/a/cpu.max").write_text("50000 100000\n")
    assert machine.cores(root) == 1
    (root / "sys/fs/cgroup/a/cpu.max").write_text("max 100000\n")
    assert machine.cores(root) == free


@pytest.mark.parametrize(
    ("flags", "best"),
    [
        ("fpu sse4_2 avx avx2 fma", "avx2"),
        ("fpu sse4_2 avx avx2 fma avx512f avx512bw avx512_vnni", "avx512_vnni"),
        ("sse4_2 avx avx2 fma avx512f avx512bw avx512_vnni amx_tile amx_int8", "amx_int8"),
        ("sse4_2 avx avx2 fma avx_vnni", "avx_vnni"),
        ("fp asimd asimddp", "neon_dotprod"),
        ("fp asimd asimddp i8mm sve", "sve"),
        ("", "generic"),
        ("avx512f", "generic"),  # without byte and word instructions, no int8 kernel uses it
    ],
)
def test_classify_names_the_best_instruction_set(flags: str, best: str) -> None:
    assert machine.classify(flags.split())[0] == best


def test_describe_is_plain_data_and_needs_no_torch() -> None:
    program = (
        "import json, sys; from quantkit.machine import describe; json.dumps(describe()); "
        "assert 'torch' not in sys.modules"
    )
    forked.run("-c", program, light=True, check=True)


def test_device_id_is_stable_and_versions_name_what_is_there() -> None:
    assert machine.device() == machine.device()
    assert machine.device()["kind"] == "cpu"
    assert None not in machine.versions().values()
    assert "numpy" in machine.versions()


def test_free_memory_is_the_machine_s_within_what_the_process_may_use(root: Path) -> None:
    assert machine.memory_available(root) == machine.memory_limit(root)
    (root / "proc/meminfo").write_text("MemTotal: 9000 kB\nMemFree: 1000 kB\nMemAvailable:    4000 kB\nCached: 1 kB\n")
    (root / "proc/self/status").write_text("Name:\tpython\nVmHWM:\t  900 kB\nVmRSS:\t  500 kB\n")
    assert machine.memory_available(root) == 4000 * 1024
    # a container's limit counts less what this process holds already
    (root / "sys/fs/cgroup/a/b/memory.max").write_text(f"{3000 * 1024}\n")
    assert machine.memory_available(root) == 2500 * 1024
    # pages of mapped files can be taken back
    (root / "proc/self/status").write_text("Name:\tpython\nVmRSS:\t  900 kB\nRssFile:\t  400 kB\n")
    assert machine.memory_available(root) == 2500 * 1024
    (root / "sys/fs/cgroup/a/b/memory.max").write_text(f"{400 * 1024}\n")
    assert machine.memory_available(root) == 0
    assert 0 < machine.memory_available() <= machine.memory_limit()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_the_peak_is_not_that_of_whoever_started_the_process() -> None:
    held = bytearray(b"x") * 600_000_000
    command = [sys.executable, "-c", "from quantkit.machine import peak_bytes; print(peak_bytes())"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert 1_000_000 < int(done.stdout) < 0.75 * len(held)
