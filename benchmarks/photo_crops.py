"""Crops of photographs to calibrate and to score image networks on: no pixel of a scoring crop was calibrated on.

    python benchmarks/photo_crops.py            480 scoring crops to .peers/photos/eval-480.npz
    python benchmarks/photo_crops.py --set DIR  the shipped set: calib.zip, tune.zip, eval.zip and lines for its card

The photographs come inside the wheels of scikit-image and scikit-learn (`harness/photos.py`), which are fetched once
and not installed. The .npz holds `images`, uint8 [480, 224, 224, 3], `photograph` [480], of each crop the photograph's
number, for intervals that resample photographs, and a `preprocess.yaml` beside it. That the shipped set is made just so
is checked too.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import sys
import zipfile
from pathlib import Path

import numpy as np
import yaml
from harness.photos import PEERS, PHOTOGRAPHS, Crop, Split, crops
from harness.record import verdicts

from quantkit import content
from quantkit.calibrate.card import Card
from quantkit.calibrate.images import PREPROCESS

COUNTS: dict[Split, int] = {"calib": 64, "tune": 21, "eval": 36}
QUALITY = 90


def shared_pixels(scoring: list[Crop], others: list[Crop]) -> int:
    """How many pairs of crops have a pixel of a photograph in common."""
    return sum(
        first.photograph == second.photograph
        and abs(2 * (first.left - second.left) + first.side - second.side) < first.side + second.side
        and abs(2 * (first.top - second.top) + first.side - second.side) < first.side + second.side
        for first in scoring
        for second in others
    )


def archive(found: list[Crop]) -> bytes:
    """The crops as JPEG in a zip; the same bytes each time."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as file:
        for crop in found:
            encoded = io.BytesIO()
            crop.image.save(encoded, "JPEG", quality=QUALITY, optimize=True)
            file.writestr(zipfile.ZipInfo(f"{crop.name}.jpg", (1980, 1, 1, 0, 0, 0)), encoded.getvalue())
    return data.getvalue()


def write_set(folder: Path) -> None:
    for split, count in COUNTS.items():
        data = archive(crops(split, count))
        (folder / f"{split}.zip").write_bytes(data)
        digest = hashlib.sha256(data).hexdigest()
        print(f"  - {{split: {split}, path: {split}.zip, bytes: {len(data)}, sha256: {digest}}}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=480)
    parser.add_argument("--out", type=Path, default=PEERS / "photos")
    parser.add_argument("--set", type=Path, help="write the shipped set into this folder, and nothing else")
    options = parser.parse_args()
    if options.set is not None:
        write_set(options.set)
        return 0
    scoring = crops("eval", options.count)
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"eval-{options.count}.npz"
    names = [each.name for each in PHOTOGRAPHS]
    np.savez_compressed(
        path,
        images=np.stack([np.asarray(crop.image) for crop in scoring]),
        photograph=np.array([names.index(crop.photograph) for crop in scoring]),
    )
    card = Card.load(content.find("calibration", "photos"))
    assert card.preprocess is not None
    (options.out / PREPROCESS).write_text(yaml.safe_dump(card.preprocess.model_dump()))
    print(f"{len(scoring)} crops of {len({crop.photograph for crop in scoring})} photographs in {path}")
    seen = [crop for split in ("calib", "tune") for crop in crops(split, COUNTS[split])]
    made = {split: sorted(crop.name for crop in crops(split, count)) for split, count in COUNTS.items()}
    shipped = {
        split: sorted(
            Path(name).stem for _, data in card.read(split) for name in zipfile.ZipFile(io.BytesIO(data)).namelist()
        )
        for split in COUNTS
    }
    return verdicts(
        {
            "no scoring crop shares a pixel with a crop of calib or tune": shared_pixels(scoring, seen) == 0,
            "the shipped set holds just the crops that this makes": made == shipped,
        }
    )


if __name__ == "__main__":
    sys.exit(main())
