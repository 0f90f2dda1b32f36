"""Library of CPU operators and of loops of `gptq`, compiled by the machine's own C compiler at the first use.

This process will run the library's code. So its folder is writable for this user alone, a file beside it holds its
hash, and it is loaded once in another process before the hash is written.
"""

from __future__ import annotations

import grp
import hashlib
import os
import platform
import pwd
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from quantkit import limits, machine
from quantkit.bundle.disk import alone, is_plain, write_atomic
from quantkit.content import cache_dir
from quantkit.errors import InputError

if TYPE_CHECKING:
    import onnxruntime

_SOURCES = ("operators.c", "products.c", "attention.c", "columns.c")
_HEADERS = ("ort.h", "products.h", "attention.h", "exponential.h")
# sums may be reordered for vectors; NaN stays NaN
_FLAGS = (
    *("-O3", "-std=gnu11", "-shared", "-fPIC", "-fvisibility=hidden"),
    *("-fno-math-errno", "-fno-trapping-math", "-fassociative-math", "-fno-signed-zeros"),
)
# instruction sets of `products.c`; without one of them it is slower than ONNX Runtime's own operators
_FAST = ("avx512_vnni",)
_SECONDS = 120.0
# limits the files of a command, output included, to 64 MiB (in blocks of 512 bytes)
_LIMITED = ("sh", "-c", 'ulimit -f 131072; exec "$@"', "sh")
_MOST_OUTPUT = 65536
_TRIAL = "import ctypes, sys; ctypes.CDLL(sys.argv[1]).RegisterCustomOps"


def why_not() -> str | None:
    """Return the reason why the operators cannot run here, or are not faster; None if they can and are."""
    if not set(_FAST) & set(machine.isa_features()):
        return f"its products in 4 bits are written for {' or '.join(_FAST)}, and this processor has {machine.isa()}"
    return None if _compiler() else f"no C compiler to compile its operators with: {_missing()}"


def register(options: onnxruntime.SessionOptions) -> None:
    """Register the operators with a session. Raises InputError: as `library`."""
    place = library()
    try:
        options.register_custom_ops_library(str(place))
    except Exception as problem:  # ONNX Runtime has error types of its own
        raise _not_compiled(str(place), str(problem)) from None


def library(flags: Sequence[str] = ("-march=native",)) -> Path:
    """Return the compiled library, for `SessionOptions.register_custom_ops_library`; it is kept for later calls.

    Args:
        flags: compiler flags for the instruction set.

    Raises:
        InputError: `compiler-missing`, `kernels-not-compiled`.
    """
    compiler = _compiler()
    if compiler is None:
        rule = "its operators are compiled for this machine's processor"
        remedy = "install gcc or clang and name it in CC, or use the runtime `onnxruntime`, which needs none"
        raise InputError("compiler-missing", "quantkit_cpu", _missing(), rule, remedy)
    try:
        return _compiled(compiler, flags)
    except OSError as problem:
        reason = f"{problem.strerror}: {problem.filename}" if problem.filename else str(problem)
        raise _not_compiled(shlex.join(compiler), reason) from None


def _compiler() -> list[str] | None:
    """Return the command of CC with its arguments, or the first usual compiler that is installed."""
    asked = os.environ.get("CC", "").strip()
    try:
        words = [asked] if shutil.which(asked) else shlex.split(asked)  # a path may contain spaces
    except ValueError:  # an unclosed quote
        return None
    if words:
        return words if shutil.which(words[0]) else None
    return next(([path] for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), None)


def told() -> str:
    """Name the compiler, or say what its absence costs."""
    compiler = _compiler()
    return shlex.join(compiler) if compiler else f"{_missing()}; `gptq` then solves in torch, which takes longer"


def _missing() -> str:
    asked = os.environ.get("CC", "").strip()
    return f"CC names {asked!r}, which is not installed" if asked else "cc, gcc or clang is not installed"


def _compiled(compiler: Sequence[str], flags: Sequence[str]) -> Path:
    """Compile unless a library for the same sources, compiler, flags and processor exists."""
    here = Path(__file__).parent
    parts = [limits.read(here / name) for name in (*_SOURCES, *_HEADERS)]
    about = (*compiler, *_FLAGS, *flags, platform.machine(), *sorted(machine.cpu_flags()))
    parts.append("\0".join(about).encode(errors="surrogateescape"))
    folder = _private(hashlib.sha256(b"\0".join(parts)).hexdigest()[:32])
    place, proof = folder / "operators.so", folder / "operators.sha256"
    if _proved(place, proof):
        return place
    with alone(folder / "lock"), tempfile.TemporaryDirectory(dir=folder) as beside:
        if _proved(place, proof):  # another process was first
            return place
        built = Path(beside) / place.name
        command = [*compiler, *_FLAGS, *flags, *(str(here / name) for name in _SOURCES), "-o", str(built), "-lm"]
        _run(command, shlex.join(compiler))
        if not built.is_file() or not is_plain(built.lstat()):
            raise _not_compiled(shlex.join(compiler), "it ended without an error, and without a library")
        _run(machine.python("-c", _TRIAL, str(built)), shlex.join(compiler))
        data = limits.read(built)
        write_atomic(place, data)
        write_atomic(proof, hashlib.sha256(data).hexdigest().encode())
    return place


def _run(command: Sequence[str], where: str) -> None:
    """Run the compiler, or the trial of its library. Raises InputError `kernels-not-compiled` with a line of its
    output.
    """
    with tempfile.TemporaryFile() as output:
        try:
            done = subprocess.run(  # noqa: S603 (the compiler from CC, or this Python)
                [*_LIMITED, *command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=output,
                env={**os.environ, "LC_ALL": "C"},
                timeout=_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise _not_compiled(where, f"not done after {_SECONDS:g} s") from None
        output.seek(0)
        lines = output.read(_MOST_OUTPUT).decode(errors="replace").strip().splitlines()
    if done.returncode:
        last = lines[-1] if lines else f"exit code {done.returncode}"
        raise _not_compiled(where, next((line for line in lines if "error" in line.lower()), last))


def _private(name: str) -> Path:
    """Return a folder of the cache that no other user can write to or replace; make it if it is missing.

    Raises:
        OSError: if it belongs to another user, or lies where others may write.
    """
    root = cache_dir().resolve()
    root.mkdir(parents=True, exist_ok=True)
    folder = root / "kernels" / name
    for own in (folder.parent, folder):
        own.mkdir(mode=0o700, exist_ok=True)
        status = own.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            raise PermissionError(1, "it is a link, or belongs to another user", str(own))
        if stat.S_IMODE(status.st_mode) != 0o700:
            own.chmod(0o700)
    for above in (root, *root.parents):
        status = above.stat()
        others = status.st_mode & (stat.S_IWOTH | (0 if _only_us(status.st_gid) else stat.S_IWGRP))
        # in a sticky folder, only owners can rename entries
        if status.st_uid not in (0, os.geteuid()) or (others and not status.st_mode & stat.S_ISVTX):
            raise PermissionError(1, "others may write there", str(above))
    return folder


def _only_us(group: int) -> bool:
    """Tell whether a group is the private group that many systems make for each user."""
    try:
        return grp.getgrgid(group).gr_name == pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return False


def _proved(place: Path, proof: Path) -> bool:
    """Tell whether the library exists, only this user could have written it, and its hash is right."""
    try:
        kept = [place.lstat(), proof.lstat()]
        own = all(is_plain(file) and file.st_uid == os.geteuid() and not file.st_mode & 0o022 for file in kept)
        return own and limits.read(proof) == hashlib.sha256(limits.read(place)).hexdigest().encode()
    except (OSError, InputError):  # missing, or larger than allowed
        return False


def _not_compiled(where: str, why: str) -> InputError:
    return InputError(
        "kernels-not-compiled",
        where=where,
        value=why[:200],
        rule="needs a C compiler with GNU C11 and _Float16 (gcc 12, clang 15, or later), and a private cache folder",
        remedy="set CC or QUANTKIT_CACHE, or use the runtime `onnxruntime`, which needs neither",
    )
