"""Photographs to score on that are no crops of one another: those of GCompris' activities, from Debian.

    gcompris-qt-data (main; Debian 12 has 3.1-2, and it is free software whole): `apt-get download` fetches 300 MB once
    into `.peers/gcompris`. Its .rcc files are Qt's resource collections, which are read here.

Taken are the opaque ones of at least 150 pixels, of activities that show photographs: animals, monuments, musicians,
tools, windmills. They are fetched to measure on and are not shipped: the licence of each file stands in the package's
`copyright`, by names that files had before they were converted.
"""

from __future__ import annotations

import io
import re
import struct
import subprocess
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from PIL import Image

from harness.photos import PEERS

PACKAGE = "gcompris-qt-data"
SMALLEST = 150
# activity's folder of resources -> the folders in it that show photographs
FOLDERS = (
    {"categorization": ("images/monuments", "images/tools", "images/others", "images/renewable")}
    | {"erase": ("",), "explore_farm_animals": ("animals",)}
    | {"explore_monuments": ("egypt", "france", "germany", "india", "usa", "wonders")}
    | {"explore_world_animals": ("animals",), "explore_world_music": ("music",)}
)
# smaller copies of what `explore_monuments` has too
COPIES = (
    "categorization/images/monuments/brandenburgGate",
    "categorization/images/monuments/colosseum",
    "categorization/images/monuments/greatPyramid",
)


def photographs() -> dict[str, bytes]:
    """Name -> image file, by name. Those of one subject (`windmill1`, `windmill2`) begin with the same letters."""
    found: dict[str, bytes] = {}
    for activity, folders in FOLDERS.items():
        inside = f"/gcompris/src/activities/{activity}/resource"
        wanted = {PurePosixPath(inside, folder) for folder in folders}
        for path, data in sorted(_resources(_unpacked() / f"{activity}.rcc")):
            place = PurePosixPath(path)
            named = str(place.with_suffix("")).removeprefix("/gcompris/src/activities/").replace("/resource/", "/", 1)
            if place.parent in wanted and place.suffix == ".webp" and named not in COPIES and _is_whole(data):
                subject, rest = re.fullmatch(r"([A-Za-z_]+)(.*)", place.stem).groups()  # type: ignore[union-attr]
                place_of = "-".join([activity, *place.parent.relative_to(inside).parts]).replace("_", "-")
                found[f"{subject.strip('_')}-{f'{rest}-' if rest else ''}{place_of}.webp"] = data
    return dict(sorted(found.items()))


def _is_whole(data: bytes) -> bool:
    """Whether it is large enough and has no transparency, as a drawing or a cut-out has."""
    with Image.open(io.BytesIO(data)) as image:
        bands = image.convert("RGBA").getchannel("A").getextrema() if "A" in image.getbands() else (255, 255)
        return min(image.size) >= SMALLEST and bands[0] == 255


def _unpacked() -> Path:
    """The folder of the package's .rcc files."""
    folder = PEERS / "gcompris"
    resources = folder / "usr" / "share" / "gcompris-qt" / "rcc"
    if not resources.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as there:
            subprocess.run(["apt-get", "download", "--quiet", PACKAGE], cwd=there, check=True)
            (package,) = Path(there).glob(f"{PACKAGE}_*.deb")
            subprocess.run(["dpkg-deb", "--extract", str(package), str(folder)], check=True)
    return resources


def _resources(path: Path) -> Iterator[tuple[str, bytes]]:
    """The files of a Qt resource collection: path inside it -> bytes, those that deflate packed."""
    held = path.read_bytes()
    version, tree, data, names = struct.unpack(">4I", held[4:20])
    size = 14 if version < 2 else 22  # of a node of the tree

    def walk(number: int, folder: str) -> Iterator[tuple[str, bytes]]:
        node = tree + number * size
        at, flags = struct.unpack(">IH", held[node : node + 6])
        if number:
            (length,) = struct.unpack(">H", held[names + at : names + at + 2])
            folder += "/" + held[names + at + 6 : names + at + 6 + 2 * length].decode("utf-16-be")
        if flags & 2:
            count, first = struct.unpack(">II", held[node + 6 : node + 14])
            for child in range(first, first + count):
                yield from walk(child, folder)
            return
        (at,) = struct.unpack(">I", held[node + 10 : node + 14])
        (length,) = struct.unpack(">I", held[data + at : data + at + 4])
        packed = held[data + at + 4 : data + at + 4 + length]
        # a deflated file has its own length first
        yield folder, zlib.decompress(packed[4:]) if flags & 1 else packed

    if held[:4] != b"qres":
        raise ValueError(f"{path.name} is no collection of Qt's resources")
    yield from walk(0, "")
