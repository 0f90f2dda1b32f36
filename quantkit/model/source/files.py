"""Files of a model folder, and the hash over them.

Hashes are cached by (path, device, inode, size, mtime and ctime in ns). A user can reset a file's mtime, but not its
ctime. A file changed within the last two seconds is not cached: it could change again within the resolution of its time
stamp (the "racy" entry of git's index).

Modules that sentence-transformers adds behind a transformer are part of the model: a bundle has all their files, byte
by
byte, weights included. `modules.json` names their folders:

    [{"path": "", "type": "sentence_transformers.models.Transformer"},
     {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}]
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from quantkit import limits
from quantkit.bundle.disk import sha256, write_atomic
from quantkit.bundle.manifest import MANIFEST
from quantkit.content import cache_dir
from quantkit.errors import InputError
from quantkit.machine import in_order
from quantkit.model.source.weights import INDEX, SINGLE, Weights, checked_file, strict_json

# files beside the weights; no other text files, which may be logs of this process
PATTERNS = ("*.json", "*vocab*.txt", "*merges*.txt", "*.model", "*.jinja", "*.tiktoken")
MODULES, CONFIG = "modules.json", "config.json"
_LIBRARY = "sentence_transformers."
_CODE = (".py", ".pyc", ".so")
_RACY_NS = 2_000_000_000
# places kept of one source
_PLACES = 8


def file_sha256(path: Path, hashed: Callable[[], str] | None = None) -> str:
    """Hash a file's content, in hex; from the cache if the file has not changed since.

    Args:
        hashed: function that hashes it, where it is read for something else too.
    """
    real = path.resolve()
    before = real.stat()
    slot, key = _kept(real, before)
    with suppress(OSError, ValueError, KeyError, TypeError):  # missing or damaged: hash the file
        known = json.loads(slot.read_text(encoding="utf-8"))
        if {name: known[name] for name in key} == key and known["check"] == _check(key, known["sha256"]):
            return str(known["sha256"])
    digest = hashed() if hashed is not None else sha256(real)
    if time.time_ns() - max(before.st_mtime_ns, before.st_ctime_ns) > _RACY_NS:
        _keep(slot, key, digest)
    return digest


def keep_sha256(path: Path, sha256: str) -> None:
    """Keep the hash of a file that this process hashed while it wrote it, under a lock: it is not read for that."""
    real = path.resolve()
    _keep(*_kept(real, real.stat()), sha256)


def _kept(real: Path, status: os.stat_result) -> tuple[Path, dict[str, object]]:
    """Return the place of a file's hash in the cache, and all that the hash holds for."""
    key: dict[str, object] = {"path": str(real), "size": status.st_size, "mtime_ns": status.st_mtime_ns}
    key |= {"ctime_ns": status.st_ctime_ns, "device": status.st_dev, "inode": status.st_ino}
    return cache_dir() / "hashes" / f"{hashlib.sha256(str(real).encode()).hexdigest()[:32]}.json", key


def _keep(slot: Path, key: Mapping[str, object], digest: str) -> None:
    with suppress(Exception):  # without a writable cache the hash is only slower
        slot.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(slot, json.dumps({**key, "sha256": digest, "check": _check(key, digest)}).encode())


def _check(key: Mapping[str, object], sha256: str) -> str:
    return hashlib.sha256(f"{json.dumps(key, sort_keys=True)} {sha256}".encode()).hexdigest()[:16]


def remember(sha256: str, path: Path) -> None:
    """Keep a place of a source in the cache, the latest first, under the hash of its content; no bundle holds it."""
    slot, before = _slot(sha256), _places(sha256)
    places = list(dict.fromkeys([str(path), *before]))[:_PLACES]
    with suppress(Exception):  # without a writable cache the user names the place again
        if places != before:
            slot.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(slot, json.dumps({"paths": places}).encode())


def remembered(sha256: str) -> list[Path]:
    """List the places of a source that was opened here, the latest first, changed or not, if something lies there."""
    return [path for path in map(Path, _places(sha256)) if path.exists()]


def _places(sha256: str) -> list[str]:
    with suppress(OSError, ValueError, KeyError, TypeError):
        places = json.loads(_slot(sha256).read_text(encoding="utf-8"))["paths"]
        return [place for place in places if isinstance(place, str)]
    return []


def _slot(sha256: str) -> Path:
    return cache_dir() / "sources" / f"{sha256}.json"


def source_changed(ref: str) -> InputError:
    """Make the error `source-changed`."""
    value, rule = "its files changed while it was compiled", "a bundle records its source"
    return InputError("source-changed", ref, value, rule, "compile again, and leave the model alone meanwhile")


def files_of(path: Path, weights: Weights, trust: bool) -> list[str]:
    """Name config, weights and tokenizer files, sorted, and files of its modules; with `trust` the model's own code
    too.
    """
    patterns = (*PATTERNS, "*.py") if trust else PATTERNS
    names = {file.name for pattern in patterns for file in path.glob(pattern) if file.is_file()}
    if weights.shards == [SINGLE]:
        names.discard(INDEX)
    return sorted(names | set(weights.shards) | {name for _, name in files_of_modules(path)})


def identity(path: Path, weights: Weights, trust: bool, *, opening: bool = False) -> str:
    """Hash a model: over (name, sha256) of its files; `opening` looks at its tensors in the same pass."""
    files = files_of(path, weights, trust)
    shards = set(weights.shards) if opening else set()

    def look(name: str) -> str:
        return file_sha256(path / name, partial(weights.hashed, name) if name in shards else None)

    lines = map("{} {}\n".format, files, in_order(look, files))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


@dataclass(frozen=True)
class Module:
    """One of the modules that a text passes through.

    Args:
        type: its full type.
        kind: last word of a type of the library, `Pooling`; "" for any other type.
        folder: its folder below the model's, in POSIX form; "" is the model's own.
        config: its configuration.
    """

    type: str
    kind: str
    folder: str
    config: dict[str, Any]


def modules_of(folder: Path) -> list[Module]:
    """List a folder's modules in order; none without `modules.json`. Raises InputError: `modules-invalid`."""
    if not (folder / MODULES).is_file():
        return []
    where = f"{folder.name}: {MODULES}"
    try:
        listed = json.loads(limits.read(checked_file(folder, MODULES)))
    except (ValueError, RecursionError) as problem:
        raise _invalid(where, f"not JSON: {problem}") from None
    if not isinstance(listed, list) or not all(isinstance(entry, dict) for entry in listed):
        raise _invalid(where, "no list of objects")
    modules = []
    for number, entry in enumerate(listed):
        kind, below = entry.get("type"), entry.get("path", "")
        if not isinstance(kind, str) or not isinstance(below, str) or not _is_inside(folder, below):
            raise _invalid(f"{where}, module {number}", f"{entry!r:.120}")
        config: dict[str, Any] = {}
        if below and (folder / below / CONFIG).is_file():
            raw = limits.read(checked_file(folder / below, CONFIG))
            config = strict_json(raw, f"{folder.name}: {below}/{CONFIG}", "modules-invalid", "modules-invalid")
        own = kind.rpartition(".")[2] if kind.startswith(_LIBRARY) else ""
        modules.append(Module(kind, own, PurePosixPath(below).as_posix() if below else "", config))
    return modules


def pools(folder: Path) -> bool:
    """Tell whether a model pools its outputs into vectors. Raises as `modules_of`."""
    return any(module.kind == "Pooling" for module in modules_of(folder))


def files_of_modules(folder: Path) -> Iterator[tuple[Path, str]]:
    """Yield (file, name below the folder) of all module files, without code, hidden files, links outside, bundles."""
    for below in sorted({module.folder for module in modules_of(folder)} - {""}):
        for place, folders, names in os.walk(folder / below):
            folders[:] = sorted(name for name in folders if not name.startswith((".", "__")))
            folders[:] = [name for name in folders if not _is_result(Path(place, name))]
            for name in sorted(names):
                path = Path(place, name)
                if not name.startswith(".") and path.suffix.lower() not in _CODE:
                    with suppress(InputError):
                        yield checked_file(path.parent, name), path.relative_to(folder).as_posix()


def _is_result(folder: Path) -> bool:
    """Tell whether it is a bundle, or one being built."""
    return folder.name.endswith(".partial") or (folder / MANIFEST).is_file()


def _is_inside(folder: Path, below: str) -> bool:
    """Tell whether a module's path is a folder below the model's own."""
    path = PurePosixPath(below)
    plain = not path.is_absolute() and ".." not in path.parts and "\\" not in below and below.isprintable()
    return plain and (folder / below).resolve().is_relative_to(folder.resolve())


def _invalid(where: str, value: str) -> InputError:
    rule = 'a list of {"type": ..., "path": ...}, each path a folder below the model\'s'
    remedy = "download the file again, or leave it out: the transformer is then compiled alone"
    return InputError("modules-invalid", where, value, rule, remedy)
