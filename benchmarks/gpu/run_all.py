"""Everything that only a GPU can say about the kernels, in one command, within 8 minutes on an H200.

    python benchmarks/gpu/run_all.py --out run.json

1. compile   the sweep's kernels, in processes side by side, into Triton's cache
2. correct   every kernel against float64, float16 and bfloat16, M from 1 to 200, each run three times over
3. ceilings  read and copy bandwidth, product rates by input type, launch latency; again at the end
4. sweep     the linear shapes of Llama-3-8B, M from 1 to 512: configurations, then baseline, kernel, raw twin, torch's
             own operators, dequantize-then-matmul and peers, interleaved (ABBA), weights rotated past the cache
5. whole     decode steps of a model of Llama-3-8B's build, under CUDA graphs, against 16 bits; and what the sum of its
             linears leaves unexplained
6. dispatch  the fastest of them for each shape and batch

The result is one JSON file with device, driver, clocks, versions, rows as in `measurements.jsonl`, and what was skipped
and why. It needs torch, Triton and NumPy, and of quantkit what needs no more. Exit code 3: clocks fell during the run.

`--dry-run` runs the same plumbing on tiny sizes, on the CPU with TRITON_INTERPRET=1; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

import numpy as np  # noqa: E402
import torch  # noqa: E402
from parts import correct, decoder, end_to_end  # noqa: E402
from parts.shapes import LLAMA_3_8B, VARIANTS  # noqa: E402
from parts.sweep import Sweep  # noqa: E402

import quantkit  # noqa: E402
from quantkit.kernels.dispatch import fastest  # noqa: E402
from quantkit.measurement.cuda import ceilings  # noqa: E402
from quantkit.measurement.cuda.device import GpuDevice, versions  # noqa: E402

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
# formats in the order in which time runs out
_SWEPT = 7
_PROCESSES = 8
# shares of the time after which a stage begins nothing new
_COMPILED_BY, _SWEPT_BY = 0.35, 0.8
# whole models: which of the variants, at which batches, with how many tokens in the cache
_WHOLE, _STEPS, _CONTEXT = (0, 3, 6), (1, 4, 16, 64), 512


def main() -> int:
    """Run, write, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("gpu-run.json"), help="the JSON file")
    parser.add_argument("--seconds", type=float, default=450.0, help="after which nothing new begins")
    parser.add_argument("--dtype", choices=("bf16", "fp16"), default="bf16", help="of activations and baseline")
    parser.add_argument("--blocks", type=int, default=6, help="of A B B A for each comparison")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes: plumbing only")
    parser.add_argument("--compile-part", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not args.dry_run and not torch.cuda.is_available():
        parser.error("no GPU is at hand; `--dry-run` with TRITON_INTERPRET=1 checks the plumbing on a CPU")
    device = GpuDevice("cuda" if torch.cuda.is_available() else "cpu", args.dry_run)
    dtype = torch.bfloat16 if args.dtype == "bf16" else torch.float16
    if args.compile_part is not None:
        return compile_part(args.compile_part, device, dtype, time.monotonic() + _COMPILED_BY * args.seconds)
    begin = time.monotonic()
    found = run(args, device, dtype, begin)
    found["seconds"] = time.monotonic() - begin
    args.out.write_text(json.dumps(cleaned(found), indent=1, allow_nan=False) + "\n")
    return report(found, args.out)


def run(args: argparse.Namespace, device: GpuDevice, dtype: torch.dtype, begin: float) -> dict[str, Any]:
    """All stages; each leaves what it has, whatever becomes of the next."""
    generator = np.random.default_rng(0)
    blocks = args.blocks if not device.dry else 1
    found: dict[str, Any] = {
        **{"schema": 1, "quantkit": quantkit.__version__, "device": device.describe(), "versions": versions()},
        "settings": {"dtype": args.dtype, "blocks": blocks, "seconds": args.seconds, "dry_run": device.dry},
    }
    stages = []

    def stage(name: str) -> None:
        device.sample(name)
        stages.append({"stage": name, "at_s": time.monotonic() - begin})

    stage("compile")
    found["compile"] = compiled(args) if not device.dry else []
    stage("correct")
    found["correct"] = correct.checked(device)
    stage("ceilings")
    found["ceilings"] = ceilings.measured(device, blocks, generator)
    stage("sweep")
    sweep = Sweep(device, found["ceilings"], dtype, blocks, begin + _SWEPT_BY * args.seconds, versions())
    if device.dry:
        sweep.run(((32, 128),), (3,), (VARIANTS[1], VARIANTS[5]))
    else:
        sweep.run(LLAMA_3_8B, BATCHES, VARIANTS[:_SWEPT])
    stage("whole")
    sizes = decoder.TINY if device.dry else decoder.LLAMA_3_8B
    steps, left_out = end_to_end.measured(
        sizes,
        (VARIANTS[1], VARIANTS[5]) if device.dry else [VARIANTS[i] for i in _WHOLE],
        (3,) if device.dry else _STEPS,
        4 if device.dry else _CONTEXT,
        device=device,
        dtype=dtype,
        blocks=blocks,
        generator=generator,
        timings=sweep.timings,
        versions=versions(),
        deadline=begin + args.seconds,
    )
    stage("ceilings again")
    # the same products at the end: what they lost is what heat or power took
    again = ceilings.measured(device, blocks, generator)
    found["drift"] = {
        name: {"first": first, "last": last}
        for name in ("bf16", "fp16")
        if (first := ceilings.of(found["ceilings"], "ceiling.compute", name))
        and (last := ceilings.of(again, "ceiling.compute", name))
    }
    stage("end")
    found |= {"rows": sweep.rows + steps, "configs": sweep.configs, "skipped": sweep.skipped + left_out}
    found["stages"] = stages
    found["dispatch"] = {name: fastest(timings).as_dict() for name, timings in sweep.timings.items()}
    found["clocks"] = device.clocks
    found["throttled"] = not device.dry and (device.throttled() or ceilings.slower(found["ceilings"], again))
    return found


def compiled(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Compile in processes side by side: the main one then finds everything in Triton's cache."""
    words = [sys.executable, __file__, "--dtype", args.dtype, "--seconds", str(args.seconds)]
    environment = {**os.environ, "CUDA_MODULE_LOADING": "LAZY"}
    running = [
        subprocess.Popen(
            [*words, "--compile-part", str(part)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for part in range(_PROCESSES)
    ]
    found = []
    for part, process in enumerate(running):
        output, _ = process.communicate()
        found.append({"part": part, "exit": process.returncode, "said": output[-500:]})
    return found


def compile_part(part: int, device: GpuDevice, dtype: torch.dtype, deadline: float) -> int:
    """One process's share: each kernel run once on a weight of a real shape."""
    from quantkit.kernels.configs import candidates
    from quantkit.kernels.workspace import Workspace
    from quantkit.measurement.cuda import sides
    from quantkit.measurement.cuda.weights import weight

    shape, memory, place = LLAMA_3_8B[2], Workspace(), 0
    for variant in VARIANTS[:_SWEPT]:
        held = None
        for batch in (16, 32, 64, 128, 256):
            x = sides.inputs(batch, shape[1], dtype, device.torch_device)
            for config in candidates(batch):
                for decode in (True, False):
                    place += 1
                    mine = place % _PROCESSES == part
                    if not mine or (variant.native and not decode) or time.monotonic() > deadline:
                        continue
                    held = held or [weight(variant, *shape, device.torch_device)]
                    try:
                        sides.ours(held, x, config, memory, decode=decode).steps[0]()
                    except Exception as error:
                        print(variant.name, config, f"{type(error).__name__}: {error}"[:200])
    return 0


def cleaned(value: Any) -> Any:
    """Without NaN and infinity, which JSON has no words for."""
    if isinstance(value, dict):
        return {str(key): cleaned(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [cleaned(each) for each in value]
    if isinstance(value, float) and not np.isfinite(value):
        return None
    return value


def report(found: dict[str, Any], out: Path) -> int:
    """A short table; the exit status."""
    wrong = [row for row in found["correct"] if not row["ok"]]
    name, checks = found["device"]["name"], len(found["correct"])
    print(f"{name}: {checks} checks, {len(wrong)} wrong; {found['seconds']:.0f} s; {out.name}")
    for row in wrong[:10]:
        print("  wrong:", {key: row[key] for key in row if key != "ok"})
    for row in found["ceilings"]:
        kind, flags = row["settings"].get("compute_type", ""), "; ".join(row["flags"])
        print(f"  {row['name']} {kind} {row['value']} {row['unit']} {flags}")
    print("  N x K, format, M: candidate, us, times as fast as the baseline, bound us")
    for row in found["rows"]:
        if row["name"] == "latency.op" and row["runtime"] != "torch.linear":
            op, variant = row["op"], row["settings"]["variant"]
            bound = "" if op["bound_s"] is None else f"{1e6 * op['bound_s']:.2f}"
            figures = f"{1e6 * row['value']:.2f} {row['baseline']['ratio']:.2f} {bound}"
            print(f"  {op['N']}x{op['K']} {variant} {op['M']}: {row['runtime']} {figures}")
    print("  whole model, batch: ms, times as fast as 16 bits, of which ms not explained by its linears")
    for row in found["rows"]:
        if row["name"] == "latency.decode_step":
            rest = row["settings"]["residual_s"]
            unexplained = "" if rest is None else f"{1e3 * rest:.2f}"
            figures = f"{1e3 * row['value']:.2f} {row['baseline']['ratio']:.2f} {unexplained}"
            print(f"  {row['settings']['variant']} {row['batch']}: {figures}")
    print(f"  {len(found['skipped'])} skipped; clocks fell: {found['throttled']}")
    if wrong:
        return 1
    return 3 if found["throttled"] else 0


if __name__ == "__main__":
    sys.exit(main())
