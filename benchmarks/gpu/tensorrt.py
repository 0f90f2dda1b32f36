"""What only a GPU can say about an engine: whether it computes what was decided on, and how fast, in one command.

    quantkit compile --recipe int4-tensorrt --target rtx-4090 --out int4     where the bundle is made; no GPU needed
    python benchmarks/gpu/tensorrt.py --expect int4 --out int4.npz           there too: logits of its network, on CPU
    PYTHONPATH=wheels python benchmarks/gpu/tensorrt.py int4 fp16 --expected int4.npz --out run.json

The last one on the GPU. `wheels` is a folder of unpacked wheels, for a machine that cannot install them: TensorRT-RTX
or TensorRT, and what quantkit itself imports (pydantic, PyYAML). For each bundle:

1. correct   logits of a prompt and of steps after it against those that the network's own arithmetic gave
2. decode    a step at batch 1 to 64 with a full cache, under CUDA graphs, interleaved (ABBA): each engine, torch in
             bfloat16 (a decoder of the same sizes), and ONNX Runtime on CUDA where it is installed and has the graph
3. layers    the inspector's precision by layer, and the ten costliest

The result is one JSON file like that of `run_all.py`, of which this is no part: it needs bundles. ONNX and ONNX Runtime
are needed by `--expect` alone.
Exit code 1: a logit is wrong. 3: clocks fell during the run.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

import numpy as np  # noqa: E402
import torch  # noqa: E402
from parts import decoder  # noqa: E402
from parts.steps import BASELINE  # noqa: E402

import quantkit  # noqa: E402
from quantkit.bundle import Bundle  # noqa: E402
from quantkit.measurement.cuda.device import GpuDevice, Implementation, interleaved, ratio, summary, versions  # noqa: E402  # noqa: E402
from quantkit.runtimes import load_runtime  # noqa: E402

# this file is called like a library: its folder must not be where that is looked for
sys.path[:] = [place for place in sys.path if Path(place or ".").resolve() != HERE]

BATCHES = (1, 2, 4, 8, 16, 32, 64)
# as `export._check_network` has it, for 16-bit arithmetic
LIMIT = 2.0**-6
_PROMPT, _TOKENS = 12, 16
# steps in one sample: what starting a graph takes is then a small part of it
_LEAST = 8
Load = Callable[[Bundle], Any]


def main() -> int:
    """Run, write, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundles", nargs="*", type=Path, help="bundles with an engine for this GPU")
    parser.add_argument("--runtime", choices=("tensorrt_rtx", "tensorrt"), default="tensorrt_rtx")
    parser.add_argument("--expect", type=Path, metavar="BUNDLE", help="write what a network's logits are, and stop")
    parser.add_argument("--expected", nargs="*", type=Path, default=[], help="such files, named after their bundles")
    parser.add_argument("--batches", default=",".join(map(str, BATCHES)))
    parser.add_argument("--context", type=int, default=512, help="tokens in the cache")
    parser.add_argument("--blocks", type=int, default=6, help="of A B B A for each batch")
    parser.add_argument("--seconds", type=float, default=450.0, help="after which nothing new begins")
    parser.add_argument("--out", type=Path, default=Path("tensorrt-run.json"))
    args = parser.parse_args()
    if args.expect is not None:
        np.savez(args.out, **expected(args.expect / "engine"))
        return 0
    if not args.bundles:
        parser.error("give a bundle, or --expect BUNDLE")
    if not torch.cuda.is_available():
        parser.error("no GPU is at hand; --expect BUNDLE is what can be done without")
    device = GpuDevice("cuda", dry=False)
    found = run(
        args.bundles,
        load_runtime(args.runtime).load,
        device,
        expectations={path.stem: dict(np.load(path)) for path in args.expected},
        batches=[int(size) for size in args.batches.split(",")],
        context=args.context,
        blocks=args.blocks,
        seconds=args.seconds,
    )
    args.out.write_text(json.dumps(found, indent=1, allow_nan=False) + "\n")
    return report(found, args.out)


def run(
    bundles: Sequence[Path],
    load: Load,
    device: GpuDevice,
    *,
    expectations: Mapping[str, Mapping[str, np.ndarray]],
    batches: Sequence[int],
    context: int,
    blocks: int,
    seconds: float,
) -> dict[str, Any]:
    """All of it; what cannot be done stands among `skipped`, with its reason.

    Args:
        bundles: the first gives the sizes of torch's model.
        load: a bundle's model in its engine.
        device: that it runs on.
        expectations: bundle's name -> what `expected` gave.
        batches, context, blocks, seconds: see `main`.
    """
    begin = time.monotonic()
    models: dict[str, Any] = {}
    skipped: list[dict[str, Any]] = []
    found: dict[str, Any] = {
        **{"schema": 1, "quantkit": quantkit.__version__, "device": device.describe(), "versions": versions()},
        "settings": {"context": context, "blocks": blocks, "dry_run": device.dry},
        **{"correct": [], "layers": [], "rows": [], "skipped": skipped},
    }
    device.sample("begin")
    for path in bundles:
        try:
            bundle = Bundle.load(path)
            models[path.name] = model = load(bundle)
            found["layers"].append(layers_of(model, bundle))
        except Exception as error:
            skipped.append({"bundle": path.name, "reason": f"{type(error).__name__}: {error}"[:600]})
            continue
        if path.name in expectations:
            found["correct"].append({"bundle": path.name, **correct(model, expectations[path.name])})
    if models:
        sides: dict[str, Callable[[int], Callable[[], object]]] = {}
        sizes = sizes_of(bundles[0] / "engine")
        sides[BASELINE] = _torch(sizes, context, device)
        for name, model in models.items():
            sides[name] = _engine(model, context)
        if (bundles[0] / "onnx" / "model.onnx").is_file():
            sides["onnxruntime cuda"] = _onnxruntime(bundles[0] / "onnx" / "model.onnx", context)
        found["rows"] = _decode(sides, batches, blocks, context, device, begin + seconds, skipped)
    device.sample("end")
    found |= {"clocks": device.clocks, "throttled": not device.dry and device.throttled()}
    found["seconds"] = time.monotonic() - begin
    return found


def _decode(
    sides: Mapping[str, Callable[[int], Callable[[], object]]],
    batches: Sequence[int],
    blocks: int,
    context: int,
    device: GpuDevice,
    deadline: float,
    skipped: list[dict[str, Any]],
) -> list[dict[str, Any]]:
    """Rows `latency.decode_step`: batch by batch, all sides interleaved."""
    generator = np.random.default_rng(0)
    rows: list[dict[str, Any]] = []
    for batch in batches:
        if time.monotonic() > deadline:
            skipped.append({"batch": batch, "reason": "the time was up"})
            continue
        ready = []
        for name, make in sides.items():
            try:
                side = Implementation(name, [make(batch)], 0, {"context": context}, least=_LEAST)
                ready.append((name, side.ready()))
            except Exception as error:
                skipped.append({"side": name, "batch": batch, "reason": f"{type(error).__name__}: {error}"[:300]})
        if not ready or ready[0][0] != BASELINE:
            continue
        times = interleaved([sampler for _, sampler in ready], blocks, generator)
        for (name, _), taken in zip(ready, times, strict=True):
            better, interval = ratio(times[0], taken, generator)
            rows.append(
                {
                    **{"schema": 1, "name": "latency.decode_step", "unit": "s", "stat": "median", "better": "lower"},
                    **{"subject": name, "runtime": name, "batch": batch},
                    **{"shape": {"new_tokens": 1, "context": context}, "settings": {"graphs": not device.dry}},
                    **summary(taken, generator),
                    "baseline": {
                        **{"subject": f"torch, {BASELINE}", "value": float(np.median(times[0]))},
                        **{"ratio": better, "ratio_ci95": interval},
                    },
                    **{"device": device.identity(), "versions": versions()},
                    "flags": ["dry-run"] if device.dry else [],
                }
            )
        ready.clear()
    return rows


# --- sides ------------------------------------------------------------------------------------------------------------


def _engine(model: Any, context: int) -> Callable[[int], Callable[[], object]]:
    return lambda batch: model.launches(batch, min(context, model.capacity - 1))


def _torch(sizes: decoder.Sizes, context: int, device: GpuDevice) -> Callable[[int], Callable[[], object]]:
    at = device.torch_device
    model = decoder.Decoder(sizes, decoder.dense(torch.bfloat16, at), torch.bfloat16, at)
    return lambda batch: decoder.stepping(model, batch, context)


def _onnxruntime(path: Path, context: int) -> Callable[[int], Callable[[], object]]:
    """The ONNX export on CUDA: launched step by step, since its own graphs want fixed addresses of its own."""
    import onnxruntime

    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        why = f"onnxruntime {onnxruntime.__version__} has no CUDAExecutionProvider"

        def absent(batch: int) -> Callable[[], object]:
            raise RuntimeError(why)

        return absent
    session = onnxruntime.InferenceSession(str(path), providers=["CUDAExecutionProvider"])

    def make(batch: int) -> Callable[[], object]:
        binding = session.io_binding()
        feeds = {"input_ids": np.zeros((batch, 1), np.int64), "attention_mask": np.ones((batch, context + 1), np.int64)}
        held = []
        for value in session.get_inputs():
            if value.name.startswith("past_key_values."):
                kind = np.float16 if "float16" in value.type else np.float32
                _, heads, _, size = value.shape
                shape = (batch, int(heads), context + 1, int(size))
                cache = onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros(shape, kind), "cuda", 0)
                binding.bind_ortvalue_input(value.name, cache)
                binding.bind_ortvalue_output(value.name.replace("past_key_values", "present"), cache)
                held.append(cache)
            else:
                array = feeds.get(value.name, np.zeros((batch, 1), np.int64))
                binding.bind_ortvalue_input(value.name, onnxruntime.OrtValue.ortvalue_from_numpy(array, "cuda", 0))
        binding.bind_output("logits", "cuda")

        def step() -> object:
            session.run_with_iobinding(binding)
            return held

        return step

    return make


def sizes_of(folder: Path) -> decoder.Sizes:
    """Of a bundle's model, from `config.json`."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    heads = int(config["num_attention_heads"])
    return decoder.Sizes(
        hidden=int(config["hidden_size"]),
        wide=int(config["intermediate_size"]),
        layers=int(config["num_hidden_layers"]),
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        vocabulary=int(config["vocab_size"]),
    )


# --- whether it is right ----------------------------------------------------------------------------------------------


def expected(folder: Path) -> dict[str, np.ndarray]:
    """`ids` [1, 16] and `logits` [1, 16, V] of `network.onnx`, on the CPU, as the exporter checks it."""
    import onnx_ir as ir

    from quantkit.exporters.tensorrt.check import RunningNetwork, in_floats

    running = RunningNetwork(in_floats(ir.load(folder / "network.onnx")), folder)
    vocabulary = json.loads((folder / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    ids = np.random.default_rng(0).integers(0, vocabulary, (1, _TOKENS))
    return {"ids": ids, "logits": running.run(running.state(1, _TOKENS), ids)}


def correct(model: Any, wanted: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """The largest difference of a logit as a share of the largest logit: of a prompt, and of steps after it."""
    ids, logits = wanted["ids"], wanted["logits"]
    state = model.state(1, _TOKENS)
    parts = [model.run(state, ids[:, :_PROMPT])]
    parts += [model.run(state, ids[:, [at]]) for at in range(_PROMPT, _TOKENS)]
    size = float(np.abs(logits).max())
    errors = np.abs(np.concatenate(parts, axis=1) - logits).max(axis=(0, 2)) / size
    worst = {"prompt": float(errors[:_PROMPT].max()), "steps": float(errors[_PROMPT:].max())}
    return {**worst, "limit": LIMIT, "ok": max(worst.values()) <= LIMIT}


def layers_of(model: Any, bundle: Bundle) -> dict[str, Any]:
    """What `quantkit measure` would keep of the engine's layers."""
    from quantkit.pipeline.engines import look

    try:
        return dict(look(model, bundle.manifest.layers).model_dump(mode="json"))
    except Exception as error:
        # as it says it, for whoever has to teach the reader another spelling
        return {"engine": bundle.path.name, "reason": f"{type(error).__name__}: {error}"[:600]}


def report(found: Mapping[str, Any], out: Path) -> int:
    """A short table; the exit status."""
    print(f"{found['device']['name']}: {found['seconds']:.0f} s; {out.name}")
    for row in found["correct"]:
        print(f"  {row['bundle']}: {'right' if row['ok'] else 'WRONG'}, {row['prompt']:.2e}, steps {row['steps']:.2e}")
    for row in found["rows"]:
        print(f"  {row['subject']} {row['batch']}: {1e3 * row['value']:.3f} ms, {row['baseline']['ratio']:.2f}")
    for row in found["skipped"]:
        print(f"  skipped: {row}")
    if any(not row["ok"] for row in found["correct"]):
        return 1
    return 3 if found["throttled"] else 0


if __name__ == "__main__":
    sys.exit(main())
