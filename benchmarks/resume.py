"""kill -9 at random moments, then --resume: the same content as the run that nothing disturbed.

    python benchmarks/resume.py                                             20 trials on a small random model
    python benchmarks/resume.py --trials 5 --model smollm2-135m --recipe gptq-int4
    python benchmarks/resume.py --trials 20 --model efficientnet-lite0 --recipe int8-network
    python benchmarks/resume.py --trials 20 --model random-encoder --recipe int8        a float ONNX graph

A trial starts `quantkit compile` and sends SIGKILL after a random time, drawn evenly over the time that an undisturbed
compile takes from its first write to its end (a tenth strike while it is still starting). Then `--resume`; with one
chance in three that is killed as well, and so on, until a resume is left to finish. What decides is `content_sha256`,
and `quantkit verify`. Two undisturbed runs must agree too. The last resume's processor seconds say how much of the work
was not done again. Speed is not measured. Linux only.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from harness.compiles import committed
from harness.process import THREADS, compiled, envelope, environment, helper, quantkit, run
from harness.random_encoder import SIZES
from harness.random_model import SMALL
from harness.record import layout, parsing, record, show, verdicts

AGAIN = 1 / 3
EARLY = 0.1
POLL = 0.002
ENCODER = "random-encoder"


class Trials:
    """Compiles of one model and recipe in one folder.

    Args:
        place: for bundles and cache.
        command: model, recipe and changes.
        env: of every process.
    """

    def __init__(self, place: Path, command: list[str], env: dict[str, str]) -> None:
        self.place, self.command, self.env = place, command, env

    def begin(self, out: Path, *, resume: bool) -> subprocess.Popen[bytes]:
        """Start a compile."""
        arguments = [*self.command, "--out", str(out), *(["--resume"] if resume else [])]
        quiet = subprocess.DEVNULL
        return subprocess.Popen(quantkit("compile", *arguments), stdout=quiet, stderr=quiet, env=self.env)

    def building(self, out: Path, process: subprocess.Popen[bytes]) -> None:
        """Wait until a process holds the lock of its build, which comes before its first write, or has ended."""
        lock = f"{out.name}.partial/lock"
        descriptors = Path(f"/proc/{process.pid}/fd")
        while process.poll() is None:
            try:
                if any(str(entry.readlink()).endswith(lock) for entry in descriptors.iterdir()):
                    return
            except OSError:  # a descriptor, or the process, is gone
                continue
            time.sleep(POLL)

    def timed(self, out: Path) -> tuple[float, float]:
        """Seconds to the first write, and from there to the end, of an undisturbed compile."""
        begun = time.perf_counter()
        process = self.begin(out, resume=False)
        self.building(out, process)
        before = time.perf_counter() - begun
        if process.wait() not in (0, 1):
            raise SystemExit(f"the undisturbed compile failed, exit {process.returncode}")
        return before, time.perf_counter() - begun - before

    def strike(self, out: Path, dice: random.Random, before: float, after: float, *, resume: bool) -> dict[str, Any]:
        """Start, kill at a random moment, say where that was."""
        partial = out.with_name(f"{out.name}.partial")
        early = dice.random() < EARLY
        delay = dice.uniform(0, before if early else after)
        begun = time.perf_counter()
        process = self.begin(out, resume=resume)
        if not early:
            self.building(out, process)
        try:
            process.wait(delay)
        except subprocess.TimeoutExpired:
            process.kill()
        status = process.wait()
        if status >= 0:
            where = "finished before"
        elif out.exists():
            where = "after the last rename"
        else:
            where = "while starting" if early else "at work"
        return {"status": status, "where": where, "steps": committed(partial), "seconds": time.perf_counter() - begun}

    def trial(self, number: int, seed: int, before: float, after: float) -> dict[str, Any]:
        """One interrupted compile, carried through to its end."""
        dice = random.Random(f"{seed}-{number}")
        out = self.place / f"trial-{number}"
        while (first := self.strike(out, dice, before, after, resume=False))["status"] >= 0:
            # it ended before it was struck: nothing was tried
            shutil.rmtree(out)
        strikes = [first]
        while strikes[-1]["status"] < 0 and not out.exists() and dice.random() < AGAIN:
            strikes.append(self.strike(out, dice, before, after, resume=True))
        ended = out.exists()
        done = run(quantkit("compile", *self.command, "--out", out, "--resume", "--json"), env=self.env)
        answer = envelope(done)
        digest = (answer["result"] or {}).get("content_sha256")
        verified = run(quantkit("verify", out, "--json"), env=self.env).status if digest else None
        return {
            "trial": number,
            # none where there was nothing left to do
            "resume_cpu_s": None if ended else done.cpu,
            "kills": sum(strike["status"] < 0 for strike in strikes),
            "strikes": strikes,
            "struck": ", ".join(f"{strike['where']} ({strike['steps']})" for strike in strikes),
            "exit": done.status,
            "error": answer["error"],
            "content_sha256": digest,
            "verify_exit": verified,
            "left_behind": out.with_name(f"{out.name}.partial").exists(),
        }


def main() -> int:
    parser = parsing(__doc__)
    parser.add_argument("--trials", "--kills", type=int, default=20, help="each is killed at least once")
    parser.add_argument("--model", help=f"or {ENCODER}; default: a random Llama of 16 small layers")
    parser.add_argument("--calibration", help="of a float ONNX graph: its samples")
    parser.add_argument("--recipe", default="gptq-int4")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        model, changes, env = options.model, [], environment()
        if model is None:
            model = str(place / "random")
            helper("random_model.py", {"folder": model, "layers": 16, **SMALL})
            changes = ["calibration.samples=8", "calibration.tokens=64", "scheme.weights.group=32", "gates={}"]
            env = environment(QUANTKIT_CACHE=str(place / "cache"))
        given = [] if options.calibration is None else ["--calibration", options.calibration]
        if model == ENCODER:
            model, samples = str(place / "encoder.onnx"), str(place / "samples.npz")
            helper("random_encoder.py", {"file": model, "samples": samples})
            given = ["--calibration", samples]
        command = [model, "--recipe", options.recipe, "--no-speed", *given, *(f"--set={change}" for change in changes)]
        trials = Trials(place, command, env)
        first, took = compiled(model, options.recipe, place / "first", *command[3:], env=env)
        before, after = trials.timed(place / "second")
        second = json.loads((place / "second" / "manifest.json").read_bytes())["content_sha256"]
        expected = first["content_sha256"]
        print(f"undisturbed: {before:.1f} s to the first write, {after:.1f} s of work, {took.cpu:.0f} CPU s")
        print(f"content {expected}", flush=True)
        rows = []
        for number in range(options.trials):
            rows.append(trials.trial(number, options.seed, before, after))
            rows[-1]["same"] = rows[-1]["content_sha256"] == expected
            same = "same" if rows[-1]["same"] else "DIFFERS"
            last = "" if rows[-1]["resume_cpu_s"] is None else f", {rows[-1]['resume_cpu_s']:.0f} CPU s to its end"
            print(f"{number + 1}/{options.trials} {rows[-1]['struck']}{last}: {same}", flush=True)
    columns = layout(
        "trial | kills | struck=where it struck (committed steps) | resume_cpu_s=CPU s of the last resume:.0f | "
        "exit | same=same content"
    )
    show(f"{options.trials} trials, {options.recipe}, {THREADS} threads", rows, columns)
    kills = sum(row["kills"] for row in rows)
    where = Counter(strike["where"] for row in rows for strike in row["strikes"])
    steps = sorted({strike["steps"] for row in rows for strike in row["strikes"]})
    print(f"{kills} kills: {dict(where)}; with {steps} steps committed")
    llama = f"random Llama, 16 layers, {SMALL}"
    settings = (
        {"model": f"random BERT as ONNX, {SIZES}" if options.model == ENCODER else options.model or llama}
        | {"recipe": options.recipe, "changes": changes, "seed": options.seed, "threads": THREADS}
        | {"seconds_to_first_write": before, "seconds_of_work": after, "undisturbed_cpu_s": took.cpu}
        | {"kills": kills, "where": dict(where), "content_sha256": expected, "second_run_same": second == expected}
    )
    claim = "killed at random moments and resumed, the same content_sha256 as undisturbed; two runs the same"
    name = f"resume-{Path(options.model).stem}" if options.model else "resume"
    record(name, claim, rows, settings)
    same = sum(row["same"] for row in rows)
    return verdicts(
        {"two undisturbed runs have the same content": second == expected}
        | {f"{same} of {len(rows)} interrupted compiles ended with the same content": same == len(rows)}
        | {"every resumed bundle verifies": all(row["verify_exit"] == 0 for row in rows)}
        | {"nothing is left behind": not any(row["left_behind"] for row in rows)}
    )


if __name__ == "__main__":
    raise SystemExit(main())
