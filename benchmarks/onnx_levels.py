"""Is the ONNX graph of a bundle the model that its checkpoint is?

    python benchmarks/onnx_levels.py BUNDLE

Scores a bundle's ONNX in ONNX Runtime at accuracy levels 0 (float32 products) and 4 (activations rounded to int8), on
the text that the bundle was scored on. Claim: at level 0 the KL from the original equals the checkpoint's, scored in
torch when the bundle was compiled, within 1e-3. What level 4 costs is printed beside it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from harness.record import record, show, verdicts

from quantkit.bundle import Bundle
from quantkit.measurement.accuracy import score
from quantkit.measurement.rows import Row
from quantkit.model.source.open import open_model
from quantkit.model.streaming.stream import StreamedModel
from quantkit.pipeline.blocks import tokens
from quantkit.recipe import Recipe
from quantkit.runtimes.onnxruntime.session import OnnxModel

_LIMIT = 1e-3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path, help="with a checkpoint and onnx/")
    parser.add_argument("--no-record", action="store_true")
    options = parser.parse_args()
    bundle = Bundle.load(options.bundle)
    manifest = bundle.manifest
    stored = [Row.model_validate(row) for row in bundle.measurements]
    checkpoint = next(row.value for row in stored if row.name == "accuracy.kl" and row.runtime == "torch")
    assert checkpoint is not None
    original = StreamedModel(open_model(manifest.model.source.ref.removeprefix("alias:")))
    recipe = Recipe.from_dict(manifest.recipe, name=str(manifest.recipe["name"]))
    _, scoring = tokens.load(recipe, original.source, calibrate=True, decisions=[])
    rows = [{"what": "checkpoint, torch", "kl": checkpoint, "difference": 0.0}]
    for level in (0, 4):
        model = OnnxModel(bundle.path / "onnx", accuracy_level=level)
        kl = float(score.score(original, model, scoring).kl.mean())
        rows.append({"what": f"ONNX, level {level}", "kl": kl, "difference": kl - checkpoint})
    show(
        f"{bundle.path.name}: KL from the original", rows, {"what": "export", "kl": "KL:.5f", "difference": "less:.5f"}
    )
    claim = "at accuracy level 0 the ONNX graph has the checkpoint's KL within 1e-3"
    settings = {"recipe": recipe.name, "set": scoring.name, "positions": scoring.items}
    record("onnx-levels", claim, rows, settings, write=not options.no_record)
    return verdicts({claim: abs(rows[1]["difference"]) <= _LIMIT})  # type: ignore[arg-type]


if __name__ == "__main__":
    raise SystemExit(main())
