"""The library of CPU operators, compiled by the machine's own C compiler the first time that it is wanted.

It is code that this process will run: it stands in a folder that nobody else can write to or replace, a proof beside it
holds its hash, and it was loaded in another process before that was written.
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
# runs what follows so that it writes no file above 64 MiB (in blocks of 512 bytes), what it says included
_LIMITED = ("sh", "-c", 'ulimit -f 131072; exec "$@"', "sh")
_SAID = 65536
_TRIAL = "import ctypes, sys; ctypes.CDLL(sys.argv[1]).RegisterCustomOps"


def why_not() -> str | None:
    """Why the operators do not run here, or would gain nothing; None where they do."""
    if not set(_FAST) & set(machine.isa_features()):
        return f"its products in 4 bits are written for {' or '.join(_FAST)}, and this processor has {machine.isa()}"
    return None if _compiler() else f"no C compiler to compile its operators with: {_missing()}"


def register(options: onnxruntime.SessionOptions) -> None:
    """Let a session have the operators. Raises InputError: as `library`."""
    place = library()
    try:
        options.register_custom_ops_library(str(place))
    except Exception as problem:  # ONNX Runtime's own types
        raise _not_compiled(str(place), str(problem)) from None


def library(flags: Sequence[str] = ("-march=native",)) -> Path:
    """The library, for `SessionOptions.register_custom_ops_library`; kept for the next time.

    Args:
        flags: that name the instruction set.

    Raises:
        InputError: `compiler-missing`, `kernels-not-compiled`.
    """
    compiler = _compiler()
    if compiler is None:
        rule = "its operators are compiled for the processor at hand"
        remedy = "install gcc or clang and name it in CC, or use the runtime `onnxruntime`, which needs none"
        raise InputError("compiler-missing", "quantkit_cpu", _missing(), rule, remedy)
    try:
        return _compiled(compiler, flags)
    except OSError as problem:
        said = f"{problem.strerror}: {problem.filename}" if problem.filename else str(problem)
        raise _not_compiled(shlex.join(compiler), said) from None


def _compiler() -> list[str] | None:
    """The command: what CC says, with its arguments, or one of the usual ones."""
    asked = os.environ.get("CC", "").strip()
    try:
        words = [asked] if shutil.which(asked) else shlex.split(asked)  # a path may have blanks
    except ValueError:  # a quotation without an end
        return None
    if words:
        return words if shutil.which(words[0]) else None
    return next(([found] for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)


def _missing() -> str:
    asked = os.environ.get("CC", "").strip()
    return f"CC names {asked!r}, which is not there" if asked else "cc, gcc or clang is not installed"


def _compiled(compiler: Sequence[str], flags: Sequence[str]) -> Path:
    """One for every source, compiler, instruction set and processor, since `-march=native` means another on each."""
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
        made = Path(beside) / place.name
        command = [*compiler, *_FLAGS, *flags, *(str(here / name) for name in _SOURCES), "-o", str(made), "-lm"]
        _run(command, shlex.join(compiler))
        if not made.is_file() or not is_plain(made.lstat()):
            raise _not_compiled(shlex.join(compiler), "it ended without an error, and without a library")
        _run(machine.python("-c", _TRIAL, str(made)), shlex.join(compiler))
        data = limits.read(made)
        write_atomic(place, data)
        write_atomic(proof, hashlib.sha256(data).hexdigest().encode())
    return place


def _run(command: Sequence[str], where: str) -> None:
    """A compiler, or what tries its library. Raises InputError `kernels-not-compiled`, with a line of what it said."""
    with tempfile.TemporaryFile() as said:
        try:
            done = subprocess.run(  # noqa: S603 (what CC says, and our own Python)
                [*_LIMITED, *command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=said,
                env={**os.environ, "LC_ALL": "C"},
                timeout=_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise _not_compiled(where, f"not done after {_SECONDS:g} s") from None
        said.seek(0)
        lines = said.read(_SAID).decode(errors="replace").strip().splitlines()
    if done.returncode:
        last = lines[-1] if lines else f"exit code {done.returncode}"
        raise _not_compiled(where, next((line for line in lines if "error" in line.lower()), last))


def _private(name: str) -> Path:
    """A folder of the cache, made where it is missing, that nobody else can write to, nor put another in its place.

    Raises:
        OSError: it is somebody else's, or lies where others may write; as the system says.
    """
    root = cache_dir().resolve()
    root.mkdir(parents=True, exist_ok=True)
    folder = root / "kernels" / name
    for own in (folder.parent, folder):
        own.mkdir(mode=0o700, exist_ok=True)
        status = own.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            raise PermissionError(1, "it is a link, or somebody else's", str(own))
        if stat.S_IMODE(status.st_mode) != 0o700:
            own.chmod(0o700)
    for above in (root, *root.parents):
        status = above.stat()
        others = status.st_mode & (stat.S_IWOTH | (0 if _only_us(status.st_gid) else stat.S_IWGRP))
        # where it is sticky, only its owner renames what is in it
        if status.st_uid not in (0, os.geteuid()) or (others and not status.st_mode & stat.S_ISVTX):
            raise PermissionError(1, "others may write there", str(above))
    return folder


def _only_us(group: int) -> bool:
    """Tell whether it is the group that many systems make for each user."""
    try:
        return grp.getgrgid(group).gr_name == pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return False


def _proved(place: Path, proof: Path) -> bool:
    """Tell whether a library is there that this user alone could have written, with the hash that its proof says."""
    try:
        kept = [place.lstat(), proof.lstat()]
        own = all(is_plain(each) and each.st_uid == os.geteuid() and not each.st_mode & 0o022 for each in kept)
        return own and limits.read(proof) == hashlib.sha256(limits.read(place)).hexdigest().encode()
    except (OSError, InputError):  # not there, or too large for what it is
        return False


def _not_compiled(where: str, why: str) -> InputError:
    return InputError(
        "kernels-not-compiled",
        where=where,
        value=why[:200],
        rule="a C compiler that knows GNU C11 and _Float16 (gcc 12 or clang 15, or later), and a cache of one's own",
        remedy="name another in CC or QUANTKIT_CACHE, or use the runtime `onnxruntime`, which needs none",
    )
