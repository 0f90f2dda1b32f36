"""Work that writes, small enough to fail at each of its calls: prepared, done, and known by what it leaves."""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "bundle"))
import fake_build

from quantkit.bundle import Bundle, cached


@dataclass(frozen=True)
class Work:
    """Something that is done in a folder, and done again after it failed.

    Args:
        prepare: what has to be there before.
        act: does it; a second time goes on, or does it anew.
        left: what is there when it is done: the same after any fault.
    """

    prepare: Callable[[Path], object]
    act: Callable[[Path], object]
    left: Callable[[Path], Any]


def _bundle(folder: Path) -> Bundle:
    return fake_build.compile_fake(folder / "out", resume=True, steps=2, size=100)


def _waiting(folder: Path) -> Bundle:
    return fake_build.compile_fake(folder / "out", resume=True, steps=4, size=100, together=3)


def _whole(folder: Path) -> Any:
    bundle = Bundle.load(folder / "out")
    assert [check.name for check in bundle.verify() if not check.ok] == []
    assert not (folder / "out.partial").exists()
    report = folder / "out" / "report.html"
    return bundle.manifest.content_sha256, report.read_bytes() if report.exists() else None


def _put(folder: Path) -> None:
    Bundle.load(folder / "out").put("report.html", b"a page")


def _add(folder: Path) -> None:
    bundle = Bundle.load(folder / "out")
    if any(entry.path.startswith("onnx/") for entry in bundle.manifest.files):
        bundle.demand_intact()  # it was added before the fault
        return
    beside = folder / "beside"
    beside.mkdir(exist_ok=True)
    (beside / "model.onnx").write_bytes(b"a graph")
    bundle.add_content("onnx", beside)


def _cache(folder: Path) -> None:
    place = folder / "cache" / "kept"
    place.parent.mkdir(exist_ok=True)
    if cached.is_intact(place):
        return
    made = folder / "cache" / "made"
    made.mkdir(exist_ok=True)
    (made / "file").write_bytes(b"content")
    cached.remove(place)
    cached.put(made, place)


def _kept(folder: Path) -> Any:
    assert cached.is_intact(folder / "cache" / "kept")
    return (folder / "cache" / "kept" / "file").read_bytes()


def _rows(folder: Path) -> None:
    from quantkit.measurement.rows import write_rows

    write_rows(folder / "rows.jsonl", [])


def _tune(folder: Path) -> None:
    from quantkit.bundle.disk import write_atomic, writing

    for number in range(3):
        with writing(folder / "front.json"):
            write_atomic(folder / "front.json", json.dumps({"number": number}).encode())


WORK = {
    "compile": Work(lambda folder: None, _bundle, _whole),
    "waiting": Work(lambda folder: None, _waiting, _whole),
    "put": Work(_bundle, _put, _whole),
    "export": Work(_bundle, _add, _whole),
    "cache": Work(lambda folder: None, _cache, _kept),
    "rows": Work(lambda folder: None, _rows, lambda folder: (folder / "rows.jsonl").read_bytes()),
    "answer": Work(lambda folder: None, _tune, lambda folder: (folder / "front.json").read_bytes()),
}
