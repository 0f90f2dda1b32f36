"""A checkpoint measured in a device's own torch, and an engine on its GPU: what here would be found, found there."""

import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from devices.local import local
from devices.loopback import Loopback
from devices.planted import Planted, reached
from devices.test_device_command import said
from devices.tiny_home import tiny_home
from quantkit.bundle import Bundle
from quantkit.devices.answers import CeilingSamples, SideCosts, Times, dumped
from quantkit.devices.asked import generate_on
from quantkit.devices.measure import measure_on
from quantkit.devices.probed import Gpu, Probed
from quantkit.errors import InputError, Stopped
from quantkit.measurement.operators.ceilings import Ceiling
from quantkit.measurement.operators.tax import StepCost
from quantkit.measurement.rows import Row
from quantkit.measurement.timing.schedule import TimingPlan
from quantkit.pipeline.measure import measure_bundle

pytestmark = pytest.mark.usefixtures("one_thread")
PLAN = TimingPlan(batches=(1,), contexts=(16,), prefills=(8,), seconds=0.3, cell_seconds=0.3, rounds=2)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, byte_tokenizer: Any) -> Iterator[Path]:
    """A folder with `model`, a tiny decoder, and `packed`, a bundle of its checkpoint."""
    with tiny_home(tmp_path_factory.mktemp("home"), byte_tokenizer, {"packed": "int4"}) as path:
        yield path


@pytest.fixture
def bundle(home: Path, tmp_path: Path) -> Bundle:
    return Bundle.load(shutil.copytree(home / "packed", tmp_path / "packed"))


def measured(bundle: Bundle, device: Any, home: Path, **how: Any) -> list[Row]:
    return measure_on(bundle, device, str(home / "model"), runtime="torch", plan=PLAN, **how)


SCORED = ("scored", "settings")


def replayed(*cells: tuple[str, Any], cut: str = "") -> Planted:
    """A device that answers what was written down, up to a cell at which the line breaks."""

    def of(work: str, cell: str) -> bool:
        return cell == "about" or (work == "measure") != cell.startswith(SCORED)

    return Planted(*((cell, [row]) for cell, row in cells), name="box", cut=cut, of=of)


@dataclass
class Told:
    """What a device said, and what was made of it."""

    cells: dict[str, Any]
    rows: list[Row]
    asked: list[float]
    bundle: Bundle
    there: Path

    def but(self, **changes: Any) -> list[tuple[str, Any]]:
        """Its cells, some of their rows with other keys."""
        return [
            (cell, row | changes.get(cell.replace("-", "_"), {}))
            for cell, row in self.cells.items()
            if changes.get(cell.replace("-", "_"), {}) is not None
        ]


@pytest.fixture(scope="module")
def told(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Told:
    """A bundle scored by a device's own torch."""
    folder = tmp_path_factory.mktemp("told")
    bundle = Bundle.load(shutil.copytree(home / "packed", folder / "packed"))
    device, cells, asked = local(folder / "there", "box"), dict[str, Any](), list[float]()
    real = device.link.run

    def run(*told: Any, **how: Any) -> Any:
        found = real(*told, **how)
        cells.update((cell, rows[0]) for cell, rows in found.items())
        return found

    def demand(self: Probed, models: Any, where: str, running: float = 0.0) -> None:
        assert not [*models]
        asked.append(running)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device.link, "run", run)
        patch.setattr(Probed, "demand_memory", demand)
        rows = measured(bundle, device, home)
    return Told(cells, rows, asked, Bundle.load(bundle.path), folder / "there")


def test_what_torch_says_there_is_what_it_says_here(home: Path, bundle: Bundle, told: Told) -> None:
    here = {row.name: row for row in measure_bundle(bundle, str(home / "model"), runtime="torch")}
    assert {row.name for row in told.rows} == {name for name in here if name.startswith("accuracy.")}
    for row in told.rows:
        own = here[row.name]
        assert (row.value, row.ci95, row.n, row.quantiles) == (own.value, own.ci95, own.n, own.quantiles)
        assert (row.data, row.baseline, row.subject) == (own.data, own.baseline, own.subject)
        assert (row.on, row.runtime, row.settings) == ("box", "torch", own.settings)
    # block by block: no whole model is waited for, but the interpreter with its libraries is
    (running,) = told.asked
    assert 1e8 < running < 4e9
    # of the bundle what its runtime reads, of the float model what it is made of
    carried = {path.name.partition("-")[0]: path for path in (told.there / "files").iterdir()}
    assert set(carried) == {"subject", "baseline", "scored", ".coming"}
    assert {path.name for path in carried["subject"].iterdir()} == {"model"}
    assert not (told.there / "tmp").exists()
    stored = [Row.model_validate(row) for row in told.bundle.measurements]
    assert {row.on for row in stored if row.name == "accuracy.kl" and row.runtime == "torch"} == {None, "box"}
    assert "<summary>box</summary>" in (told.bundle.path / "report.html").read_text()


def test_what_is_there_is_not_asked_for_again(home: Path, told: Told) -> None:
    link = replayed()
    assert measured(told.bundle, reached(link), home, resume=True) == []
    assert link.asked == []


@pytest.mark.parametrize(
    "changes",
    [
        {"scored__1_0": None},
        {"scored__1_0": {"sequence": 0}},
        {"scored__0_0": {"way": "prompts"}},
        {"scored__0_0": {"found": {"kl": [0.0]}}},
        {"scored__0_0": {"path": "/etc/passwd"}},
        {"settings": {"settings": {"dtype": ["float32"]}}},
        {"settings": None},
        {"about": {"cores": 0}},
    ],
    ids=str,
)
def test_what_was_not_asked_for_is_refused(
    home: Path, bundle: Bundle, told: Told, changes: dict[str, dict[str, Any] | None]
) -> None:
    before = bundle.measurements
    with pytest.raises(InputError, match="answer-invalid") as met:
        measured(bundle, reached(replayed(*told.but(**changes))), home)
    assert met.value.line().isprintable()
    assert Bundle.load(bundle.path).measurements == before


def test_too_little_memory_is_said_before_anything_is_carried(home: Path, bundle: Bundle, told: Told) -> None:
    about = PROBED.model_copy(update={"memory_free": int(told.asked[0]) - 1})
    link = replayed()
    with pytest.raises(InputError, match="out-of-memory"):
        measured(bundle, reached(link, about), home)
    assert link.carried == []


def test_text_needs_every_weight_as_a_float_there(home: Path, bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []

    def demand(self: Probed, models: Any, where: str, running: float = 0.0) -> None:
        assert not [*models]
        asked.append(running)
        raise InputError("enough")

    monkeypatch.setattr(Probed, "demand_memory", demand)
    for tokens in (1, 11):
        with pytest.raises(InputError, match="enough"):
            generate_on(bundle, reached(replayed()), "a", runtime="torch", new_tokens=tokens)
    need, more = asked
    weights = sum(layer.shape[0] * layer.shape[1] for layer in bundle.manifest.layers)
    files = sum(path.stat().st_size for path in bundle.model_folder.iterdir())
    # float32, as the model is stored; the cache and logits of a few tokens
    assert files + 4 * weights < need < 1.2 * (files + 4 * weights) < 1.2 * more


def test_by_the_command_over_a_real_sshd(
    home: Path, bundle: Bundle, told: Told, devices: Loopback, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A device whose Python has torch: of wheels it is sent quantkit's own alone."""
    there = tmp_path / "there"
    words = ("device", "add", "plain", "ssh://plain", "--workdir", there, "--python", sys.executable)
    assert said(capsys, *words)["error"] is None
    asked = ("measure", bundle.path, "--on", "plain", "--runtime", "torch", "--baseline", home / "model")
    found = said(capsys, *asked)
    assert found["error"] is None
    rows = {row["name"]: row for row in found["result"]["measurements"]}
    assert {row["device"]["on"] for row in rows.values()} == {"plain"}
    for row in told.rows:
        assert rows[row.name]["value"] == pytest.approx(row.value, rel=1e-4), row.name
    assert len(list((there / "wheels").iterdir())) == 1
    assert said(capsys, *asked, "--resume")["result"]["measurements"] == []
    text = ("generate", bundle.path, "--prompt", "The state of", "--runtime", "torch", "--new-tokens", 5)
    made, here = (said(capsys, *text, *more)["result"] for more in (("--on", "plain"), ()))
    assert (made["text"], made["tokens"], made["device"]) == (here["text"], here["tokens"], "plain")


# --- engines: the device is what it says it is, and its engine is a file ----------------------------------------------


GPU = Gpu(name="NVIDIA GeForce RTX 4090", sm="8.9", memory=24 << 30, driver="575")
PROBED = Probed.model_construct(packages={"tensorrt-rtx": "1.7.1.116"}, gpus=[GPU], memory=1 << 35, memory_free=1 << 34)
CEILINGS = tuple(
    Ceiling(name, unit, (value,) * 4, {"compute_type": kind} if kind else {}, {})
    for name, unit, value, kind in (
        ("ceiling.read", "B/s", 9e11, ""),
        ("ceiling.compute", "flop/s", 1e14, "bf16"),
        ("ceiling.compute", "flop/s", 1e14, "fp16"),
        ("ceiling.launch", "s", 4e-6, ""),
    )
)


def engines(bundle: Bundle) -> Bundle:
    """With engines for two GPUs, which nothing here can run."""
    files: dict[str, bytes | None] = {}
    for sm in ("8.6", "8.9"):
        record = {"library": "tensorrt_rtx", "version": "1.7.1.116", "sm": [sm], "options": {}}
        record["profiles"] = [{"inputs": {"attention_mask": [[1, 48]] * 3}}]
        name = f"engine/sm{sm.replace('.', '')}"
        files |= {f"{name}.engine": sm.encode() * 100, f"{name}.json": json.dumps(record).encode()}
    return bundle.put_all(files)


def times(*shapes: str) -> list[tuple[str, Any]]:
    """What a device says of an engine that takes half as long."""
    noise = 1 + 0.01 * np.random.default_rng(0).standard_normal((40, 2, 2))
    sides = {"subject": (1e-3 * noise).tolist(), "baseline": (2e-3 * noise[::-1]).tolist()}
    cost = StepCost("int4", 1e6, 10.0, 1e6, compute="fp16")
    costs = SideCosts(ours=cost, theirs=replace(cost, format="bfloat16", compute="bf16"), settings={"dtype": "float16"})
    taken = dumped(Times(seconds=sides, rounds=(20, 20)))
    limits = dumped(CeilingSamples(ceilings=CEILINGS))
    return [
        ("sides", dumped(costs)),
        ("ceilings", limits),
        *((shape, taken) for shape in shapes),
        ("ceilings-after", limits),
    ]


def run_engine(bundle: Bundle, link: Any, home: Path, about: Probed = PROBED, **how: Any) -> list[Row]:
    asked: dict[str, Any] = {"runtime": "tensorrt_rtx", "plan": replace(PLAN, contexts=(16, 512)), **how}
    return measure_on(bundle, reached(link, about), str(home / "model"), **asked)


def test_an_engine_is_scored_and_timed_on_the_gpu_that_it_is_for(home: Path, bundle: Bundle, told: Told) -> None:
    bundle = engines(bundle)
    cells = [*told.but(about={"gpu": GPU.name}), *times("decode-1-16", "decode-1-47", "prefill-1-8")]
    link = replayed(*cells, cut="decode-1-47")
    with pytest.raises(Stopped):
        run_engine(bundle, link, home)
    stored = [Row.model_validate(row) for row in Bundle.load(bundle.path).measurements]
    first = [row for row in stored if row.on == "box"]
    assert {row.name for row in first} >= {"accuracy.kl", "latency.decode_step"}
    link.cut = ""
    rows = run_engine(bundle, link, home, resume=True)
    assert not any(row.name.startswith("accuracy.") for row in rows)
    scored, timed, again = (job for _, job in link.asked)
    # what is executed there is what the manifest lists, and of the engines only the one for that GPU is carried
    entries = {entry.path: entry.sha256 for entry in bundle.manifest.files}
    assert (
        scored["built"]
        == timed["built"]
        == {place: entries[place] for place in ("engine/sm89.engine", "engine/sm89.json")}
    )
    assert "sm86.engine" not in {path.name for path in link.carried}
    # as long as the engine's cache, and what has come is left out
    assert [shape["size"] for shape in timed["shapes"]] == [16, 47, 8]
    assert [shape["size"] for shape in again["shapes"]] == [47, 8]
    (step,) = [row for row in rows if row.name == "latency.decode_step" and row.shape and row.shape["context"] == 47]
    assert (step.runtime, step.baseline is not None and step.baseline.ratio) == ("tensorrt_rtx", pytest.approx(2, 0.1))
    for row in [*first, *rows]:
        assert row.device is not None
        assert (row.device.kind, row.device.name, row.on) == ("gpu", GPU.name, "box"), row.name
    assert not any(row.name == "memory.peak" for row in rows)
    assert run_engine(bundle, link, home, resume=True) == []


@pytest.mark.parametrize("changes", [{"flops_per_token": 1e308}, {"weight_bytes": 1e308}], ids=str)
def test_figures_that_give_no_row_are_refused(
    home: Path, bundle: Bundle, told: Told, changes: dict[str, float]
) -> None:
    cells = dict([*told.but(about={"gpu": GPU.name}), *times("decode-1-16")])
    cells["sides"] = {**cells["sides"], "ours": {**cells["sides"]["ours"], **changes}}
    with pytest.raises(InputError, match="answer-invalid") as met:
        run_engine(engines(bundle), replayed(*cells.items()), home)
    assert met.value.line().isprintable()


def test_a_gpu_that_is_none_is_refused(home: Path, bundle: Bundle, told: Told) -> None:
    with pytest.raises(InputError, match=r"answer-invalid.*no GPU"):
        run_engine(engines(bundle), replayed(*told.but()), home)


@pytest.mark.parametrize(
    ("there", "code"),
    [
        ({"gpus": []}, "gpu-absent"),
        ({"packages": {}}, "runtime-not-here"),
        ({"packages": {"tensorrt-rtx": "1.8"}}, "engine-foreign"),
        ({"gpus": [GPU.model_copy(update={"sm": "9.0"})]}, "engine-foreign"),
        ({"gpus": [GPU.model_copy(update={"memory": 1000})]}, "out-of-memory"),
    ],
    ids=["no GPU", "no library", "another version", "another GPU", "a small one"],
)
def test_what_an_engine_cannot_run_on_is_said_before_anything_is_carried(
    home: Path, bundle: Bundle, there: dict[str, Any], code: str
) -> None:
    link = replayed()
    with pytest.raises(InputError) as met:
        run_engine(engines(bundle), link, home, PROBED.model_copy(update=there))
    assert met.value.code == code and "\n" not in met.value.line()
    assert ("--on box" in met.value.line()) == (code == "engine-foreign")
    assert link.carried == []


def test_an_engine_that_was_changed_is_not_carried(home: Path, bundle: Bundle) -> None:
    (engines(bundle).path / "engine/sm89.engine").write_bytes(b"another")
    link = replayed()
    with pytest.raises(InputError, match="hash-mismatch"):
        run_engine(Bundle.load(bundle.path), link, home)
    assert link.carried == []
