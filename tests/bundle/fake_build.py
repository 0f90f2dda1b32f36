"""A build that needs no model: each step hashes the state before it, as a block needs the hidden states before it.

python fake_build.py OUT [SECONDS_A_STEP]      builds, resuming if need be
python fake_build.py OUT --kill-at-every-call N  child n is killed at its n-th change to the disk; N steps together
"""

import hashlib
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

from quantkit.bundle import Build, Bundle, Manifest, ModelEntry, SourceEntry, content_sha256, inventory

STEPS = 5
FINGERPRINT = {"model": "fake", "recipe": {"bits": 4, "group": 64}, "seed": 0}


def manifest(folder: Path, **changes: object) -> Manifest:
    files = inventory(folder)
    source = SourceEntry(ref="./fake", sha256="0" * 64, dtype="float32")
    fields = {
        "quantkit": "0.1.0",
        "content_sha256": content_sha256(files),
        "state": "complete",
        "model": ModelEntry(name="fake", kind="decoder", source=source),
        "recipe": {},
        "target": None,
        "calibration": None,
        "seed": 0,
        "threads": 1,
        "isa": "none",
        "device": {},
        "versions": {},
        "created": "2025-01-01T00:00:00Z",
        "layers": [],
        "files": files,
        "decisions": [],
        "checks": [],
        "verdict": None,
    }
    return Manifest(**{**fields, **changes})  # type: ignore[arg-type]


def compile_fake(
    out: Path, *, resume: bool, pause: float = 0.0, steps: int = STEPS, size: int = 20_000, together: int = 1
) -> Bundle:
    """Each step writes a shard that is `size` bytes larger than the one before it; `together` are synced at once."""
    with Build.open(out, FINGERPRINT, resume=resume) as build:
        if build.finished is not None:
            return build.finished
        done = build.done()
        for step in range(steps):
            if f"block {step}" in done:
                continue
            before = build.steps / f"hidden-{step - 1}"
            state = before.read_bytes() if step else b"start"
            data = random.Random(state).randbytes(size * (step + 1))
            shard, hidden = build.temporary("shard"), build.temporary("hidden")
            shard.write_bytes(data)
            time.sleep(pause)
            hidden.write_bytes(hashlib.sha256(data).digest())
            build.commit(
                f"block {step}",
                {"error": step / 10},
                {shard: build.bundle / "model" / f"{step}.safetensors", hidden: build.steps / f"hidden-{step}"},
                remove=[before] if step else [],
                sync=step % together == together - 1,
            )
        (build.bundle / "measurements.jsonl").write_text('{"name": "size.bytes", "value": 1}\n')
        return build.finish(manifest(build.bundle, versions={key: str(val) for key, val in build.done().items()}))


def _killed_at(out: Path, count: int, together: int) -> bool:
    """Runs a build in a child that is killed just before its count-th change to the disk; whether it was killed."""
    child = os.fork()
    if child:
        return os.WIFSIGNALED(os.waitpid(child, 0)[1])
    calls = 0

    def counting(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal calls
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if writes or event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "shutil.rmtree"):
            calls += 1
            if calls == count:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(counting)
    compile_fake(out, resume=True, steps=3, size=100, together=together)
    os._exit(0)


def kill_at_every_call(out: Path, together: int) -> None:
    os.fsync = os.fstat  # no wait for the disk
    expected = compile_fake(out, resume=False, steps=3, size=100).manifest
    count, killed = 0, True
    while killed:
        count += 1
        shutil.rmtree(out)
        killed = _killed_at(out, count, together)
        bundle = compile_fake(out, resume=True, steps=3, size=100)
        assert bundle.manifest == expected, f"killed at {count}"
        assert all(check.ok for check in Bundle.load(out).verify()), f"killed at {count}"
        assert sorted(path.name for path in out.parent.iterdir()) == [out.name], f"killed at {count}"
    print(count)


if __name__ == "__main__":
    if sys.argv[2:3] == ["--kill-at-every-call"]:
        kill_at_every_call(Path(sys.argv[1]), int(sys.argv[3]))
    else:
        pause = float(sys.argv[2]) if len(sys.argv) > 2 else 0.0
        print(compile_fake(Path(sys.argv[1]), resume=True, pause=pause).manifest.content_sha256)
