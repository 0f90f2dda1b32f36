"""A file for llama.cpp is timed in llama.cpp: what with what, what is said of it, and what a night makes of it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import pytest
import zoo
from planted_times import Timer, rows

from quantkit import machine
from quantkit.bundle import Bundle, LayerEntry
from quantkit.errors import InputError
from quantkit.measurement.operators.ceilings import Ceiling
from quantkit.measurement.rows import Row
from quantkit.measurement.timing.schedule import TimingPlan
from quantkit.measurement.timing.speed import SpeedJob, SpeedSide
from quantkit.model.source.open import open_model
from quantkit.model.streaming.stream import StreamedModel
from quantkit.pipeline import measure, verdict
from quantkit.pipeline.compile import compile_model
from quantkit.pipeline.measure import MeasuredAgainst, default_runtime, measure_bundle
from quantkit.pipeline.progress import Progress
from quantkit.pipeline.request import Request, this_machine
from quantkit.recipe import Recipe
from quantkit.runtimes import load_runtime
from quantkit.target import Target

if TYPE_CHECKING:
    from conftest import Made

needed = pytest.mark.skipif(not machine.has("llama_cpp"), reason="llama-cpp-python compiles for minutes")
PLAN = TimingPlan(batches=(1, 2), contexts=(16,), prefills=(8,), seconds=0.2, rounds=1)
HERE = Target.load(this_machine())
LAYERS = [LayerEntry(name="x", shape=[8, 8], scheme={"format": "q4_0"}, bits_per_weight=4.5)]


def job(runtime: str = "llama_cpp") -> SpeedJob:
    floats = "onnxruntime" if runtime != "llama_cpp" else runtime
    ours = SpeedSide("a", "ours", "q4_0", runtime=runtime)
    return SpeedJob(ours, SpeedSide("b", "source", "float16", runtime=floats), 2, PLAN)


def across(subject: str, form: str, ratio: float) -> list[Row]:
    """Steps of llama.cpp against ONNX Runtime's."""
    of = [row for row in rows(job(), lambda batch: ratio) if row.name.startswith("latency.")]
    changed = []
    for row in of:
        assert row.baseline is not None
        told = {**row.settings, "baseline_runtime": "onnxruntime", "baseline_format": form}
        named = {"name": row.name.replace("latency.", "across."), "settings": told}
        changed.append(
            row.model_copy(update={**named, "baseline": row.baseline.model_copy(update={"subject": subject})})
        )
    return changed


def test_a_verdict_on_a_file_rests_on_its_own_runtime() -> None:
    found = verdict.decide([*rows(job(), lambda batch: 2.0), *across("source", "float32", 0.5)], [], LAYERS, HERE)
    assert found is not None
    assert found.answer == "ship_up_to", "the other runtime's times decide nothing"
    (line,) = [each for each in found.because if "llama_cpp and onnxruntime (float32) in turns: batch 1, con" in each]
    assert "0.50 times as fast" in line
    assert not any("alone" in each for each in found.because)


def test_where_a_graph_was_timed_too_the_verdict_is_the_graph_s() -> None:
    graph = rows(job("onnxruntime"), lambda batch: 0.5)
    found = verdict.decide([*graph, *rows(job(), lambda batch: 2.0)], [], LAYERS, HERE)
    assert found is not None and found.answer == "do_not_quantize"
    assert not any("llama_cpp" in each for each in found.because), "the ratios are to two baselines"


def test_times_against_the_bundle_s_own_graph_are_of_the_bundle() -> None:
    mine, foreign = across("ours", "int4", 0.5), across("another bundle", "int4", 0.5)
    timed = rows(job(), lambda batch: 2.0)
    found = verdict.of_original([*timed, *mine, *foreign], "source")
    assert [row for row in found if row.name.startswith("across.")] == mine


@pytest.mark.parametrize(("flag", "floats_in"), [("avx2", "float16"), ("avx512_bf16", "bfloat16")])
def test_a_compile_times_a_file_in_its_own_runtime(
    flag: str, floats_in: str, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "cpu_flags", lambda: frozenset({flag}))
    timer, asked = Timer(), []

    def floats(source: Any, exporter: str, options: Any) -> Path:
        asked.append((exporter, options))
        return made.model

    monkeypatch.setattr("quantkit.measurement.timing.speed.run", timer)
    monkeypatch.setattr("quantkit.pipeline.measure.float_export", floats)
    monkeypatch.setattr(type(load_runtime("llama_cpp")), "context", lambda self, folder: 64)
    monkeypatch.setattr(type(load_runtime("llama_cpp")), "folder", lambda self, bundle: bundle.path)
    source = open_model(str(made.model))
    original = MeasuredAgainst(source.sha256, stream=StreamedModel(source))
    found, decisions = measure.quick_times(Bundle.load(made.both), original, "llama_cpp", Progress())
    assert decisions == [] and asked == [("gguf", {})]
    (one,) = timer.jobs
    assert (one.ours.runtime, one.theirs.runtime, one.theirs.format) == ("llama_cpp", "llama_cpp", floats_in)
    assert {row.runtime for row in found if row.name == "latency.decode_step"} == {"llama_cpp"}


def test_a_runtime_that_is_not_here_is_refused_before_anything(
    made: Made, copied: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = load_runtime("llama_cpp")
    monkeypatch.setattr(type(runtime), "why_not_here", lambda self, folder=None: "not installed")
    monkeypatch.setattr(type(runtime), "folder", lambda self, bundle: bundle.path)
    with pytest.raises(InputError, match=r"runtime-not-here.*llama_cpp.*not installed"):
        measure_bundle(copied(made.both), str(made.model), runtime="llama_cpp")


def test_onnx_runtime_takes_turns_with_the_bundle_s_own_graph_or_the_float_model_s(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(Progress, "note", lambda self, line: lines.append(line))
    said, both, packed = Progress(), Bundle.load(made.both), Bundle.load(made.packed)
    source: Any = SimpleNamespace(source=open_model(str(made.model)))
    against = MeasuredAgainst("source", stream=source)
    own = measure._across(both, against, said)
    assert own is not None and (own.path, own.format) == (str(made.both / "onnx"), "int4")
    assert own.subject == both.manifest.content_sha256 and own.runtime == "onnxruntime"
    monkeypatch.setattr("quantkit.pipeline.measure.float_export", lambda *_: made.floating / "onnx")
    floats = measure._across(packed, against, said)
    assert floats is not None and (floats.subject, floats.format) == ("source", "float32") and not lines

    def fail(*_: object) -> Path:
        raise InputError("attention-unsupported", value="x")

    monkeypatch.setattr("quantkit.pipeline.measure.float_export", fail)
    assert measure._across(packed, against, said) is None
    assert "not timed beside onnxruntime: [attention-unsupported]" in lines[0]
    monkeypatch.setattr(machine, "memory_available", lambda: 1000)
    assert measure._across(packed, against, said) is None and "of memory" in lines[1]


RECIPE = Recipe.from_dict(
    {
        "summary": "a test",
        "calibration": {"set": "prose-en", "samples": 2, "tokens": 32},
        "scheme": {"weights": {"format": "q4_0"}},
        "passes": ["rtn"],
        "export": [{"gguf": {}}],
    },
    name="tiny-gguf",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, merging_tokenizer: Any) -> Path:
    folder = tmp_path_factory.mktemp("gguf") / "m"
    return zoo.save(folder, merging_tokenizer, "llama", vocab_size=len(merging_tokenizer))


@pytest.fixture
def few(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUANTKIT_CACHE", str(model.parent / "cache"))
    monkeypatch.setattr("quantkit.pipeline.blocks.tokens.SCORED", 300)


@pytest.mark.usefixtures("few")
def test_what_cannot_be_timed_here_is_a_note(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        type(load_runtime("llama_cpp")), "why_not_here", lambda self, folder=None: "it is not installed"
    )
    found = compile_model(Request.of(str(model), recipe=RECIPE, out=tmp_path / "b"))
    notes = {each.where: each.reason for each in found.decisions}
    assert notes["speed"] == "it is not installed"
    assert found.bundle.manifest.verdict is None


# --- with llama.cpp ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compiled(model: Path) -> tuple[Path, Path, Timer]:
    """A tiny model, its bundle of a file alone, and what the compile had timed."""
    timer = Timer()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUANTKIT_CACHE", str(model.parent / "cache"))
        patch.setattr("quantkit.pipeline.blocks.tokens.SCORED", 300)
        patch.setattr("quantkit.measurement.timing.speed.run", timer)
        compile_model(Request.of(str(model), recipe=RECIPE, out=model.parent / "b"))
    return model, model.parent / "b", timer


@needed
@pytest.mark.usefixtures("few")
def test_compiled_and_measured_in_llama_cpp(
    compiled: tuple[Path, Path, Timer], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, path, timer = compiled
    bundle = Bundle.load(path)
    assert default_runtime(bundle) == "llama_cpp"
    assert bundle.manifest.verdict is not None, "of a compile's own times"
    (first,) = timer.jobs
    floats = Path(first.theirs.path) / "model.gguf"
    assert floats.stat().st_size > (path / "gguf" / "model.gguf").stat().st_size
    later = Timer()
    monkeypatch.setattr("quantkit.measurement.timing.speed.run", later)
    monkeypatch.setattr("quantkit.pipeline.measure._across", lambda *_: None)  # a graph takes seconds to trace
    found = measure_bundle(bundle, str(source), plan=PLAN)
    assert {row.runtime for row in found if row.name == "accuracy.kl"} == {"llama_cpp"}
    (again,) = later.jobs
    assert again.theirs.path == first.theirs.path, "made once"
    assert "llama_cpp" in (path / "README.md").read_text()


@needed
def test_its_steps_are_timed_against_floats_in_llama_cpp(
    compiled: tuple[Path, Path, Timer], monkeypatch: pytest.MonkeyPatch
) -> None:
    from quantkit.measurement.timing import speed
    from quantkit.runtimes.child import Caller

    class Told(Caller):
        def __init__(self) -> None:
            self.rows: list[Row] = []

        def row(self, data: Any) -> None:
            self.rows.append(Row.model_validate(data))

        def at(self, share: float, words: str) -> None:
            pass

    monkeypatch.setattr(
        "quantkit.measurement.operators.ceilings.measured",
        lambda threads: [Ceiling("ceiling.read", "B/s", (1e10, 1e10), {}, {})],
    )
    _, path, timer = compiled
    ours = SpeedSide(str(path / "gguf"), "ours", "q4_0", runtime="llama_cpp")
    told = Told()
    speed._time(json.loads(json.dumps(asdict(SpeedJob(ours, timer.jobs[0].theirs, 1, PLAN)))), told)
    steps = [row for row in told.rows if row.name == "latency.decode_step"]
    assert [row.batch for row in steps] == [1, 2]
    assert all(row.runtime == "llama_cpp" and row.value and row.baseline for row in steps)
    assert steps[0].settings["baseline_format"] in ("float16", "bfloat16") and steps[0].settings["cache"] == "float16"


@needed
def test_a_night_times_a_gguf_file(compiled: tuple[Path, Path, Timer]) -> None:
    from quantkit.nightly.timing import loaded

    loaded(compiled[1], "llama_cpp", 2, {})()


@needed
def test_it_goes_on_from_a_prompt_and_is_verified(compiled: tuple[Path, Path, Timer]) -> None:
    from quantkit.pipeline.reload import reload

    bundle = Bundle.load(compiled[1])
    said = load_runtime("llama_cpp").generate(bundle, "the", new_tokens=5, sample=False, seed=0, chat=False)
    model, words = load_runtime("llama_cpp").load(bundle), open_model(str(compiled[0])).tokenizer()
    ids = list(words("the")["input_ids"])
    for _ in range(5):  # no cache, and transformers' own tokenizer
        logits = model.run(model.state(1, len(ids)), np.array([ids]))
        ids.append(int(logits[0, -1].argmax()))
        if ids[-1] == words.eos_token_id:
            break
    assert f"the{said['text']}" == words.decode(ids, skip_special_tokens=True)
    found, notes = reload(bundle)
    assert {each.name for each in found} == {"gguf.tensors", "gguf.logits"} and all(each.ok for each in found)
    assert not notes


@needed
@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("weighed", [False, True])
def test_what_llama_quantize_makes_of_the_same_floats(
    weighed: bool, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`gguf-q8_0` to the byte; and with our importance matrix llama.cpp itself errs less by its weights."""
    import ctypes

    import llama_cpp

    from quantkit.exporters.gguf.exporter import EXPORT, MODEL
    from quantkit.exporters.values import Values
    from quantkit.model.finished import Finished
    from quantkit.model.streaming.stream import StreamedModel

    source = open_model(str(model))
    values = Values.of_results(source, StreamedModel(source), Finished([], {}))
    EXPORT.export(tmp_path, values, EXPORT.Options(floats="float32"))

    def made(kind: int, squares: dict[str, Any]) -> dict[str, Any]:
        entry = llama_cpp.llama_model_imatrix_data
        arrays = {name: np.ascontiguousarray(each, np.float32) for name, each in squares.items()}
        pointers = {
            name: each.ctypes.data_as(ctypes.POINTER(entry._fields_[1][1]._type_)) for name, each in arrays.items()
        }
        rows = [entry(name.encode(), pointers[name], each.size) for name, each in arrays.items()]
        asked = llama_cpp.llama_model_quantize_default_params()
        asked.ftype, asked.nthread = kind, 1
        listed = (entry * (len(rows) + 1))(*rows, entry(None, None, 0))
        if rows:
            asked.imatrix = ctypes.cast(listed, ctypes.POINTER(entry))
        out = tmp_path / f"{kind}-{len(rows)}.gguf"
        assert llama_cpp.llama_model_quantize(str(tmp_path / MODEL).encode(), str(out).encode(), asked) == 0
        return {each.name: each for each in gguf.GGUFReader(out).tensors}

    def compiled(recipe: str, changes: list[str]) -> dict[str, Any]:
        monkeypatch.setattr("quantkit.exporters.gguf.check.check", lambda *_: [])  # what is held here is more
        changes += ["gates.kl_max=null", "gates.top1_agreement_min=null"]
        compile_model(Request.of(str(model), recipe=recipe, out=tmp_path / "b", changes=changes, speed=False))
        return {each.name: each for each in gguf.GGUFReader(tmp_path / "b" / "gguf" / MODEL).tensors}

    if not weighed:
        ours = compiled("gguf-q8_0", [])
        theirs = made(llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0, {})
        assert ours.keys() == theirs.keys()
        for name, each in theirs.items():
            assert ours[name].tensor_type == each.tensor_type, name
            searched = name == "token_embd.weight"  # a table of its own, whose scales are searched
            assert searched or np.array_equal(ours[name].data, each.data), name
        return
    from quantkit.pipeline.imatrix import importance_of, weighed_by

    importance_of(str(model), tmp_path / "i.gguf", samples=2, tokens=32)
    stored = {each.name: each.data for each in gguf.GGUFReader(tmp_path / "i.gguf").tensors}
    sums = {name.removesuffix(".in_sum2"): each[0] for name, each in stored.items() if name.endswith(".in_sum2")}
    squares = {name: each / stored[f"{name}.counts"].item() for name, each in sums.items()}
    floats = {each.name: each.data for each in gguf.GGUFReader(tmp_path / MODEL).tensors}
    kind = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0
    errors = []
    by_file, _ = weighed_by(tmp_path / "i.gguf", "gguf-q4_0")
    for tensors in (made(kind, squares), made(kind, {}), compiled("gguf-q4_0", by_file)):
        read = {name: gguf.quants.dequantize(tensors[name].data, tensors[name].tensor_type) for name in squares}
        errors.append({name: float(((read[name] - floats[name]) ** 2 * squares[name]).sum()) for name in squares})
    assert len(squares) == 22
    for name, error in errors[0].items():
        assert max(error, errors[2][name]) < errors[1][name] or name == "output.weight", name  # Q6_K on all sides
