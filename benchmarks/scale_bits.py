"""Scales and zero points of 4-bit weights: bits against KL, for ways that runtimes read and for coarser ones.

    python benchmarks/scale_bits.py                                   every way, on the shipped text
    python benchmarks/scale_bits.py --ways "zero point of a row" --calibration ids.jsonl --eval ids.json

`int4-best` with other grids. Group sizes, symmetric codes and nf4 are settings of recipes. Formats of this file, given
to the compile as plug-ins, are the others: one zero point for several groups or for a row; scales of 8 or 6 bits, 4 of
them an exponent, under a factor for the matrix. Each is written as a dense checkpoint, and scored in plain
transformers. Bits are those of a layout that held it.
"""

from __future__ import annotations

import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from harness import process

from quantkit.formats.base.integers import IntegerFormat


@dataclass(frozen=True)
class Coarse(IntegerFormat):
    """int4 with one zero point for several groups (0: for a row), or scales of few bits.

    Args:
        groups: groups side by side that share a zero point.
        mantissa: bits of a scale behind its first one; None is a float16.
    """

    groups: int = 1
    mantissa: int | None = None

    def parameters(self, low: Any, high: Any, scheme: Any, global_scale: Any = None) -> tuple[Any, Any]:
        """One zero point for the groups in [G, ...], and scales that reach both ends."""
        low, high = low.clamp(max=0.0), high.clamp(min=0.0)
        wanted = self.low - (self.high - self.low) * low / (high - low).clamp(min=1e-12)
        parts = wanted.split(self.groups or wanted.shape[0])
        zero = torch.cat([part.mean(0, keepdim=True).expand_as(part) for part in parts])
        zero = zero.round().clamp(self.low + 1, self.high - 1)
        scale = torch.maximum(high / (self.high - zero), low / (self.low - zero))
        return self.stored(scale, scheme), zero.to(torch.int8)

    def stored(self, scale: Any, scheme: Any, global_scale: Any = None) -> Any:
        """The nearest scale of so many bits."""
        if self.mantissa is None:
            return super().stored(scale, scheme)
        fraction, exponent = torch.frexp(scale.float().clamp(min=6.1e-5))
        places = self.mantissa + 1
        return torch.ldexp((fraction * 2**places).round(), exponent - places).half()


ROOT, TOKENS = Path(__file__).resolve().parent.parent, 512
ZERO_2, ZERO_4 = (Coarse(f"int4_zero_{count}", 4, groups=count) for count in (2, 4))
ZERO_ROW = Coarse("int4_zero_row", 4, groups=0)
SCALE_8, SCALE_6 = (Coarse(f"int4_scale_{bits}", 4, mantissa=bits - 4) for bits in (8, 6))
PLUGINS = ("ZERO_2", "ZERO_4", "ZERO_ROW", "SCALE_8", "SCALE_6")
CLAIM = "KL of 4-bit weights by the bits of their scales and zero points"
DENSE = "export=[{checkpoint: {layout: dense}}]"
SYMMETRIC = "scheme.weights.symmetric=true"


def grouped(size: int, *more: str) -> tuple[str, ...]:
    """`int4-best` in groups of a size."""
    return (f"scheme.weights.group={size}", *more)


# way -> recipe, its changes, bits of a scale, weights of a scale, bits of a zero point, groups of a zero point (0: all)
WAYS: dict[str, tuple[str, tuple[str, ...], int, int, int, int]] = {
    "groups of 64": ("int4-best", (), 16, 64, 4, 1),
    "groups of 96": ("int4-best", grouped(96), 16, 96, 4, 1),
    "groups of 192": ("int4-best", grouped(192), 16, 192, 4, 1),
    "groups of 64, symmetric": ("int4-best", (SYMMETRIC,), 16, 64, 0, 1),
    "groups of 32, symmetric": ("int4-best", grouped(32, SYMMETRIC), 16, 32, 0, 1),
    "groups of 32": ("int4-best", grouped(32), 16, 32, 4, 1),
    "nf4, groups of 64": ("nf4", (), 8, 64, 0, 1),
    "one zero point for 2 groups of 64": ("int4-best", ("scheme.weights.format=int4_zero_2",), 16, 64, 4, 2),
    "one zero point for 4 groups of 64": ("int4-best", ("scheme.weights.format=int4_zero_4",), 16, 64, 4, 4),
    "one zero point for a row": ("int4-best", ("scheme.weights.format=int4_zero_row",), 16, 64, 4, 0),
    "scales of 8 bits": ("int4-best", ("scheme.weights.format=int4_scale_8",), 8, 64, 4, 1),
    "scales of 6 bits": ("int4-best", ("scheme.weights.format=int4_scale_6",), 6, 64, 4, 1),
}


def bits(scale: int, group: int, zero: int, shared: int) -> float:
    """Bits a weight; what exists once for a row or a matrix is left out."""
    return 4 + scale / group + (zero / group / shared if shared else 0)


def offered(place: Path) -> Path:
    """Let the compiles that follow find this file's formats, as those of a package; a target that runs them."""
    package = place / "scale_bits-1.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: scale-bits\nVersion: 1\n")
    names = {name: globals()[name].name for name in PLUGINS}
    lines = [f"{called} = scale_bits:{name}" for name, called in names.items()]
    (package / "entry_points.txt").write_text("\n".join(["[quantkit.formats]", *lines, ""]))
    paths = [str(place), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    cells = "".join(f'  {name}:\n    torch: {{state: emulated, source: "a trial"}}\n' for name in names.values())
    begun, rest = (ROOT / "export" / "cpu-x86.yaml").read_text().split("\nformats:")
    first, rest = rest.split("\n", 1)
    target = place / "trial.yaml"
    target.write_text(f"{begun}\nformats:{first}\n{cells}{rest}")
    return target


def scored(way: str, target: Path, model: str, request: dict[str, Any]) -> dict[str, Any]:
    """One compile, and its checkpoint through the score of the peers."""
    recipe, changes, *spent = WAYS[way]
    data = (f"calibration.samples={request['samples']}", f"calibration.tokens={TOKENS}")
    options = [word for change in (*data, *changes, DENSE) for word in ("--set", change)]
    given = ("--calibration", request["ids"], "--target", target, "--no-speed", *options)
    out, threads = Path(request["out"]), request["threads"]
    result, _ = process.compiled(model, recipe, out, *given, env=process.environment(threads))
    answer, _ = process.helper(
        ROOT / "benchmarks/peers/quantkit_side.py", {**request, "out": str(out / "model")}, threads=threads
    )
    row = {"way": way, "recipe": recipe, "set": list(changes), "bits": bits(*spent), "texts": answer["texts"]}
    return row | {"cpu_seconds": result["seconds"]["quantize_cpu"], "versions": answer["versions"]}


def main() -> int:
    from harness.record import layout, parsing, record, show
    from quality_peers import inputs

    parser = parsing(__doc__)
    parser.add_argument("--model", default="smollm2-135m", help="an alias or a folder of a float model")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--calibration", type=Path, help="a .txt, or a .jsonl of input_ids; default: prose-en, calib")
    parser.add_argument("--eval", type=Path, nargs="+", help=".txt, or .json lists of ids; default: prose-en, eval")
    parser.add_argument("--samples", type=int, default=8, help="calibration sequences of 512 tokens")
    parser.add_argument("--scored", type=int, default=12, help="sequences of 512 tokens of each text to score on")
    parser.add_argument("--threads", type=int, default=process.THREADS)
    parser.add_argument("--work", type=Path, help="keep ids and the original's logits here; a later run reads them")
    options = parser.parse_args()

    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        target = offered(place)
        given, hashes = inputs(options, options.work or place)
        settings = {"model": Path(options.model).name, "threads": options.threads, "samples": options.samples, **hashes}
        for way in options.ways:
            out = f"{tempfile.mkdtemp(dir=place)}/made"
            request = {**given, "samples": options.samples, "threads": options.threads, "out": out}
            rows.append(scored(way, target, options.model, {**request, "scheme": "int4-g64"}))
            label = re.sub(r"[^a-z0-9.]+", "-", f"{settings['model']} {way}")
            record(f"scale_bits/{label}", CLAIM, rows[-1:], settings)
    flat = [{**row, **next(iter(row["texts"].values()))} for row in rows]
    show(
        f"{options.model}, int4-best",
        flat,
        layout("way | bits:.3f | kl=KL:.4f | kl_se=± se:.4f | cpu_seconds=CPU s:.0f"),
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
