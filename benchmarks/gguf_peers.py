"""GGUF files of ours against those that llama.cpp's quantizer makes with an importance matrix, all run by llama.cpp.

    python benchmarks/decode_peers.py --prepare         once: makes .peers/decode, with llama.cpp in it
    python benchmarks/gguf_peers.py
    python benchmarks/gguf_peers.py --models smollm2-135m --types q4_0 --no-time
    python benchmarks/gguf_peers.py --models smollm2-135m --widened --types iq4_xs iq3_s iq3_xxs iq2_m --no-time

Both sides begin at one float32 file of ours, equal to llama.cpp's converter's (`gguf_converter.py`), and see the same
calibration tokens: ours by the shipped recipe `gguf-TYPE` on so many of them, llama.cpp's by the importance matrix that
`quantkit imatrix` makes of them. Files may differ by 0.5 % in bytes. KL from the float32 file in nats a token, with
Student's t over sequences; the ratio's interval is a bootstrap over sequences, both sides drawn together. Texts:
held-out speeches (the kind that calibrated), fiction, code.

`--widened`: 256 divides no model's width, so that types of 32 weights replace most of the others. Channels and heads
of zeros make it a multiple; both sides then begin at the widened model, whose logits are the model's.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from harness.decode_prepared import PYTHON
from harness.process import THREADS, compiled, helper, quantkit, run
from harness.record import layout, parsing, record, sha256, show, verdicts
from scipy import stats

from quantkit.calibrate.statistics import imatrix
from quantkit.recipe import Recipe

MODELS = ["smollm2-135m", "gemma-3-270m", "qwen2.5-coder-0.5b"]
TYPES = ["q4_0", "iq4_nl", "q4_k_m", "q3_k_m"]
POINTS = ["iq4_xs", "iq3_s", "iq3_xxs", "iq2_m"]
# widths with which a model's heads and groups of keys stay whole
WIDTHS = {"smollm2-135m": 768, "qwen2.5-coder-0.5b": 1024}
# on the kind of text that calibrated, on others
LIMITS = {"q4_0": (0.4, 0.5), "iq4_nl": (0.4, 0.5), "q4_k_m": (0.5, 0.6), "q3_k_m": (0.5, 0.6)}
LIMITS |= dict.fromkeys(POINTS, (0.55, 0.55))
HOME, SAMPLES, LENGTH = "speeches", 32, 512
# share of the calibration sequences that the model writes itself, of both sides
GENERATED = float(Recipe.load("gguf-q4_0").calibration.generated)
TEXTS = Path(__file__).resolve().parent / "texts"
MODULES = ["json/decoder.py", "textwrap.py"]
SIDE = "gguf_side.py"
COLUMNS = layout(
    "model | type | text | bits:.2f | ours=bytes:,.0f | bytes_ratio=to llama.cpp's:.4f | kl=KL:.4f | kl_half=±:.4f | "
    "kl_llama=llama.cpp:.4f | kl_llama_half=±:.4f | ratio:.3f | interval=95 % | top1=top-1:.3f | "
    "top1_llama=llama.cpp:.3f"
)


def texts(model: str, place: Path, scored: int) -> dict[str, list[list[int]]]:
    """Kind -> token ids of its sequences."""
    code = place / "code.txt"
    code.write_text("".join((Path(sysconfig.get_path("stdlib")) / module).read_text() for module in MODULES))
    files = {"fiction": str(TEXTS / "alice.txt"), "code": str(code)}
    asked = {HOME: ("prose-en", "eval")} | {kind: (file, "calib") for kind, file in files.items()}
    return {
        kind: helper("ids.py", {"model": model, "set": name, "split": split, "samples": scored, "tokens": LENGTH})[0][
            "ids"
        ]
        for kind, (name, split) in asked.items()
    }


def widened(model: str, folder: Path) -> tuple[str, dict[str, Any]]:
    """The folder of a widened model, and how far its logits are from the model's."""
    about = folder.with_name(f"{folder.name}.json")
    if not about.exists():
        asked = {"model": model, "width": WIDTHS[model], "out": str(folder)}
        about.write_text(json.dumps(helper("widened.py", asked)[0]))
    return str(folder), json.loads(about.read_text())


def floats(model: str, place: Path) -> Path:
    """The float32 file that both sides begin at."""
    found = place / "float" / "gguf" / "model.gguf"
    if found.exists():
        return found
    recipe = place / "float32.yaml"
    recipe.write_text("schema: 1\nsummary: floats\nexport:\n  - gguf: {floats: float32}\n")
    compiled(model, recipe, place / "float", "--no-speed")
    return found


def importance(model: str, place: Path, samples: int) -> Path:
    """The importance matrix, as arrays that the other environment reads."""
    path, arrays = place / "imatrix.gguf", place / "imatrix.npz"
    if arrays.exists():
        return arrays
    asked = {"out": path, "samples": samples, "tokens": LENGTH, "generated": GENERATED}
    done = run(quantkit("imatrix", model, *(str(each) for name, of in asked.items() for each in (f"--{name}", of))))
    if done.status:
        raise SystemExit(done.err[-2000:])
    np.savez(arrays, **{name: each.numpy() for name, each in imatrix.read(path).squares.items()})
    return arrays


def row(model: str, name: str, kind: str, ours: Any, theirs: Any) -> dict[str, Any]:
    """KL of both sides on one kind of text, and their ratio."""
    values = [np.asarray(side)[:, 0] for side in (ours, theirs)]
    half = [stats.t.ppf(0.975, len(each) - 1) * stats.sem(each) for each in values]
    drawn = stats.bootstrap(
        values,
        lambda a, b, axis=-1: a.mean(axis=axis) / b.mean(axis=axis),
        paired=True,
        method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval
    agree = [np.asarray(side)[:, 1].mean() for side in (ours, theirs)]
    loss, before = np.asarray(ours)[:, 2].mean(), np.asarray(ours)[:, 3].mean()
    return (
        {"model": model, "type": name, "text": kind, "sequences": len(values[0]), "kl": float(values[0].mean())}
        | {"kl_half": float(half[0]), "kl_llama": float(values[1].mean()), "kl_llama_half": float(half[1])}
        | {"ratio": float(values[0].mean() / values[1].mean()), "ratio_ci95": [float(drawn.low), float(drawn.high)]}
        | {"top1": float(agree[0]), "top1_llama": float(agree[1]), "perplexity": float(np.exp(loss))}
        | {"perplexity_llama": float(np.exp(np.asarray(theirs)[:, 2].mean()))}
        | {"perplexity_float": float(np.exp(before))}
    )


def score(place: Path, name: str, given: dict[str, list[list[int]]], source: Path, files: dict[str, str]) -> Any:
    """What both files of a type lose on each text; kept beside them, since it depends on nothing but them."""
    parts = [*(sha256(Path(path)) for path in (*files.values(), source)), json.dumps(given)]
    key = hashlib.sha256("\n".join(parts).encode()).hexdigest()
    kept = place / f"score-{name}.json"
    if kept.exists() and (found := json.loads(kept.read_text()))["of"] == key:
        return found["losses"]
    asked = {"do": "score", "reference": str(source), "files": files, "texts": given, "threads": THREADS}
    losses = helper(SIDE, asked, python=PYTHON)[0]
    kept.write_text(json.dumps({"of": key, "losses": losses}))
    return losses


def compared(model: str, names: list[str], options: argparse.Namespace, place: Path) -> list[dict[str, Any]]:
    """Rows of one model, or of the folder of one: types x texts."""
    said_as = Path(model).name
    given = texts(model, place, options.scored)
    source, weights = floats(model, place), importance(model, place, options.samples)
    files: dict[str, dict[str, str]] = {}
    rows = []
    for name in names:
        theirs = str(place / f"llama-{name}.gguf")
        asked = {"do": "quantize", "source": str(source), "target": theirs, "type": name.upper()}
        answer, _ = helper(SIDE, {**asked, "imatrix": str(weights), "threads": THREADS}, python=PYTHON)
        out, spent = place / name, None
        if not out.exists():
            changes = ["--set", f"calibration.samples={options.samples}"]
            begun = out.with_name(f"{name}.partial").exists()  # by a run that was ended
            done = compiled(model, f"gguf-{name}", out, "--no-speed", *changes, *(["--resume"] if begun else []))[1]
            spent = None if begun else done.cpu
        ours = str(out / "gguf" / "model.gguf")
        size = Path(ours).stat().st_size
        about = {**answer, "ours": size, "bytes_ratio": size / answer["bytes"], "cpu_s": spent}
        files[name] = {"ours": ours, "llama.cpp": theirs}
        found = score(place, name, given, source, files[name])
        for kind in given:
            one = row(said_as, name, kind, found["ours"][kind], found["llama.cpp"][kind])
            rows.append(one | about | {"times": {}})
            said = ("model", "type", "text", "kl", "kl_llama", "ratio")
            print(json.dumps({key: one[key] for key in said} | {"bytes": about["bytes_ratio"]}), flush=True)
    if options.time:
        speeds = {name: timed(files[name], options.rounds) for name in names}
        rows = [each | {"times": speeds[each["type"]]} for each in rows]
    return rows


def timed(files: dict[str, str], rounds: int) -> dict[str, Any]:
    """Medians in seconds of both sides, [ours, llama.cpp's], and of their ratio in one round with its 95 % interval."""
    times, _ = helper(SIDE, {"do": "time", "files": files, "rounds": rounds, "threads": THREADS}, python=PYTHON)
    speeds: dict[str, Any] = {}
    for what in ("load", "decode", "prefill"):
        pair = [np.asarray(times[side][what]) for side in files]
        speeds[what] = [float(np.median(each)) for each in pair]
        ratios = (pair[0] / pair[1],)
        drawn = stats.bootstrap(ratios, np.median, method="percentile", rng=np.random.default_rng(0))
        speeds[f"{what}_ratio"] = float(np.median(ratios[0]))
        interval = drawn.confidence_interval
        speeds[f"{what}_ratio_ci95"] = [float(interval.low), float(interval.high)]
    return speeds


def main() -> int:
    parser = parsing(__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--types", nargs="+", choices=[*TYPES, *POINTS], default=TYPES)
    parser.add_argument("--widened", action="store_true", help="models whose width 256 divides, by zeros")
    parser.add_argument(
        "--samples", type=int, default=SAMPLES, help="calibration sequences of 512 tokens, of both sides"
    )
    parser.add_argument("--scored", type=int, default=12, help="sequences of each text, at most")
    parser.add_argument(
        "--folder", type=Path, help="where files stay: what is there is not made again, what was begun goes on"
    )
    parser.add_argument("--rounds", type=int, default=11, help="in which both sides of a type are loaded and timed")
    parser.add_argument("--no-time", dest="time", action="store_false")
    options = parser.parse_args()
    rows = []
    claim = "the same bytes, less harm than llama-quantize with an importance matrix of the same tokens, in llama.cpp"
    settings = {"samples": options.samples, "generated": GENERATED} | {
        "scored": options.scored,
        "tokens": LENGTH,
        "threads": THREADS,
    }
    if options.widened and (narrow := [each for each in options.models if each not in WIDTHS]):
        parser.error(f"no width for {', '.join(narrow)}")
    for alias in options.models:
        with tempfile.TemporaryDirectory() as temporary:
            name = f"{alias}-{WIDTHS[alias]}" if options.widened else alias
            place = Path(temporary) if options.folder is None else options.folder / name
            place.mkdir(parents=True, exist_ok=True)
            model, about = widened(alias, place / name) if options.widened else (alias, {})
            found = compared(model, options.types, options, place)
        record(f"gguf-peers-{Path(model).name}", claim, found, settings | ({"widened": about} if about else {}))
        rows += found
    printed = [each | {"interval": "{:.3f} to {:.3f}".format(*each["ratio_ci95"])} for each in rows]
    title = f"KL from the float32 file, in llama.cpp, {options.samples} x {LENGTH} tokens to calibrate"
    show(title, printed, COLUMNS)
    checks = {}
    for each in rows:
        limit = LIMITS[each["type"]][each["text"] != HOME]
        checks[f"{each['model']} {each['type']} {each['text']}: KL at most {limit} of llama.cpp's"] = (
            each["ratio"] <= limit
        )
        checks[f"{each['model']} {each['type']}: bytes within 0.5 %"] = abs(each["bytes_ratio"] - 1) <= 0.005
        for what in ("load", "decode", "prefill") if each["times"] else ():
            low = each["times"][f"{what}_ratio_ci95"][0]
            checks[f"{each['model']} {each['type']}: {what} not slower than llama.cpp's file, beyond noise"] = low <= 1
    return verdicts(checks)


if __name__ == "__main__":
    raise SystemExit(main())
