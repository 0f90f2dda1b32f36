"""The library of CPU operators, compiled by the machine's own C compiler the first time that it is wanted."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from quantkit import limits, machine
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
        return "no C compiler (cc, gcc or clang) is installed to compile its operators with"
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


def _compiler() -> str | None:
    asked = os.environ.get("CC")
    return next((found for name in (asked, "cc", "gcc", "clang") if name and (found := shutil.which(name))), None)


@cache
def _compiled(compiler: str, flags: tuple[str, ...]) -> Path:
    """One for every source, compiler, instruction set and processor, since `-march=native` means another on each."""
    here = Path(__file__).parent
    parts = [limits.read(here / name) for name in (*_SOURCES, *_HEADERS)]
    parts += [" ".join((compiler, *_FLAGS, *flags, *machine.isa_features())).encode()]
    place = cache_dir() / "kernels" / hashlib.sha256(b"\0".join(parts)).hexdigest()[:32] / "operators.so"
    if place.is_file():
        return place
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent) as folder:
        made = Path(folder) / place.name
        command = [compiler, *_FLAGS, *flags, *(str(here / name) for name in _SOURCES), "-o", str(made), "-lm"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)  # noqa: S603
        if done.returncode:
            raise InputError(
                "kernels-not-compiled",
                where=compiler,
                value=(done.stderr.strip() or f"exit code {done.returncode}").splitlines()[0][:200],
                rule="a C compiler that knows GNU C11 and _Float16: gcc 12 or clang 15, or later",
                remedy="name another in CC, or use the runtime `onnxruntime`, which needs none",
            )
        made.replace(place)  # whole or not at all, whoever compiles beside
    return place
