"""What has to be carried to a machine with a GPU and no network: `make gpu-bundle`.

    gpu-bundle/wheels/      what `quantkit compile`, `measure` and `tax` import and the machine lacks (carried.txt), and
                            peers as far as they fit
    gpu-bundle/model/       config and tokenizer of a random model of 8B's shapes: its weights are made there
    gpu-bundle/ids.jsonl    token ids to calibrate it on
    gpu-bundle/bundle.json  what was asked for, what it is, and what did not fit

It is made whole or not at all, refused where it is over the limit, and left alone where it is as it would be made.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1])]

from quantkit.errors import InputError, QuantkitError  # noqa: E402

# what is fetched for: CPython on x86-64 Linux, wheels of C libraries up to this one (pip matches each tag as it stands)
_GLIBC = ("2_39", "2_35", "2_34", "2_31", "2_28", "2_27", "2_24", "2_17", "2_12", "2_5")
_OTHER = ("manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64", "linux_x86_64")
_TEXT, _SEQUENCES, _TOKENS = HERE.parent / "texts/alice.txt", 96, 512
# what the files come from: when one of them changes, the bundle is made anew
_ROOT = HERE.parents[1]
_SOURCES = (
    HERE / "carried.py",
    HERE / "carried.txt",
    _ROOT / "constraints.txt",
    HERE.parent / "harness/random_model.py",
)
Fetch = Callable[[str, Path], None]


def main(arguments: Sequence[str] | None = None) -> int:
    """Make it, say what is in it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=_ROOT / "gpu-bundle", help="the folder")
    parser.add_argument("--limit", type=float, default=60.0, metavar="MIB", help="refused above this")
    parser.add_argument("--python", default="3.12", help="of that machine")
    parser.add_argument("--only-peers", action="store_true", help="for a run that compares kernels: more peers fit")
    args = parser.parse_args(arguments)

    def fetch(wanted: str, folder: Path) -> None:
        fetched(wanted, folder, args.python)

    try:
        found = build(
            args.out, int(args.limit * 2**20), fetch, described, only_peers=args.only_peers, python=args.python
        )
    except QuantkitError as problem:
        print(problem.line(), file=sys.stderr)
        return problem.exit
    total = sum(found["bytes"].values())
    print(f"{args.out}: {total / 2**20:.1f} MiB in {len(found['bytes'])} files")
    for name, why in found["left_out"].items():
        print(f"  left out: {name}, {why}")
    return 0


def build(
    out: Path,
    limit: int,
    fetch: Fetch,
    describe: Callable[[Path], None],
    *,
    only_peers: bool = False,
    python: str = "3.12",
) -> dict[str, Any]:
    """The folder, made or found as it would be made; what `bundle.json` says.

    Args:
        out: the folder.
        limit: bytes.
        fetch: a requirement's wheel into a folder.
        describe: what is no wheel into a folder.
        only_peers: leave out all else.
        python: version of that machine's.

    Raises:
        InputError: `over-limit`; `wheel-missing`.
    """
    needed, peers = wanted()
    asked = {"needed": [] if only_peers else needed, "peers": peers, "python": python, "limit": limit}
    asked["sources"] = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in _SOURCES}
    if (kept := _kept(out, asked)) is not None:
        return kept
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as name:
        folder, one = Path(name) / "made", Path(name) / "one"
        wheels = folder / "wheels"
        wheels.mkdir(parents=True)
        if not only_peers:
            describe(folder)
        for requirement in asked["needed"]:
            fetch(requirement, wheels)
        left_out: dict[str, str] = {}
        for peer in peers:
            try:
                fetch(peer, one)
            except InputError as problem:
                left_out[peer] = problem.value
                continue
            size = sum(_sizes(one).values())
            if sum(_sizes(folder).values()) + size > limit:
                left_out[peer] = f"{size / 2**20:.1f} MiB are more than what is left of {limit / 2**20:g}"
            else:
                for path in one.iterdir():
                    path.replace(wheels / path.name)
            shutil.rmtree(one)
        sizes = _sizes(folder)
        if sum(sizes.values()) > limit:
            largest = sorted(sizes, key=sizes.__getitem__, reverse=True)[:3]
            raise InputError(
                "over-limit",
                where=str(out),
                value=f"{sum(sizes.values()) / 2**20:.1f} MiB",
                rule=f"at most {limit / 2**20:g} MiB",
                remedy="largest: " + ", ".join(f"{each} {sizes[each] / 2**20:.1f} MiB" for each in largest),
            )
        found = {"asked": asked, "bytes": sizes, "left_out": left_out}
        (folder / "bundle.json").write_text(json.dumps(found, indent=1) + "\n")
        shutil.rmtree(out, ignore_errors=True)
        folder.replace(out)
    return found


def wanted() -> tuple[list[str], list[str]]:
    """(requirements, peers) of carried.txt, with the versions of constraints.txt."""
    pinned = dict(line.split("==") for line in _lines(_ROOT / "constraints.txt") if "==" in line and ";" not in line)
    groups: list[list[str]] = [[], []]
    at = 0
    for line in _lines(HERE / "carried.txt"):
        if line == "[peers]":
            at = 1
        else:
            groups[at].append(f"{line}=={pinned[line]}" if line in pinned else line)
    return groups[0], groups[1]


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


def _kept(out: Path, asked: dict[str, Any]) -> dict[str, Any] | None:
    """What `bundle.json` says, if all of it is there and it is what would be made."""
    try:
        found: dict[str, Any] = json.loads((out / "bundle.json").read_text())
    except (OSError, ValueError):
        return None
    there = _sizes(out)
    there.pop("bundle.json")
    return found if found["asked"] == asked and found["bytes"] == there else None


def _sizes(folder: Path) -> dict[str, int]:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}


def _lines(path: Path) -> list[str]:
    lines = (line.partition("#")[0].strip() for line in path.read_text().splitlines())
    return [line for line in lines if line]


if __name__ == "__main__":
    sys.exit(main())
