"""The library of CPU operators, compiled by the machine's own C compiler the first time that it is wanted."""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from quantkit import limits, machine
from quantkit.bundle.disk import write_atomic
from quantkit.content import cache_dir
from quantkit.errors import InputError

_SOURCES = ("operators.c", "products.c", "attention.c")
_HEADERS = ("ort.h", "products.h", "attention.h", "exponential.h")
# sums may be taken in another order, as vectors do; what is no number stays so
_FLAGS = (
    *("-O3", "-std=gnu11", "-shared", "-fPIC", "-fvisibility=hidden"),
    *("-fno-math-errno", "-fno-trapping-math", "-fassociative-math", "-fno-signed-zeros"),
)
# the instruction sets that `products.c` is written for, and beyond which it would be slower than ONNX Runtime's own
_FAST = ("avx512_vnni",)
_SECONDS = 120.0


def why_not() -> str | None:
    """Why the operators do not run here, or would gain nothing; None where they do."""
    if not set(_FAST) & set(machine.isa_features()):
        return f"its products in 4 bits are written for {' or '.join(_FAST)}, and this processor has {machine.isa()}"
    if _compiler() is None:
        asked = os.environ.get("CC")
        named = f"CC names {asked!r}, which is not there" if asked else "cc, gcc or clang is not installed"
        return f"no C compiler to compile its operators with: {named}"
    return None


def library(flags: tuple[str, ...] = ("-march=native",)) -> Path:
    """The library, for `SessionOptions.register_custom_ops_library`; kept for the next time.

    Args:
        flags: that name the instruction set.

    Raises:
        InputError: `compiler-missing`, `kernels-not-compiled`.
    """
    compiler = _compiler()
    if compiler is None:
        raise InputError(
            "compiler-missing",
            where="quantkit_cpu",
            value="no cc, gcc or clang",
            rule="its operators are compiled for the processor at hand",
            remedy="install gcc or clang, or use the runtime `onnxruntime`, which needs none",
        )
    return _compiled(compiler, flags)


def _compiler() -> list[str] | None:
    """The command: what CC says, or one of the usual ones."""
    if asked := shlex.split(os.environ.get("CC", "")):
        return asked if shutil.which(asked[0]) else None
    return next(([found] for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)


def _compiled(compiler: Sequence[str], flags: Sequence[str]) -> Path:
    """One for every source, compiler, instruction set and processor, since `-march=native` means another on each."""
    here = Path(__file__).parent
    parts = [limits.read(here / name) for name in (*_SOURCES, *_HEADERS)]
    about = (*compiler, *_FLAGS, *flags, platform.machine(), *sorted(machine.cpu_flags()))
    parts.append("\0".join(about).encode())
    place = cache_dir() / "kernels" / hashlib.sha256(b"\0".join(parts)).hexdigest()[:32] / "operators.so"
    proof = place.with_suffix(".sha256")
    try:
        if (
            place.is_file()
            and proof.is_file()
            and limits.read(proof).decode() == hashlib.sha256(place.open("rb").read()).hexdigest()
        ):
            return place
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place.parent) as folder:
            made = Path(folder) / place.name
            command = [*compiler, *_FLAGS, *flags, *(str(here / name) for name in _SOURCES), "-o", str(made), "-lm"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)  # noqa: S603
            if done.returncode or not made.is_file():
                lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}, and no library"]
                raise _not_compiled(compiler, next((line for line in lines if "error" in line), lines[0]))
            data = made.open("rb").read()
        write_atomic(place, data)
        write_atomic(proof, hashlib.sha256(data).hexdigest().encode())
    except (OSError, subprocess.TimeoutExpired) as problem:
        raise _not_compiled(compiler, str(problem)) from None
    return place


def _not_compiled(compiler: Sequence[str], why: str) -> InputError:
    return InputError(
        "kernels-not-compiled",
        where=" ".join(compiler),
        value=why[:200],
        rule="a C compiler that knows GNU C11 and _Float16 (gcc 12 or clang 15, or later), and a cache to write to",
        remedy="name another in CC or QUANTKIT_CACHE, or use the runtime `onnxruntime`, which needs none",
    )
