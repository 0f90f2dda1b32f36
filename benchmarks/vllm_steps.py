"""How far off is `quantkit plan --runtime vllm`? Random models teach it, and real ones hold it.

    quantkit runtime add vllm --install
    python benchmarks/vllm_steps.py --fit           # times random models, writes planning/efficiencies.jsonl
    python benchmarks/vllm_steps.py                 # forecasts SmolLM2 and Qwen2.5-Coder from those, then times them
    python benchmarks/vllm_steps.py --target h100   # either on a GPU, with the figures that its target states
    python benchmarks/vllm_steps.py --again RECORD --fit            # of its steps, and of the models that it lacks
    python benchmarks/vllm_steps.py --again RECORD --load RECORD …  # the plan against loads by vllm_load.py

vLLM's own generator sends bursts of requests at once to vLLM's own server, so a step includes scheduler, sampler and
HTTP server:

    prefill of a prompt     time to first token of a request alone
    decode step at B        median gap between two tokens in the second half of each of B answers

Each burst is sent twice; the spread is that between the two. Ceilings are measured before each model. The largest ones
count, as a busy moment lowers one. Targets: half of the steps of each format within 25 % of what was measured, and at
least eight of ten within the printed interval; nine of ten figures of a load within 25 %.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from shutil import copytree
from statistics import median
from typing import Any

from harness.forecasts import COLUMNS, claims, compared, figures, here, learned, ship, unscored
from harness.process import helper
from harness.random_model import describe
from harness.record import layout, parsing, record, show, verdicts

from quantkit import machine
from quantkit.measurement.operators import ceilings
from quantkit.model.source.open import open_model
from quantkit.pipeline.load import free_port
from quantkit.pipeline.plan import PlanQuestion, plan
from quantkit.planning import efficiency
from quantkit.planning.batching import Server
from quantkit.planning.efficiency import Sample
from quantkit.planning.forecast import Served
from quantkit.planning.held import held
from quantkit.planning.load import visit
from quantkit.planning.roofline import ModelStep
from quantkit.planning.traffic import RequestKind, Traffic
from quantkit.runtimes import apart
from quantkit.runtimes.vllm import OWN, environment
from quantkit.target import Target

# heads of 64, which vLLM's kernels take; widths, depths and vocabularies differ
SIZES: list[dict[str, Any]] = [
    {"layers": 12, "hidden": 512, "intermediate": 1536, "heads": 8, "kv_heads": 4, "vocabulary": 49152, "tied": True},
    {"layers": 32, "hidden": 512, "intermediate": 1408, "heads": 8, "kv_heads": 2, "vocabulary": 16384, "tied": True},
    {"layers": 20, "hidden": 768, "intermediate": 2048, "heads": 12, "vocabulary": 32768, "tied": True},
    {"layers": 16, "hidden": 1280, "intermediate": 3456, "heads": 20, "kv_heads": 4, "vocabulary": 65536, "tied": True},
]
# rounding is what differs least between models, and takes seconds
RECIPES: Mapping[str, tuple[str, list[str]]] = {
    "bfloat16": ("float", []),
    "int4": ("rtn-int4", []),
    "int8": ("int8-dynamic", ["passes=[rtn]"]),
}
OUTPUT, CONTEXT = 32, 1280
# (requests, tokens of their prompts) of each burst
BURSTS = 2 * [(1, 64), (1, 256), (1, 1024), (4, 256), (16, 128), (32, 128), (4, 1024)]
HOLDS = 0.9
HELD = layout("bundle | subject | what | rate:g | planned:.3g | measured:.3g | ratio:.2f")
MODELS = "smollm2-135m,qwen2.5-coder-0.5b"


# (model, format, step, seconds, relative spread)
Timed = tuple[str, str, ModelStep, float, float]


@dataclass(frozen=True)
class Place:
    """The device that is timed.

    Args:
        target: its target.
        device: as measurements name it.
        read: bytes a second that it reads; None on a GPU, whose target states them.
    """

    target: Target
    device: Mapping[str, str]
    read: float | None = None

    @classmethod
    def of(cls, name: str, ceiled: Iterable[Mapping[str, float]]) -> Place:
        """Return a GPU by its target's name; for none this processor, with the largest of some ceilings."""
        if name:
            return cls(Target.load(name), machine.gpu(str(machine.gpus()[0][0]["name"])))
        best: dict[str, float] = {}
        for one in ceiled:
            best |= {place: max(value, best.get(place, 0.0)) for place, value in one.items()}
        return cls(here(best), machine.device(), best["memory.read_bandwidth"])

    def served(self, model: str, form: str, taught: Sequence[Sample]) -> Served:
        """Return the plan of a model in vLLM."""
        question = PlanQuestion(model, [RECIPES[form][0]], self.target, "vllm", prompt=256, output=OUTPUT)
        one = plan(question, taught).candidates[0].served
        assert one is not None
        return one


def ceilings_now() -> dict[str, float]:
    """Measure the ceilings of this processor."""
    kept = ceilings.measured(machine.cores(), ("read", "compute", "bf16"), size=2048, runs=9)
    return figures(one.as_dict(device=machine.device(), versions={}) for one in kept)


def checkpoint(model: str, form: str, out: Path) -> Path:
    """Return the checkpoint of a model in a format, which is made unless it is there."""
    recipe, changes = RECIPES[form]
    if recipe == "float":
        return open_model(model).path
    if not out.exists():
        with unscored(model, recipe, out.with_name(f"{out.name}.bundle"), changes) as (bundle, _):
            copytree(bundle / "model", out)
    return out


def steps(model: str, folders: Mapping[str, Path], *, eager: bool) -> Iterator[Timed]:
    """Time the steps of a model's checkpoints, which are by format."""
    place, visits = apart.demand(OWN.name), []
    for form, folder in folders.items():
        port = free_port()
        words = ["--model", str(folder.absolute()), "--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16"]
        words += ["--max-model-len", str(CONTEXT), "--no-enable-prefix-caching"]
        words += ["--enforce-eager"] if eager else []
        program = [place.python, "-I", "-m", "vllm.entrypoints.openai.api_server", *words]
        visits.append({"side": form, "command": program, "url": f"http://127.0.0.1:{port}", "where": str(folder)})
    rates = [{"rate": math.inf, "requests": count, "prompt": prompt} for count, prompt in BURSTS]
    job = {"do": "load", "visits": visits, "rates": rates, "prompt": BURSTS[0][1], "output": OUTPUT}
    job |= {"tokenizer": str(folders["bfloat16"].absolute()), "ready": 900, "idle": 600}
    variables = {**environment(), "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "no_proxy": "127.0.0.1"}

    def tell(share: float, text: str) -> None:
        print(f"{share:.0%} {text}", flush=True)

    rows = place.run(OWN, job, tell, where="steps", environment=variables)
    for form in folders:
        seen: dict[ModelStep, list[float]] = {}
        bursts = (row for row in rows if row["side"] == form and "rate" in row)
        for (count, prompt), row in zip(BURSTS, bursts, strict=True):
            gaps = [gap for one in row["itls"] for gap in one[len(one) // 2 :]]
            seen.setdefault(ModelStep(count, 1, prompt + 3 * OUTPUT // 4), []).append(median(gaps))
            if count == 1:
                seen.setdefault(ModelStep(1, prompt), []).append(row["ttfts"][0])
        for step, seconds in seen.items():
            yield model, form, step, sum(seconds) / len(seconds), max(seconds) / min(seconds) - 1


def taught(place: Place, served: Served, subject: str, step: ModelStep, seconds: float) -> Sample:
    """Return what a timed step teaches."""
    bound, device = served.bound(step), place.device
    moved = bound.together(served.target)
    return Sample(
        *(device["id"], device["name"], device["kind"], "vllm", served.format, served.compute),
        *(step.phase, step.rows, moved, moved / seconds, place.read, f"{subject} {served.format}", subject),
        shares=bound.shares(served.target) | efficiency.called(bound.calls),
    )


def checkpoints(model: str, folder: Path) -> dict[str, Path]:
    """Return the checkpoints of a model by format."""
    return {form: checkpoint(model, form, folder / f"{Path(model).name}-{form}") for form in RECIPES}


def random(number: int, folder: Path) -> str:
    """Return a random model, which is made unless it is there."""
    model = folder / f"random{number}"
    if not model.exists():
        helper("random_model.py", {"folder": str(model), "positions": CONTEXT, **SIZES[number]})
    return str(model)


def again(path: Path, folder: Path) -> tuple[list[Timed], dict[str, dict[str, float]]]:
    """Read the timed steps and the ceilings of a record; random models are described anew."""
    recorded = json.loads(path.read_text())
    ceiled = recorded["settings"]["ceilings"]
    for number, size in enumerate(SIZES):
        if f"random{number}" in ceiled:
            describe(folder / f"random{number}", positions=CONTEXT, **size)
    timed = []
    for row in recorded["rows"]:
        step = ModelStep(row["batch"], row["tokens"], row["context"])
        model = str(folder / row["model"]) if row["model"].startswith("random") else row["model"]
        timed.append((model, row["format"], step, row["measured_ms"] / 1e3, row["spread"]))
    return timed, ceiled


def loaded(path: Path, place: Place) -> Iterator[dict[str, Any]]:
    """Set the plan of each bundle and its original beside a load, which `vllm_load.py` recorded."""
    rows = [row for row in json.loads(path.read_text())["rows"] if "rate" in row["settings"]]
    for bundle in dict.fromkeys(row["bundle"] for row in rows):
        model, _, recipe = bundle.partition("--")
        ours = [row for row in rows if row["bundle"] == bundle]
        size = ours[0]["shape"]
        traffic, longest = Traffic([RequestKind(size["prompt"], size["output"])]), size["prompt"] + size["output"]
        counts = {row["settings"]["rate"]: row["n"] // 2 for row in ours if row["name"] == "load.requests"}
        for name in (recipe, "float"):
            question = PlanQuestion(model, [name], place.target, "vllm", **size)
            served = plan(question, efficiency.shipped()).candidates[0].served
            assert served is not None
            seconds = partial(_seconds, served)
            server = Server.of(seconds, longest=longest, cache_tokens=128 * longest, max_batch=128)
            visits = {rate: visit(server, traffic, rate, count) for rate, count in counts.items()}
            for one in held(name, ours, visits, None, original=name == "float"):
                yield {"bundle": bundle, **one.as_dict(), "near": one.near}


def _seconds(served: Served, batch: int, tokens: int, past: int) -> float:
    return served.timed(ModelStep(batch, tokens, past)).seconds or 0.0


def main() -> int:
    parser = parsing(__doc__)
    parser.add_argument("--fit", action="store_true", help="time random models, and ship what they teach")
    parser.add_argument("--models", default=MODELS)
    parser.add_argument("--target", default="", help="of a GPU; left out, this processor")
    parser.add_argument("--work", type=Path, help="keeps models and checkpoints there")
    parser.add_argument("--again", type=Path, help="takes the steps of a record, and times the models that it lacks")
    parser.add_argument("--load", type=Path, nargs="+", help="records of vllm_load.py here, to hold the plan against")
    options = parser.parse_args()
    timed, ceiled = list[Timed](), dict[str, dict[str, float]]()
    with tempfile.TemporaryDirectory() as name:
        folder = options.work or Path(name)
        if options.again:
            timed, ceiled = again(options.again, folder)
        models = [f"random{one}" for one in range(len(SIZES))] if options.fit else options.models.split(",")
        for one in () if options.load else [one for one in models if one not in ceiled]:
            model = random(int(one.removeprefix("random")), folder) if options.fit else one
            folders = checkpoints(model, folder)
            ceiled[Path(model).name] = {} if options.target else ceilings_now()
            timed += steps(model, folders, eager=not options.target)
        place, known = Place.of(options.target, ceiled.values()), [] if options.fit else efficiency.shipped()
        served = {(model, form): place.served(model, form, known) for model, form, *_ in timed}
    rows, samples = [], []
    for model, form, step, seconds, spread in timed:
        name = Path(model).name
        rows.append({"model": name, "format": form, **compared(served[model, form].timed(step), seconds)})
        rows[-1] |= {"spread": spread}
        if options.fit:
            subject = f"random {json.dumps(SIZES[int(name.removeprefix('random'))])}"
            samples.append(taught(place, served[model, form], subject, step, seconds))
    if options.fit:
        ship("vllm", samples)
    kinds = sorted({one.what for one in efficiency.shipped() if one.runtime == "vllm"})
    show("steps of vLLM's server", rows, COLUMNS | {"spread": "spread:.2f"})
    settings = {"bursts": BURSTS, "output": OUTPUT, "sizes": SIZES, "note": options.note, "ceilings": ceiled}
    settings |= {"learned": learned(efficiency.shipped(), "vllm", kinds, place.device)}
    if options.fit:
        record("vllm-steps-fit", "what random models teach of vLLM's steps", rows, settings)
        return 0
    if options.load:
        figures_of = [one for path in options.load for one in loaded(path, place)]
        show("the plan against a load in vLLM's server", figures_of, HELD)
        record("vllm-held", "figures of plans for vLLM beside a measured load", figures_of, settings)
        near = [row["near"] for row in figures_of]
        return verdicts({f"{HOLDS:.0%} of the figures of a load within 25 %": sum(near) >= HOLDS * len(near)})
    record("vllm-steps", "forecasts of vLLM's steps from other models", rows, settings)
    return verdicts(claims(rows))


if __name__ == "__main__":
    raise SystemExit(main())
