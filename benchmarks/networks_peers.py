"""Networks of images in INT8: ours beside ONNX Runtime's own static quantization and nncf, on one float graph.

    python benchmarks/networks_peers.py fashion-mnist-cnn
    python benchmarks/networks_peers.py efficientnet-lite0 --set ./.peers/photographs   # photo_crops.py makes it

All calibrate on the same images and are scored on the same others, in plain ONNX Runtime sessions. One peer is
`quant_pre_process` and `quantize_static` with Q/DQ, weights by channel, calibrated by min-max, percentile and entropy,
with `reduce_range`, which its documentation asks for on processors without VNNI, where sums saturate otherwise, and on
processors with VNNI also without. The other is nncf with its defaults (in `.peers/nncf`, made by the first run). What
is told: agreement with the float graph, of all images and of those that it is surer of than 0.3; the share of right
answers where there are labels; how much oftener ours agrees than a peer, on the same images; bytes; and passes
of 1 and 32 images against the float graph, interleaved (ABBA), with 1 and 2 threads. Intervals are over what the set
says is independent: crops of five photographs are five. Claims: ours agrees at least as often as the best peer, and is
within 0.3 points of the float graph.
"""

from __future__ import annotations

import hashlib
import itertools
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from harness import nncf
from harness.record import parsing, record, show, verdicts
from harness.turns import in_turns
from onnxruntime.quantization import CalibrationDataReader, CalibrationMethod, QuantFormat, QuantType, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process

import quantkit
from quantkit import machine
from quantkit.calibrate.sets.images import ImageSet, load_images
from quantkit.graph.open import open_graph
from quantkit.measurement.accuracy.labelled import difference_interval, share_interval
from quantkit.model.source.alias import ALIASES, materialize
from quantkit.stats.abba import compare
from quantkit.stats.shares import mcnemar

METHODS = {"minmax": "MinMax", "percentile": "Percentile", "entropy": "Entropy"}
SURE = 0.3
# name -> recipe and changes: as it ships, with free codes (slow and exact without VNNI), with 7 bits, mixed
SIDES: dict[str, tuple[str, list[str]]] = {
    "int8-network": ("int8-network", []),
    "int8-mixed": ("int8-mixed", []),
    "free": ("int8-network", ["gptq.unsaturated=false"]),
    "int7": ("int8-network", ["gptq.unsaturated=false", "scheme.weights.format=int7"]),
}


class Feeds(CalibrationDataReader):
    """Images one by one."""

    def __init__(self, name: str, images: Any) -> None:
        self._left: Iterator[Any] = iter([{name: image[None]} for image in images])

    def get_next(self) -> Any:
        """The next image; None after the last."""
        return next(self._left, None)


def session(path: Path, threads: int = 0) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = threads
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def logits(path: Path, images: Any) -> Any:
    loaded = session(path)
    name = loaded.get_inputs()[0].name
    return np.concatenate([loaded.run(None, {name: images[i : i + 32]})[0] for i in range(0, len(images), 32)])


def accuracy(original: Any, own: Any, labels: Any, clusters: Any) -> dict[str, Any]:
    chance = np.exp(original - original.max(axis=1, keepdims=True))
    sure = (chance / chance.sum(axis=1, keepdims=True)).max(axis=1) > SURE
    same = original.argmax(axis=1) == own.argmax(axis=1)
    of_sure = None if clusters is None else clusters[sure]
    found: dict[str, Any] = {
        **{"agreement": float(same.mean()), "agreement_ci95": list(share_interval(same, clusters))},
        **{"sure": float(same[sure].mean()), "sure_ci95": list(share_interval(same[sure], of_sure))},
        **{"sure_images": int(sure.sum()), "images": int(same.size)},
    }
    if clusters is not None:
        found |= {"clusters": int(np.unique(clusters).size), "sure_clusters": int(np.unique(of_sure).size)}
    if labels is not None:
        found["top1"] = float((own.argmax(axis=1) == labels).mean())
    return found


def against(original: Any, own: Any, peer: Any, clusters: Any) -> dict[str, Any]:
    """By how much more often one side agrees than another, on the same images."""
    ours, theirs = (side.argmax(axis=1) == original.argmax(axis=1) for side in (own, peer))
    return {
        "more": float(ours.mean() - theirs.mean()),
        "more_ci95": difference_interval(ours, theirs, clusters),
        "p": mcnemar(theirs, ours, clusters).p,
    }


def speeds(files: dict[str, Path], shape: tuple[int, ...], seconds: float) -> dict[str, dict[str, Any]]:
    """Side -> `b1t2`: times as fast as the float graph, with its interval."""
    found: dict[str, dict[str, Any]] = {name: {} for name in files}
    for threads in (1, 2):
        sessions = {name: session(path, threads) for name, path in files.items()}
        for batch in (1, 32):
            x = np.random.default_rng(0).standard_normal((batch, *shape), np.float32)
            steps = [partial(one.run, None, {one.get_inputs()[0].name: x}) for one in sessions.values()]
            for step in steps:
                step()
            generator = np.random.default_rng(1)
            times = in_turns(steps, blocks=(10, 400), seconds=seconds, generator=generator)
            base = times[list(files).index("float")]
            for name, taken in zip(files, times, strict=True):
                if name != "float":
                    against = compare(taken, base)
                    found[name][f"b{batch}t{threads}"] = [against.ratio, *against.ratio_ci95]
    return found


def main() -> int:
    parser = parsing(__doc__)
    parser.add_argument("model", choices=[name for name, alias in ALIASES.items() if alias.kind == "network"])
    parser.add_argument("--set", help="of images; the model's own")
    parser.add_argument("--scored", nargs="+", default=[], metavar="SET", help="others to score on as well, untimed")
    parser.add_argument(
        "--side", nargs="+", default=list(SIDES), choices=list(SIDES), help="of ours; the first is what is claimed of"
    )
    parser.add_argument(
        "--seconds", type=float, default=20.0, help="of timing, for each batch and number of threads; 0: none"
    )
    options = parser.parse_args()
    alias = ALIASES[options.model]
    chosen = options.set or alias.calibration
    graph = materialize(alias) / "model.onnx"
    given = open_graph(graph).inputs[0]
    asked: dict[str, Any] = {"seed": 0, "shape": given.shape, "dtype": given.dtype, "where": given.name}
    calib = load_images(chosen, "calib", samples=128, preprocess=alias.preprocess, **asked)
    scored = [
        load_images(each, "eval", samples=None, preprocess=alias.preprocess, **asked)
        for each in (chosen, *options.scored)
    ]
    with tempfile.TemporaryDirectory() as folder:
        files: dict[str, Path] = {"float": graph}
        for side in options.side:
            recipe, changes = SIDES[side]
            bundle = quantkit.compile(
                options.model, recipe=recipe, calibration=chosen, out=Path(folder) / side, changes=changes, speed=False
            )
            files[f"quantkit {side}"] = bundle.path / "onnx" / "model.onnx"
        prepared = Path(folder) / "prepared.onnx"
        quant_pre_process(str(graph), str(prepared))
        reduced = [True, *([False] if any("vnni" in each for each in machine.isa_features()) else [])]
        for (name, method), reduce in itertools.product(METHODS.items(), reduced):
            side = f"onnxruntime {name}" + ("" if reduce else ", 8 bits")
            path = Path(folder) / f"{side}.onnx"
            try:
                quantize_static(
                    str(prepared),
                    str(path),
                    Feeds(given.name, calib.images),
                    quant_format=QuantFormat.QDQ,
                    per_channel=True,
                    activation_type=QuantType.QUInt8,
                    weight_type=QuantType.QInt8,
                    reduce_range=reduce,
                    calibrate_method=getattr(CalibrationMethod, method),
                )
                files[side] = path
            except Exception as error:  # the peer's reason is part of the record
                print(f"{side}: {type(error).__name__}: {error}"[:300])
        feeds = [{given.name: image[None]} for image in calib.images]
        print(nncf.quantized(graph, feeds, Path(folder) / "nncf.onnx", "network"))
        if (Path(folder) / "nncf.onnx").is_file():
            files["nncf"] = Path(folder) / "nncf.onnx"
        fast = speeds(files, calib.images.shape[1:], options.seconds) if options.seconds else {}
        done = 0
        for place, scoring in enumerate(scored):
            sha256 = hashlib.sha256(scoring.images.tobytes()).hexdigest()
            rows, claims = judged(files, scoring, {} if place else fast, f"quantkit {options.side[0]}")
            settings = {
                **{"model": options.model, "set": scoring.name, "sha256": sha256},
                **{"calibration": len(calib.images), "calibration_set": calib.name},
            }
            name = f"networks_peers-{options.model}" + (f"-{scoring.name}" if options.set else "")
            record(name, "; ".join(claims), rows, settings)
            done |= verdicts(claims)
    return done


def judged(
    files: dict[str, Path], scoring: ImageSet, fast: dict[str, dict[str, Any]], own: str
) -> tuple[list[dict[str, Any]], dict[str, bool]]:
    """The rows of all sides on one set, shown, and what is claimed of one of ours."""
    answers = {name: logits(path, scoring.images) for name, path in files.items()}
    rows: list[dict[str, Any]] = []
    for name, path in files.items():
        found = accuracy(answers["float"], answers[name], scoring.labels, scoring.clusters)
        rows.append({"side": name, "bytes": path.stat().st_size, **found, **fast.get(name, {})})
    columns = {"side": "", "agreement": ".4f", "sure": ".4f", "top1": ".4f", "bytes": ","}
    show(
        f"{scoring.name}, {len(scoring.images)} images",
        rows,
        {name: f"{name}:{form}" if form else name for name, form in columns.items() if name in rows[0]}
        | {key: f"{key}:.2f" for key in ("b1t1", "b32t1", "b1t2", "b32t2") if fast},
    )
    ours = next(row for row in rows if row["side"] == own)
    peers = [row for row in rows if row["side"].startswith(("onnxruntime", "nncf"))]
    best = max(peers, key=lambda row: row["agreement"])
    for row in peers:
        row["ours"] = against(answers["float"], answers[own], answers[row["side"]], scoring.clusters)
    claims = {
        "ours agrees with the float graph at least as often as the best peer": ours["agreement"] >= best["agreement"]
    }
    if scoring.labels is not None:
        claims["ours is within 0.3 points of the float graph"] = abs(ours["top1"] - rows[0]["top1"]) <= 0.003
    return rows, claims


if __name__ == "__main__":
    raise SystemExit(main())
