"""Real builds of a tiny decoder: compiled once, measured against the night before, and every trouble a baseline has."""

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import forked
import numpy as np
import pytest
import standin_vllm
import yaml
import zoo
from planted_load import TOKENS, answer

from quantkit import content, machine
from quantkit.bundle import Bundle
from quantkit.errors import InputError
from quantkit.measurement.timing import rounds
from quantkit.nightly import bundles, timing
from quantkit.nightly.build import build, request_of, why_not_here
from quantkit.nightly.bundles import Bundles, inputs_sha256
from quantkit.nightly.config import Nightly
from quantkit.nightly.decide import decide_night
from quantkit.nightly.records import BuildJob, Night, Result
from quantkit.nightly.store import Store
from quantkit.pipeline.progress import Progress
from quantkit.runtimes import apart
from quantkit.runtimes.vllm import OWN
from quantkit.target import Target

from .conftest import FIRST, SECOND, THIRD, decision
from .conftest import night as night_row

CHANGES = {"vocab_size": 258, "num_hidden_layers": 1}
RECIPE = {
    "schema": 1,
    "summary": "a test",
    "models": ["decoder"],
    "calibration": {"set": "prose-en", "samples": 2, "tokens": 32},
    "scheme": {"weights": {"format": "int4", "granularity": "group", "group": 32, "symmetric": False}},
    "passes": ["rtn"],
    "export": [{"onnx": {}}],
}
CONFIG: dict[str, Any] = {
    "models": ["./tiny"],
    "recipes": ["./small.yaml"],
    "targets": ["cpu-x86"],
    "batches": [1, 2],
    "budget": {"rounds": 2, "blocks": 2},
    "store": "store",
    "bundles": "bundles",
}


class Home:
    """A folder with a model, a recipe and a `nightly.yaml`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.store = Store.open(path / "store", create=True)

    @property
    def config(self) -> Nightly:
        return Nightly.load(self.path / "nightly.yaml")

    def write(self, **changes: Any) -> None:
        (self.path / "nightly.yaml").write_text(yaml.safe_dump({**CONFIG, **changes}))

    def night(self, name: str, *, attempt: int = 1, accept: bool = True) -> list[Result]:
        """All cells of a night, of one build."""
        config = self.config
        cells = config.cells()
        if attempt == 1:
            self.store.begin(Night(**{**vars(night_row(name, cells)), "config_sha256": config.sha256}))
        keys = tuple(cell.key for cell in cells)
        build(BuildJob(name, str(self.path / "nightly.yaml"), config.sha256, keys, attempt, 60.0), Progress())
        if accept:
            self.store.decide(name, [decision(cell, name) for cell in cells])
        return [each for each in self.store.results(name) if each.attempt == attempt]

    def bundles(self) -> list[Path]:
        return sorted(path.parent for path in (self.path / "bundles").glob("*/manifest.json"))


def sides(found: list[Any]) -> Counter[str]:
    return Counter(each.side for each in found)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, bare_tokenizer: Any) -> Any:
    """A first night of real work, in a home of which each test takes a copy."""
    path = tmp_path_factory.mktemp("home")
    zoo.save(path / "tiny", bare_tokenizer, "llama", **CHANGES)
    (path / "small.yaml").write_text(yaml.safe_dump(RECIPE))
    home = Home(path)
    home.write()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUANTKIT_CACHE", str(path / "cache"))
        patch.setattr("quantkit.pipeline.blocks.tokens.SCORED", 300)
        home.night(FIRST)
        yield path


@pytest.fixture
def home(made: Path, tmp_path: Path) -> Home:
    return Home(Path(shutil.copytree(made, tmp_path / "home", ignore=shutil.ignore_patterns("cache"))))


@pytest.fixture
def untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times that nothing was started for, where a test is about something else."""

    def planted(task: rounds.Task, progress: Any) -> timing.Taken:
        state = {"clock_hz": None, "temperature_c": None, "throttled": None}
        taken = {side: [[[1e-3] * 2] * 2] for side in task.sides}
        turns = {"seconds": taken, "began": taken, "order": [list(task.sides)], "rounds": [1]}
        return [{"round": turn, "state": state, "turns": turns} for turn in (0, 1)]

    monkeypatch.setattr(timing, "run", planted)


def test_the_first_night_keeps_the_candidate_alone(made: Path) -> None:
    home = Home(made)
    first, second = home.store.results(FIRST)
    assert (first.batch, second.batch) == (1, 2) and first.state == second.state == "done"
    assert first.baseline_sha256 is None and first.baseline_kind is None and not first.flags
    assert first.content_sha256 == second.content_sha256 and first.bytes
    assert first.device["kind"] == "cpu" and {"quantkit", "onnxruntime"} <= set(first.versions)
    times = home.store.times(FIRST)
    assert sides(times) == {"candidate": 2 * 2 * 4} and all(each.seconds > 0 for each in times)
    items = home.store.items(FIRST)
    assert sides(items) == {"candidate": len(items)} and len(items) >= 300
    assert all(each.correct is not None and each.kl is not None and each.logp is not None for each in items[:5])
    (bundle,) = home.bundles()
    assert Bundle.load(bundle).manifest.content_sha256 == first.content_sha256
    assert str(first.content_sha256).startswith(bundle.name.partition("-")[0])


def test_the_second_night_reuses_the_bundle_and_is_set_against_the_first(home: Home) -> None:
    first, second = home.night(SECOND)
    assert "reused" in first.flags and len(home.bundles()) == 1
    assert first.baseline_sha256 == first.content_sha256 and first.baseline_kind == "accepted"
    assert first.baseline_bytes == first.bytes
    times = [each for each in home.store.times(SECOND) if each.cell == second.cell]
    assert sides(times) == {"candidate": 2 * 4, "baseline": 2 * 4}
    assert {(each.round, each.block) for each in times} == {(0, 0), (1, 0)}
    items = home.store.items(SECOND)
    assert sides(items)["baseline"] == sides(items)["candidate"] == len(items) / 2, "once a build, not once a cell"


def test_what_is_committed_is_not_done_again(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "run", None)
    before = home.store.results(FIRST)
    assert [each.seconds for each in home.night(FIRST)] == [each.seconds for each in before]


@pytest.mark.usefixtures("untimed")
def test_another_recipe_another_bundle_and_flipped_words_have_text(home: Home) -> None:
    home.write(set=["scheme.weights.format=int2"], batches=[1])
    (found,) = home.night(SECOND)
    assert "reused" not in found.flags and len(home.bundles()) == 2
    assert found.baseline_sha256 != found.content_sha256
    flipped = [each for each in home.store.items(SECOND) if each.text]
    assert flipped and {each.side for each in flipped} == {"candidate"}
    assert "baseline: " in str(flipped[0].text) and "→" in str(flipped[0].text)


@pytest.mark.usefixtures("untimed")
def test_a_baseline_that_is_gone_or_damaged_is_told(home: Home) -> None:
    home.write(set=["scheme.weights.format=int2"], batches=[1])
    (old,) = home.bundles()
    with (old / "onnx" / "model.onnx").open("ab") as stream:
        stream.write(b"x")
    (found,) = home.night(SECOND)
    assert found.state == "done" and found.baseline_sha256 is None and found.baseline_kind == "accepted"
    assert any(flag.startswith("baseline-unloadable: [hash-mismatch]") for flag in found.flags)
    assert sides(home.store.times(SECOND)) == {"candidate": 2 * 4}
    # and where it was deleted
    shutil.rmtree(old)
    (again,) = home.night(THIRD, accept=False)
    assert again.baseline_sha256 == found.content_sha256, "the night in between was accepted"
    for each in home.bundles():
        shutil.rmtree(each)
    (alone,) = home.night("20260104T030000Z-000004", accept=False)
    assert alone.baseline_sha256 == found.content_sha256, "made again of the same inputs, it is the same"


@pytest.mark.usefixtures("untimed")
def test_a_second_attempt_takes_times_and_nothing_else(home: Home) -> None:
    home.write(batches=[1])
    home.night(SECOND)
    (found,) = home.night(SECOND, attempt=2)
    assert found.attempt == 2 and found.baseline_sha256
    taken = home.store.times(SECOND)
    assert Counter(each.attempt for each in taken) == {1: 16, 2: 16}
    assert {each.attempt for each in home.store.items(SECOND)} == {1}


@pytest.mark.usefixtures("untimed")
def test_the_last_release_is_a_third_side(home: Home) -> None:
    (bundle,) = home.bundles()
    shutil.copytree(bundle, home.path / "release" / "v1")
    home.write(release="release", batches=[1])
    (found,) = home.night(SECOND)
    assert found.release_sha256 == found.content_sha256
    assert sides(home.store.times(SECOND)) == {"candidate": 8, "baseline": 8, "release": 8}
    home.write(release="release", baseline="release", batches=[1])
    (found,) = home.night(THIRD)
    assert found.baseline_kind == "release" and found.release_sha256 is None
    # a release that has no such build
    home.write(release="release", batches=[1], set=["seed=3"], recipes=["./other.yaml"])
    (home.path / "other.yaml").write_text(yaml.safe_dump(RECIPE))
    (found,) = home.night("20260104T030000Z-000004")
    assert any(flag.startswith("release-unloadable: [release-missing]") for flag in found.flags)


@pytest.mark.usefixtures("untimed")
def test_a_night_asks_tasks_once_a_build_and_holds_the_lower_bound_of_recovery(home: Home) -> None:
    pytest.importorskip("lm_eval")
    items = [{"question": "a b", "choices": ["c", "d e", "a"], "answer": number % 3} for number in range(12)]
    (home.path / "mine.jsonl").write_text("".join(f"{json.dumps(item)}\n" for item in items))
    home.write(tasks={"names": ["./mine.jsonl"], "limit": 9, "recovery_min": 0.5})
    found = home.night(SECOND)
    (asked,) = [result for result in found if result.recovery is not None]
    assert set(asked.recovery) == {"mine acc", "mine acc_norm"}  # type: ignore[arg-type]
    (bundle,) = home.bundles()
    rows = [row for row in Bundle.load(bundle).measurements if row["name"] == "task.score"]
    assert {row["runtime"] for row in rows} == {asked.runtime}
    for row in rows:
        ratio, low, high, count = asked.recovery[f"mine {row['settings']['metric']}"]  # type: ignore[index]
        assert ([ratio, [low, high]], count) == ([row["baseline"]["ratio"], row["baseline"]["ratio_ci95"]], 9)
    decided = [one for one in decide_night(home.store, SECOND, home.config).decisions if one.what == "tasks"]
    assert len(decided) == len(found)
    lowest = min(low for _, low, *_ in asked.recovery.values())  # type: ignore[union-attr]
    assert {one.answer for one in decided} == {"same" if lowest >= 0.5 else "worse"}
    home.write(tasks={"names": ["./mine.jsonl"], "chat": True, "recovery_min": 0.5})
    for result in home.night(THIRD):
        assert result.recovery is None and result.state == "done"
    assert any("tasks-unasked: " in flag and "no-chat-template" in flag for flag in home.store.results(THIRD)[0].flags)


@pytest.mark.usefixtures("untimed")
def test_a_cell_that_fails_is_a_result_and_the_next_goes_on(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    real = timing.run

    def failing(task: rounds.Task, progress: Any) -> timing.Taken:
        if task.batch == 1:
            raise InputError("out-of-memory", where="batch 1", value="2 GB", rule="1 GB is free", remedy="less")
        return real(task, progress)

    monkeypatch.setattr(timing, "run", failing)
    failed, done = home.night(SECOND)
    assert (failed.state, done.state) == ("failed", "done")
    assert failed.error == {
        "code": "out-of-memory", "where": "batch 1", "value": "2 GB", "rule": "1 GB is free", "remedy": "less"
    }  # fmt: skip
    assert home.store.items(SECOND), "the first cell that is done brings the items of the build"


@pytest.mark.usefixtures("untimed")
def test_a_new_batch_does_not_cost_the_others_their_baseline(home: Home) -> None:
    """What a build answers is scored once: not by a cell that has nothing yet to be set against, if another has."""
    home.write(batches=[4, 1])
    found = {each.batch: each.baseline_sha256 for each in home.night(SECOND)}
    assert found[4] is None and found[1] is not None
    counts = sides(home.store.items(SECOND))
    assert counts["baseline"] == counts["candidate"] > 0


def test_a_file_that_changed_since_the_night_began_is_refused(home: Home) -> None:
    config = home.config
    keys = tuple(cell.key for cell in config.cells())
    job = BuildJob(SECOND, str(home.path / "nightly.yaml"), "0" * 64, keys, 1, 60.0)
    with pytest.raises(InputError, match="nightly-changed"):
        build(job, Progress())


def test_everything_that_decides_the_numbers_makes_another_bundle(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    def key() -> str:
        config = home.config
        return inputs_sha256(request_of(config, config.cells()[0]))

    known = {key()}
    assert known == {key()}
    home.write(set=["seed=1"])
    known.add(key())
    home.write(calibration="random-tokens")
    known.add(key())
    home.write()
    config = home.path / "tiny" / "config.json"
    config.write_text(config.read_text() + " ")
    known.add(key())
    monkeypatch.setattr(bundles, "_code", lambda: "other code")
    known.add(key())
    monkeypatch.setattr("quantkit.machine.versions", lambda: {"torch": "0"})
    known.add(key())
    assert len(known) == 6


def test_a_build_that_was_killed_while_it_compiled_goes_on(home: Home) -> None:
    """As a kill leaves it: finished under its first name, and not yet under its last."""
    (bundle,) = home.bundles()
    content, _, inputs = bundle.name.partition("-")
    bundle.rename(bundle.with_name(f".making-{inputs}"))
    found, reused = Bundles(home.path / "bundles").make(request_of(home.config, home.config.cells()[0]), Progress())
    assert not reused and found.path == bundle and found.manifest.content_sha256.startswith(content)


def test_targets_that_are_not_here() -> None:
    assert why_not_here(Target.load("cpu-x86")) is None
    for name in ("cpu-arm", "h100"):
        why = why_not_here(Target.load(name))
        assert why is not None and why.code == "no-machine" and why.where == name


def test_importing_a_night_does_not_import_torch() -> None:
    program = "import quantkit.nightly.run, sys; print({'torch', 'onnx', 'duckdb', 'ray'} & set(sys.modules))"
    done = forked.run("-c", program, light=True, check=True)
    assert done.stdout.strip() == "set()"


def test_what_a_kill_left_of_a_bundle_is_no_end_of_its_build(home: Home) -> None:
    """Deleting one, or restoring it from a cache, was cut short: a folder of its name without a manifest."""
    (bundle,) = home.bundles()
    (bundle / "manifest.json").unlink()
    found, reused = Bundles(home.path / "bundles").make(request_of(home.config, home.config.cells()[0]), Progress())
    assert not reused and found.path == bundle
    found.demand_intact()


def test_the_floors_whose_code_decides_no_number_are_there() -> None:
    package = Path(bundles.__file__).parents[1]
    assert [name for name in bundles._ABOVE if not (package / name / "__init__.py").is_file()] == []


@pytest.mark.skipif(not machine.has("llama_cpp"), reason="llama-cpp-python compiles for minutes")
def test_a_file_for_llama_cpp_is_timed_and_scored_there(tmp_path: Path, merging_tokenizer: Any) -> None:
    home = Home(tmp_path)
    zoo.save(tmp_path / "tiny", merging_tokenizer, "llama", vocab_size=len(merging_tokenizer), num_hidden_layers=1)
    weights = {"weights": {"format": "q4_0"}}
    (tmp_path / "file.yaml").write_text(yaml.safe_dump({**RECIPE, "scheme": weights, "export": [{"gguf": {}}]}))
    home.write(recipes=["./file.yaml"], runtimes=["llama_cpp"], batches=[1], budget={"rounds": 1, "blocks": 2})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUANTKIT_CACHE", str(tmp_path / "cache"))
        patch.setattr("quantkit.pipeline.blocks.tokens.SCORED", 300)
        (found,) = home.night(FIRST)
    assert (found.state, found.runtime) == ("done", "llama_cpp"), found
    (bundle,) = home.bundles()
    assert (bundle / "gguf" / "model.gguf").is_file()
    times = home.store.times(FIRST)
    assert times and all(each.side == "candidate" for each in times)


def test_a_cell_in_vllm_is_scored_there_and_loaded_if_the_night_says_so(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUANTKIT_CACHE", str(home.path / "cache"))
    monkeypatch.setenv("XDG_DATA_HOME", str(home.path / "data"))
    monkeypatch.setattr("quantkit.pipeline.blocks.tokens.SCORED", 300)
    # its logits are not a Llama's
    monkeypatch.setattr("quantkit.pipeline.blocks.subject.served_check", lambda folder: ([], "not asked"))
    apart.add(OWN, standin_vllm.python(home.path / "p", "0.32.0"))
    target = yaml.safe_load((content.folder("export") / "cpu-x86.yaml").read_text())
    (home.path / "here.yaml").write_text(yaml.safe_dump({**target, "runtimes": ["onnxruntime", "vllm"]}))
    recipe = {**RECIPE, "export": [{"checkpoint": {}}]}
    (home.path / "packed.yaml").write_text(yaml.safe_dump(recipe))
    cells = {"recipes": ["./packed.yaml"], "targets": ["./here.yaml"], "runtimes": ["vllm"], "batches": [1]}
    home.write(**cells)
    (first,) = home.night(SECOND)
    assert (first.state, first.runtime, first.error) == ("done", "vllm", None)
    assert not first.flags and not home.store.times(SECOND)
    items = home.store.items(SECOND)
    # the original and the bundle have the same table and head
    assert len(items) >= 300 and all(each.kl == 0.0 for each in items)
    home.write(**cells, load={"rate": 2, "requests": 20, "output": TOKENS, "slo": "tpot=40ms", "gate": "tpot"})

    def served(load: Any, folders: Any, order: Any, report: Any) -> Any:
        assert (load.rates, load.requests, {**load.slo}) == ([2], 20, {"tpot": 0.04})
        assert list(folders) == ["candidate", "baseline"] and order == order[::-1] and len(order) == 4
        gaps = np.random.default_rng(0).normal(1, 0.01, 20)
        return [answer(side, 0, 2, 0.1, gaps * (0.03 if side == "baseline" else 0.05)) for side in order], {}

    monkeypatch.setattr("quantkit.pipeline.load.in_turns", served)
    (second,) = home.night(THIRD)
    assert second.baseline_sha256 == first.content_sha256 and second.error is None
    assert "goodput: requests/s within the limits at 2 requests/s: baseline 2, candidate 0" in second.flags
    assert sides(home.store.times(THIRD)) == {"candidate": 40, "baseline": 40}
    judged = decide_night(home.store, THIRD, home.config)
    answers = {one.what: one.answer for one in judged.decisions}
    # of so few items the margin of flipped words is out of reach
    assert answers == {"latency": "worse", "accuracy": "inconclusive", "kl": "same", "size": "same"}
    assert [cell.runtime for cell in judged.repeat] == ["vllm"]
