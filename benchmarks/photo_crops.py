"""Photographs to calibrate and to score image networks on: none that is scored on was calibrated on.

    python benchmarks/photo_crops.py                the shipped set with 480 crops to score on, in .peers/photos-480
    python benchmarks/photo_crops.py --photographs  with 220 photographs to score on, in .peers/photographs
    python benchmarks/photo_crops.py --set DIR      the shipped set: its three .zip files, and lines for its card

The crops are of photographs inside the wheels of scikit-image and scikit-learn (`harness/photos.py`), which are fetched
once and not installed. 480 crops come from five photographs, and say as much of the next photograph as five can: their
eval.npz has `clusters`, of each crop the photograph's number, and intervals are over those. For a figure with an
interval worth reading there are the 220 photographs of 163 subjects in Debian's package of GCompris' data
(`harness/photographs.py`; on other systems nothing fetches it), whole, and clustered by subject.

`quantkit compile efficientnet-lite0 --calibration ./.peers/photographs` then calibrates on what is shipped and scores
on those. That the shipped set is made just so is checked too.
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
from harness.photographs import photographs
from harness.photos import PEERS, PHOTOGRAPHS, Crop, Split, crops
from harness.record import verdicts

from quantkit import content
from quantkit.calibrate.sets.card import Card

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


def arrays(scoring: list[Crop]) -> bytes:
    """Crops as an .npz that says of each which photograph it is of."""
    names = [each.name for each in PHOTOGRAPHS]
    data = io.BytesIO()
    np.savez_compressed(
        data,
        images=np.stack([np.asarray(crop.image) for crop in scoring]),
        clusters=np.array([names.index(crop.photograph) for crop in scoring]),
    )
    return data.getvalue()


def whole() -> bytes:
    """Photographs in a zip, as they came; the same bytes each time."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as file:
        for name, held in photographs().items():
            file.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), held)
    return data.getvalue()


def write_scoring(card: Card, name: str, data: bytes, folder: Path) -> None:
    """The shipped set, but for what it is scored on: a file's name and bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(data)
    for split in ("calib", "tune"):
        for path, held in card.read(split):
            (folder / path.name).write_bytes(held)
    kept = [file.model_dump() for file in card.files if file.split != "eval"]
    digest = hashlib.sha256(data).hexdigest()
    files = [*kept, {"split": "eval", "path": name, "bytes": len(data), "sha256": digest}]
    written = card.model_dump(mode="json", by_alias=True) | {"files": files}
    (folder / "card.yaml").write_text(yaml.safe_dump(written, sort_keys=False, allow_unicode=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=480)
    parser.add_argument("--photographs", action="store_true", help="220 photographs to score on, in .peers/photographs")
    parser.add_argument("--out", type=Path, help="default: .peers/photos-COUNT, .peers/photographs")
    parser.add_argument("--set", type=Path, help="write the shipped set into this folder, and nothing else")
    options = parser.parse_args()
    if options.set is not None:
        write_set(options.set)
        return 0
    card = Card.load(content.find("calibration", "photos"))
    scoring = crops("eval", options.count)
    if options.photographs:
        folder = options.out or PEERS / "photographs"
        write_scoring(card, "eval.zip", whole(), folder)
        print(f"{len(photographs())} photographs in {folder}")
    else:
        folder = options.out or PEERS / f"photos-{options.count}"
        write_scoring(card, "eval.npz", arrays(scoring), folder)
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
