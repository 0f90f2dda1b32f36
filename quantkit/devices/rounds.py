"""Two bundles timed in turns on a device, for a comparison; and text that a model there goes on with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

from quantkit.bundle import Bundle
from quantkit.bundle.disk import walk
from quantkit.devices.answers import ROUND, Cells, MadeTokens, RoundTimes, invalid
from quantkit.devices.reached import Reached
from quantkit.devices.sides import running
from quantkit.measurement.timing.clocks import Between
from quantkit.measurement.timing.rounds import BASELINE, CANDIDATE, LEAST, MOST, SIDES, RoundsJob, joined
from quantkit.measurement.timing.schedule import Shape, Timing
from quantkit.pipeline.measure import config_of
from quantkit.pipeline.progress import Progress
from quantkit.runtimes import load_runtime
from quantkit.runtimes.child import Report
from quantkit.runtimes.generate import demand_decoder, demand_tokens


class DeviceTimer:
    """See `pipeline.compare.times.RoundsTimer`.

    Args:
        reached: the device.
    """

    def __init__(self, reached: Reached) -> None:
        self._reached, self.device = reached, reached.link.name

    def __call__(self, job: RoundsJob, report: Report) -> list[Timing]:
        """Raw times of both. Raises InputError: `emulated`; what the device answers, those of the link."""
        link, sides = self._reached.link, {CANDIDATE: Path(job.candidate), BASELINE: Path(job.baseline)}
        files = {side: _files(path) for side, path in sides.items()}
        beside = sum(running(path, job.shapes, "") for path in sides.values())
        self._reached.prepare([path for found in files.values() for path in found.values()], beside, report)
        asked = asdict(job)
        for side, path in sides.items():
            place = link.carry(side, files[side], report)
            asked[side] = place if path.is_dir() else f"{place}/{path.name}"
        if job.samples:
            asked["samples"] = f"{link.carry('samples', {'samples.npz': Path(job.samples)}, report)}/samples.npz"

        def come(answers: Cells, cell: str) -> None:
            if cell == "about":
                answers.about.demand_times(self.device)

        found = link.run("rounds", asked, report, row=come)
        rounds: list[RoundTimes] = [found.one(RoundTimes, cell) for cell in found if cell.startswith(ROUND)]
        if not LEAST <= len(rounds) <= MOST:
            raise invalid(self.device, f"{len(rounds)} rounds")
        try:
            parts = joined([each.round({*SIDES}, self.device) for each in rounds])
            taken = [replace(timing, shape=shape) for shape, timing in zip(job.shapes, parts, strict=True)]
        except ValueError:
            raise invalid(self.device, "rounds that do not fit together") from None
        flags = ("throttled",) if _throttled(rounds) else ()
        return [replace(timing, flags=flags) for timing in taken]


def _throttled(rounds: Sequence[RoundTimes]) -> bool:
    """Within a round, or by and by over all of them: a machine that started again in between counts anew."""
    looks = [(each.before, each.after) for each in rounds] + [(rounds[0].before, rounds[-1].after)]
    return any(Between.of(before, after, counted=True).throttled for before, after in looks)


def generate_on(
    bundle: Bundle,
    reached: Reached,
    prompt: str,
    progress: Progress | None = None,
    *,
    runtime: str,
    new_tokens: int = 64,
    sample: bool = False,
    seed: int = 0,
    chat: bool = False,
) -> dict[str, Any]:
    """Continue a prompt on a device: tokens go there and tokens come back; see `Runtime.generate`.

    Raises:
        InputError: what the device answers, those of the link; `not-a-decoder`, `no-tokenizer`, `prompt-empty`.
    """
    progress, link = progress or Progress(), reached.link
    demand_decoder(bundle)
    runner = load_runtime(runtime)
    tokenizer = runner.tokenizer(bundle)
    ids = tokenizer.encode(tokenizer.chat(prompt) if chat else prompt, special=not chat)
    demand_tokens(len(ids))
    files = _files(runner.checked(bundle))
    beside = running(bundle.path, [Shape("decode", 1, len(ids) + new_tokens)], runtime)
    models = list(files.values())
    if runner.floats is None:
        # as torch loads it: what the files hold, and every weight of it as a float before the first token is there
        width = 4 if "float32" in str(config_of(bundle).get("dtype")) else 2
        floats = width * sum(prod(layer.shape) for layer in bundle.manifest.layers)
        models, beside = [], beside + floats + sum(path.stat().st_size for path in models)
    progress.plan({"carrying": 30.0, "generating": 30.0})
    carrying, settings = partial(progress.at, "carrying"), tokenizer.generation
    reached.prepare(models, beside, carrying)
    sampling = {
        "sample": sample,
        "temperature": float(settings.get("temperature") or 1.0),
        "top_k": int(settings.get("top_k", 50) or 0),
        "top_p": float(settings.get("top_p") or 1.0),
    }
    job = {"place": link.carry("subject", files, carrying), "runtime": runtime, "ids": list(ids), "seed": seed}
    job |= {"ends": sorted(tokenizer.ends), "new_tokens": new_tokens, "sampling": sampling}
    made: MadeTokens = link.run("generate", job, partial(progress.at, "generating")).one(MadeTokens, "made")
    if len(made.ids) > new_tokens:
        raise invalid(link.name, f"{len(made.ids)} tokens, not at most {new_tokens}")
    steps = made.seconds - made.first_token_s
    return {
        "text": tokenizer.decode(list(made.ids)),
        "tokens": len(made.ids),
        "seconds": made.seconds,
        "first_token_s": made.first_token_s,
        "tokens_per_s": (len(made.ids) - 1) / steps if len(made.ids) > 1 and steps > 1e-9 else None,
        "device": link.name,
    }


def _files(path: Path) -> dict[str, Path]:
    """Relative path -> file of a folder, or of a graph's file and what lies beside it under its name."""
    if path.is_dir():
        return {each.relative_to(path).as_posix(): each for each in walk(path)}
    return {each.name: each for each in sorted(path.parent.glob(f"{path.stem}.*"))}
