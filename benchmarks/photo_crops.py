"""Crops of photographs to calibrate and to score image networks on: no photograph scored on was calibrated on.

    python benchmarks/photo_crops.py            the shipped set with 480 crops to score on, in .peers/photos-480
    python benchmarks/photo_crops.py --set DIR  the shipped set: calib.zip, tune.zip, eval.zip and lines for its card

The photographs come inside the wheels of scikit-image and scikit-learn (`harness/photos.py`), which are fetched once
and not installed. `quantkit compile efficientnet-lite0 --calibration ./.peers/photos-480` then calibrates on what is
shipped and scores on the 480. Its eval.npz also holds `photograph`, of each crop the photograph's number, for intervals
that resample photographs. That the shipped set is made just so is checked too.
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

COUNTS: dict[Split, int] = {"calib": 64, "tune": 18, "eval": 30}
QUALITY = 90


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


def write_scoring(card: Card, scoring: list[Crop], folder: Path) -> None:
    """The shipped set, but for other crops to score on."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [each.name for each in PHOTOGRAPHS]
    data = io.BytesIO()
    np.savez_compressed(
        data,
        images=np.stack([np.asarray(crop.image) for crop in scoring]),
        photograph=np.array([names.index(crop.photograph) for crop in scoring]),
    )
    (folder / "eval.npz").write_bytes(data.getvalue())
    for split in ("calib", "tune"):
        for path, held in card.read(split):
            (folder / path.name).write_bytes(held)
    kept = [file.model_dump() for file in card.files if file.split != "eval"]
    digest = hashlib.sha256(data.getvalue()).hexdigest()
    files = [*kept, {"split": "eval", "path": "eval.npz", "bytes": len(data.getvalue()), "sha256": digest}]
    written = card.model_dump(mode="json", by_alias=True) | {"files": files}
    (folder / "card.yaml").write_text(yaml.safe_dump(written, sort_keys=False, allow_unicode=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=480)
    parser.add_argument("--out", type=Path, help="default: .peers/photos-COUNT")
    parser.add_argument("--set", type=Path, help="write the shipped set into this folder, and nothing else")
    options = parser.parse_args()
    if options.set is not None:
        write_set(options.set)
        return 0
    scoring = crops("eval", options.count)
    folder = options.out or PEERS / f"photos-{options.count}"
    card = Card.load(content.find("calibration", "photos"))
    write_scoring(card, scoring, folder)
    print(f"{len(scoring)} crops of {len({crop.photograph for crop in scoring})} photographs in {folder}")
    seen = [crop for split in ("calib", "tune") for crop in crops(split, COUNTS[split])]
    calibrated = {crop.photograph for crop in seen}
    made = {split: sorted(crop.name for crop in crops(split, count)) for split, count in COUNTS.items()}
    shipped = {
        split: sorted(
            Path(name).stem for _, data in card.read(split) for name in zipfile.ZipFile(io.BytesIO(data)).namelist()
        )
        for split in COUNTS
    }
    return verdicts(
        {
            "no photograph scored on is in calib or tune": calibrated.isdisjoint(crop.photograph for crop in scoring),
            "the shipped set holds just the crops that this makes": made == shipped,
        }
    )


if __name__ == "__main__":
    sys.exit(main())
