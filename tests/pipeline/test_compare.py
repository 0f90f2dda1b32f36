"""Two bundles against each other: what is decided, what is refused, and what is said of what is missing.

Two bundles are timed in turns, each in the runtime that reads it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import planted
import planted_items as plants
import pytest
from planted_items import Plant, scores, times, write

from quantkit.bundle import Bundle, content_sha256, inventory
from quantkit.bundle.manifest import MEASUREMENTS
from quantkit.calibrate.tokens.ids import load_tokens
from quantkit.errors import InputError
from quantkit.measurement.compared import Compared, DecidedCell
from quantkit.measurement.rows import Row, read_rows, write_rows
from quantkit.measurement.timing.rounds import RoundsJob
from quantkit.measurement.timing.schedule import Timing
from quantkit.pipeline import sides
from quantkit.pipeline.compare import Margins, compare_bundles
from quantkit.pipeline.sides import open_sides
from quantkit.recipe import Recipe
from quantkit.report import compared as words
from quantkit.report.compared import document
from quantkit.runtimes.llama_cpp import LlamaCpp

if TYPE_CHECKING:
    from conftest import Made


GOOD = Plant("good")
WORSE = Plant("worse", seed=2, worse=0.04)
SLOWER = Plant("slower", seed=2, ratios=(2.0, 1.2))
LARGER = Plant("larger", seed=2, size=1500)
EQUAL = Plant("equal", seed=2)
SWAPPED = {"A better": "B better", "B better": "A better"}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("planted")
    for plant in (GOOD, WORSE, SLOWER, LARGER, EQUAL, WORSE.but("mixed", size=500)):
        write(found, plant)
    return found


def compared(a: Path, b: Path, **options: Any) -> Compared:
    return compare_bundles(a, b, **{"examples": 0, **options})


def cell(found: Compared, name: str, batch: int | None = None) -> DecidedCell:
    (one,) = [each for each in found.cells if each.name == name and each.batch == batch]
    return one


# --- what it says -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("other", "verdict", "code", "because"),
    [
        ("equal", "same", 0, "the same within the margin"),
        ("worse", "A better", 1, "B is worse in KL divergence: +0.0397 nats"),
        ("slower", "A better", 1, "B is worse in decode step, batch 2, context 128: 1.250 times as long"),
        ("larger", "A better", 1, "B is worse in weights: 1.500 times as large"),
        ("mixed", "mixed", 1, "B is better in weights: 0.500 times as large"),
    ],
)
def test_what_is_worse_is_named_and_exchanged_sides_exchange_the_verdict(
    other: str, verdict: str, code: int, because: str, home: Path
) -> None:
    there, back = compared(home / "good", home / other), compared(home / other, home / "good")
    assert (there.verdict, there.exit) == (verdict, code)
    assert any(because in reason for reason in there.because), there.because
    assert back.verdict == SWAPPED.get(verdict, verdict)
    assert back.exit == (1 if verdict == "mixed" else 0)
    for one, opposite in zip(there.cells, back.cells, strict=True):
        assert {one.answer, opposite.answer} in ({"same"}, {"worse", "better"}), one.name


def test_what_was_planted_is_what_is_found(home: Path) -> None:
    found = compared(home / "good", home / "worse")
    assert cell(found, "accuracy.kl").effect == pytest.approx(0.04, abs=0.003)
    assert cell(found, "accuracy.perplexity").effect == pytest.approx(0.04, abs=0.003)
    assert cell(found, "accuracy.next_word").effect == pytest.approx(0.45 * 0.04, abs=0.006)
    assert {each.how for each in found.cells} == {"paired", "ratio of ratios", "counted"}
    assert cell(found, "latency.decode_step", 1).effect == pytest.approx(0.0)
    assert found.flips is None
    assert "5,000 positions of prose-en" in found.data


def test_a_wider_margin_lets_it_pass(home: Path) -> None:
    assert compared(home / "good", home / "worse", margins=Margins(accuracy=0.2)).verdict == "same"
    assert compared(home / "good", home / "slower", margins=Margins(latency=0.5)).verdict == "same"
    assert compared(home / "good", home / "larger", margins=Margins(size=0.6)).verdict == "same"
    for name in ("accuracy", "latency", "size"):
        for wrong in (0.0, -1.0, float("nan")):
            with pytest.raises(InputError, match=rf"margin-invalid.*--{name}-margin"):
                Margins(**{name: wrong})


def test_noise_is_inconclusive_and_says_what_it_would_have_seen(home: Path, tmp_path: Path) -> None:
    noisy = write(tmp_path, EQUAL.but("noisy", reach=0.2))
    found = compared(home / "good", noisy)
    assert (found.verdict, found.exit) == ("inconclusive", 3)
    assert any("not decided, decode step" in reason and "would have been seen" in reason for reason in found.because)
    assert cell(found, "latency.decode_step", 1).detectable > 0.2
    assert compared(home / "good", noisy, speed=False).verdict == "same"


def test_the_float_model_is_known_by_what_was_measured_against_it(home: Path) -> None:
    found = compared("hf:org/a-model@main", home / "good")  # type: ignore[arg-type]
    assert found.a.content_sha256 == plants.ORIGINAL
    assert cell(found, "accuracy.kl").a == 0.0
    assert cell(found, "latency.decode_step", 1).effect == pytest.approx(-0.5)
    assert cell(found, "latency.decode_step", 1).how == "interleaved"
    assert cell(found, "size.bytes").effect == pytest.approx(-0.75)
    assert (found.verdict, found.exit) == ("mixed", 1)
    assert all(pair.a is None for pair in found.layers)
    back = compared(home / "good", "hf:org/a-model@main")  # type: ignore[arg-type]
    assert back.verdict == "mixed"
    assert cell(back, "latency.decode_step", 1).effect == pytest.approx(1.0)


def test_layers_that_differ_and_rise_are_shown(home: Path, tmp_path: Path) -> None:
    layer = {**plants.LAYER, "scheme": {**plants.INT4, "group": 32}, "error": 0.12}
    changes = {"layers": [layer, {**layer, "name": "layers.1.q"}]}
    found = compared(home / "good", write(tmp_path, EQUAL.but("other", changes=changes)), speed=False)
    assert [(pair.name, pair.errors) for pair in found.layers] == [
        ("layers.0.q", (0.08, 0.12)),
        ("layers.1.q", (0.0, 0.12)),
    ]
    said = shown(found)
    assert "2 quantized layers, 2 stored differently" in said
    risen = re.findall(r"(layers\.\d)\.q +(\d[.\d]*) % +12 %", said)
    assert risen == [("layers.1", "0"), ("layers.0", "8.0")]


def test_the_same_bundle_twice_is_said_to_be_that(home: Path) -> None:
    found = compared(home / "good", home / "good")
    assert found.verdict == "same"
    assert any("byte for byte" in note for note in found.notes)


def test_the_result_is_json(home: Path) -> None:
    found = compared(home / "good", home / "worse", examples=2).as_dict()
    assert json.loads(json.dumps(found, allow_nan=False)) == json.loads(json.dumps(found))
    assert found["verdict"]["answer"] == "A better"
    assert {each["answer"] for each in found["cells"]} <= {"worse", "same"}


# --- times ------------------------------------------------------------------------------------------------------------


def with_rows(home: Path, plant: Plant, change: Callable[[str], list[Row]]) -> Path:
    """The bundle with rows that are made of its subject."""
    path = write(home, plant)
    subject = read_rows(path / MEASUREMENTS)[0].subject
    lines = "".join(f"{row.line()}\n" for row in [*scores(subject), *change(subject)])
    Bundle.load(path).put(MEASUREMENTS, lines.encode())
    return path


@pytest.mark.parametrize(
    "options", [{"device": "cpu-2"}, {"baseline": "c" * 64}], ids=["another device", "another baseline"]
)
def test_times_that_cannot_be_set_against_each_other_are_not(
    options: dict[str, str], home: Path, tmp_path: Path
) -> None:
    other = with_rows(tmp_path, EQUAL.but("other"), lambda subject: times(subject, EQUAL, **options))
    found = compared(home / "good", other)
    assert not [each for each in found.cells if each.what == "latency"]
    assert any("speed is not compared" in note and "quantkit measure" in note for note in found.notes)
    assert found.verdict == "same"


def test_other_threads_are_no_comparison_and_a_busy_machine_is_said(home: Path, tmp_path: Path) -> None:
    def threads(subject: str) -> list[Row]:
        return [row.model_copy(update={"settings": {"threads": 1}}) for row in times(subject, EQUAL)]

    def busy(subject: str) -> list[Row]:
        found = []
        for row in times(subject, EQUAL):
            assert row.baseline is not None
            update = {"value": 2 * row.baseline.value}
            found.append(row.model_copy(update={"baseline": row.baseline.model_copy(update=update)}))
        return found

    found = compared(home / "good", with_rows(tmp_path, EQUAL.but("threads"), threads))
    assert not [each for each in found.cells if each.what == "latency"]
    found = compared(home / "good", with_rows(tmp_path, EQUAL.but("busy"), busy))
    assert any("2.0 times as long in one run" in note for note in found.notes)


def test_times_against_each_other_go_before_a_ratio_of_ratios(home: Path, tmp_path: Path) -> None:
    first = compared(home / "good", home / "equal").a.content_sha256

    def both(subject: str) -> list[Row]:
        return [*times(subject, EQUAL), *times(subject, EQUAL.but("x", ratios=(0.5,)), baseline=first)]

    other = with_rows(tmp_path, EQUAL.but("other"), both)
    found = [each for each in compared(home / "good", other).cells if each.what == "latency"]
    assert [(each.how, each.batch, each.effect) for each in found] == [("interleaved", 1, pytest.approx(1.0))]
    found = [each for each in compared(other, home / "good").cells if each.what == "latency"]
    assert [(each.how, each.batch, each.effect) for each in found] == [("interleaved", 1, pytest.approx(-0.5))]


# --- what is refused --------------------------------------------------------------------------------------------------


def refused(code: str, a: object, b: object, **options: Any) -> str:
    with pytest.raises(InputError) as caught:
        compare_bundles(a, b, **options)  # type: ignore[arg-type]
    assert caught.value.code == code
    assert caught.value.exit == 2
    return caught.value.line()


@pytest.mark.parametrize("name", ["model/model.safetensors", "items.safetensors", MEASUREMENTS])
def test_a_tampered_bundle_is_refused_on_either_side(name: str, home: Path, tmp_path: Path) -> None:
    other = write(tmp_path, EQUAL)
    data = bytearray((other / name).read_bytes())
    data[-3] ^= 1
    (other / name).write_bytes(data)
    assert name in refused("hash-mismatch", home / "good", other)
    assert name in refused("hash-mismatch", other, home / "good")


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"batches": [4]}, "usage"),
        ({"seconds": 3.0}, "usage"),
        ({"measure": True, "speed": False}, "usage"),
        ({"runtime": "onnxruntim"}, "unknown-runtime"),
    ],
)
def test_what_would_not_be_done_is_refused(options: dict[str, Any], code: str, home: Path) -> None:
    refused(code, home / "good", home / "equal", **options)


def test_another_model_is_refused(home: Path, tmp_path: Path) -> None:
    source = {"ref": "hf:org/other", "sha256": "f" * 64, "dtype": "float32"}
    other = write(tmp_path, EQUAL.but("other", changes={"model": {"name": "x", "kind": "decoder", "source": source}}))
    refused("models-differ", home / "good", other)
    refused("bundle-needed", "hf:org/a", "hf:org/b")
    refused("not-a-bundle", home / "good", tmp_path / "nowhere")
    refused("not-a-bundle", home / "good", tmp_path)


@pytest.mark.parametrize(
    ("data", "remedy"),
    [
        ({"set": "my-text", "sha256": "f" * 64}, "--calibration prose-en --no-speed"),
        ({"sha256": "f" * 64}, "one of them is older"),
    ],
)
def test_another_text_is_refused_with_the_command(
    data: dict[str, str], remedy: str, home: Path, tmp_path: Path
) -> None:
    other = write(tmp_path, EQUAL, rows=[])
    subject = compared(home / "good", home / "equal").b.content_sha256
    other = write(tmp_path / "again", EQUAL, rows=scores(subject, **data))
    said = refused("items-differ", home / "good", other)
    assert remedy in said
    assert f"quantkit measure {other}" in said


@pytest.mark.parametrize(("key", "value", "usual"), [("tokens", 256, 512), ("template", "chat", "null")])
def test_a_text_that_was_made_otherwise_is_refused_with_what_to_set(
    key: str, value: object, usual: object, home: Path, tmp_path: Path
) -> None:
    subject = compared(home / "good", home / "equal").b.content_sha256
    recipe = {"name": "x", "export": [{"checkpoint": {}}], "calibration": {key: value}}
    other = write(tmp_path, EQUAL.but("equal", changes={"recipe": recipe}), rows=scores(subject, sha256="f" * 64))
    assert f"--set calibration.{key}={value}" in refused("items-differ", other, home / "good")
    change = f"calibration.{key}={usual}"
    assert f"--set {change}" in refused("items-differ", home / "good", other)
    assert Recipe.load("awq-int4", [change])


def test_items_that_are_missing_or_of_another_text_are_refused(home: Path, tmp_path: Path) -> None:
    other = write(tmp_path / "1", EQUAL)
    Bundle.load(other).put_all({"items.safetensors": None})
    assert f"quantkit measure {other}" in refused("items-missing", home / "good", other)
    shorter = write(tmp_path / "2", EQUAL, found=plants.items(2, sequences=19))
    refused("items-differ", home / "good", shorter)
    items = plants.items(2)
    elsewhere = write(tmp_path / "3", EQUAL, found=replace(items, nll_original=items.nll_original[::-1].copy()))
    assert "nats apart" in refused("items-differ", home / "good", elsewhere)
    assert "not scored in onnxruntime" in refused(
        "runtime-unsupported", home / "good", home / "equal", runtime="onnxruntime"
    )


def test_a_nan_is_named(home: Path, tmp_path: Path) -> None:
    items = plants.items(2)
    items.kl[7] = np.nan
    assert "item 7" in refused("values-invalid", home / "good", write(tmp_path, EQUAL, found=items))


# --- models without next words ----------------------------------------------------------------------------------------


def labelled(home: Path, name: str, top1: float, *, difference: float, sha256: str = "e" * 64) -> Path:
    model = {"name": "net", "kind": "network", "source": {"ref": "path:net", "sha256": "b" * 64, "dtype": "float32"}}
    recipe = {"name": "int8-network", "export": [{"onnx": {}}]}
    plant = Plant(name, changes={"model": model, "recipe": recipe})
    subject = read_rows(write(home / "x", plant) / MEASUREMENTS)[0].subject
    data = {**plants.DATA, "set": "fashion-mnist", "sha256": sha256}
    against = {"subject": "b" * 64, "value": 0.918, "difference": difference}
    against["difference_ci95"] = (difference - 0.002, difference + 0.002)
    common: dict[str, Any] = {"subject": subject, "data": data, "runtime": "onnxruntime", "n": 10000, "unit": "1"}
    rows = [
        Row(
            name="accuracy.top1",
            value=top1,
            better="higher",
            ci95=(top1 - 0.006, top1 + 0.006),
            baseline=against,
            **common,
        ),
        Row(name="accuracy.cosine", value=0.99, better="higher", **common),
    ]
    path = write(home, plant, rows=rows)
    (path / "items.safetensors").unlink()
    return plants.seal(path, plant)


def test_labels_are_compared_by_their_rows(tmp_path: Path) -> None:
    one = labelled(tmp_path, "one", 0.917, difference=-0.001)
    other = labelled(tmp_path, "other", 0.880, difference=-0.038)
    found = compared(one, other)
    assert cell(found, "accuracy.top1").effect == pytest.approx(0.037)
    assert (cell(found, "accuracy.top1").answer, found.verdict) == ("worse", "A better")
    assert any("no items are kept" in note for note in found.notes)
    assert any("accuracy.cosine" in note for note in found.notes), "it has no interval"
    assert compared(other, one).verdict == "B better"
    floating = compared("path:net", other)  # type: ignore[arg-type]
    assert cell(floating, "accuracy.top1").effect == pytest.approx(0.038)
    refused("items-differ", one, labelled(tmp_path, "third", 0.9, difference=0.0, sha256="f" * 64))
    refused("bundle-without-onnx", one, other, measure=True)


# --- flipped words, and real bundles ----------------------------------------------------------------------------------


def shown(found: Compared) -> str:
    import io

    from quantkit.report.kit.screen import write as show

    out = io.StringIO()
    show([document(found)], out)
    return out.getvalue()


def flipped(
    tmp_path: Path, tokenizer: Any, plants_: tuple[Plant, ...], text: dict[str, Any], begins: str | None
) -> Any:
    """Bundles that were scored on the shipped text, and the tokens."""
    asked: dict[str, Any] = {"samples": 20, "tokens": 251, "seed": 0, "vocab_size": 258, **text}
    tokens = load_tokens("prose-en", "eval", tokenizer=tokenizer, **asked)
    paths = []
    for plant in plants_:
        first = write(tmp_path / "first", plant)
        tokenizer.save_pretrained(first / "model")
        (first / "model" / "config.json").write_text('{"vocab_size": 258}')
        data = {"sha256": tokens.sha256} | ({} if begins is None else {"begins": begins})
        write_rows(first / MEASUREMENTS, scores(content_sha256(inventory(first)), **data))
        paths.append(plants.seal(first, plant))
    return paths, tokens


@pytest.mark.parametrize(
    ("text", "begins"),
    [({}, "<s>"), ({"special": "none"}, None), ({"template": "chat"}, "<s>")],
    ids=["as prompts begin", "before sequences did", "chat"],
)
def test_the_text_is_read_again_as_it_was_scored(
    tmp_path: Path, chat_tokenizer: Any, text: dict[str, Any], begins: str | None
) -> None:
    chosen = planted.manifest().recipe | {"calibration": {"set": "prose-en", "template": text.get("template")}}
    sides = tuple(each.but(each.name, changes={"recipe": chosen}) for each in (GOOD, WORSE))
    paths, tokens = flipped(tmp_path, chat_tokenizer, sides, text, begins)
    found = compare_bundles(*paths, speed=False, examples=1)
    assert not found.notes
    assert found.flips is not None
    for flip in found.flips.examples:
        assert flip.follows == chat_tokenizer.decode([int(tokens.ids[flip.sequence, flip.position + 1])])


def test_flipped_words_are_shown_in_their_text(
    home: Path, tmp_path: Path, byte_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths, tokens = flipped(tmp_path, byte_tokenizer, (GOOD, WORSE), {}, "<s>")
    found = compare_bundles(*paths, speed=False, examples=3)
    assert found.flips is not None
    assert found.flips.lost > found.flips.gained > 0
    assert [flip.right for flip in found.flips.examples] == ["A"] * 3 + ["B"] * 3
    for flip in found.flips.examples:
        ids = tokens.ids[flip.sequence].tolist()
        assert flip.follows == byte_tokenizer.decode([ids[flip.position + 1]])
        assert flip.before == byte_tokenizer.decode(ids[max(0, flip.position - 15) : flip.position + 1])
    assert "A only" in shown(found)
    assert not found.notes
    # another text is refused where it was asked for
    (tmp_path / "other.txt").write_text("A word and another. " * 4000)
    assert "--calibration" not in refused("items-differ", *paths, calibration=str(tmp_path / "other.txt"))
    refused("file-missing", *paths, calibration=str(tmp_path / "nowhere.txt"))
    # the small install has the words, and not the text
    monkeypatch.setattr("quantkit.machine.has", lambda package: package != "torch")
    found = compare_bundles(*paths, speed=False, examples=1)
    assert any("torch is not installed" in note and "--calibration" in note for note in found.notes)
    assert found.flips is not None
    assert found.flips.examples[0].before is None
    assert not found.flips.examples[0].a.startswith("#")


def test_without_the_text_flipped_words_are_shown_by_number(home: Path) -> None:
    found = compare_bundles(home / "good", home / "worse", speed=False, examples=1)
    assert found.flips is not None
    assert found.flips.examples[0].before is None
    assert found.flips.examples[0].a.startswith("#")
    assert any("no tokenizer" in note for note in found.notes)
    assert "sequence" in shown(found)


class Timer:
    """Stands in for `measure.rounds.run`; remembers what it was asked."""

    def __init__(self, ratio: Callable[[int], float]) -> None:
        self.ratio = ratio
        self.jobs: list[RoundsJob] = []

    def __call__(self, job: RoundsJob, progress: object = None) -> list[Timing]:
        self.jobs.append(job)
        generator = np.random.default_rng(job.seed)
        found = []
        for shape in job.shapes:
            ours, theirs = 0.01 * generator.lognormal(0.0, 0.005, (2, 24, 2, 2))
            seconds = {"candidate": self.ratio(shape.batch) * ours, "baseline": theirs}
            found.append(Timing(seconds, seconds, [["candidate", "baseline"]] * 24, (4,) * 6, shape=shape))
        return found


def test_real_bundles_are_compared_and_timed_in_turns(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    timer = Timer(lambda batch: 1.0 if batch == 1 else 2.0)
    monkeypatch.setattr("quantkit.measurement.timing.rounds.run", timer)
    options: dict[str, Any] = {"measure": True, "margins": Margins(accuracy=0.05)}
    found = compare_bundles(made.both, made.both, batches=[1, 2], **options)
    assert [
        (each.batch, each.answer, each.confirmed) for each in found.cells if each.name == "latency.decode_step"
    ] == [
        (1, "same", None),
        (2, "worse", True),
    ]
    assert cell(found, "latency.decode_step", 2).effect == pytest.approx(1.0, rel=0.05)
    first, second = timer.jobs
    assert {shape.batch for shape in second.shapes if shape.name == "latency.decode_step"} == {2}
    assert second.seed != first.seed
    assert second.seconds == pytest.approx(first.seconds * len(second.shapes) / len(first.shapes))
    assert found.verdict == "A better"
    timer.ratio = lambda batch: 1.0 if len(timer.jobs) % 2 == 0 else 2.0
    found = compare_bundles(made.both, made.both, batches=[2], **options)
    assert cell(found, "latency.decode_step", 2).confirmed is False
    assert found.exit != 1, "a call that the second run takes back"
    refused("compare-float", made.both, str(made.model), measure=True)
    refused("bundle-without-onnx", made.both, made.packed, measure=True)


def test_a_real_bundle_against_the_folder_that_it_was_made_from(made: Made) -> None:
    found = compare_bundles(str(made.model), made.both)
    assert found.a.recipe == "float"
    assert found.flips is not None
    assert found.flips.n >= 300
    assert all(flip.before is not None for flip in found.flips.examples)
    assert cell(found, "size.bytes").answer == "better"
    only = compare_bundles(made.packed, made.both, speed=False)
    assert (only.a.runtime, only.b.runtime) == ("torch", "torch")
    assert cell(only, "accuracy.kl").effect == 0.0
    graphs = compare_bundles(made.floating, made.both, speed=False)
    assert (graphs.a.runtime, graphs.b.runtime) == ("onnxruntime", "onnxruntime")
    assert cell(graphs, "accuracy.kl").effect > 0
    apart = compare_bundles(made.packed, made.floating, speed=False)
    assert any("A was scored in torch and B in onnxruntime" in note for note in apart.notes)


@pytest.mark.parametrize(
    ("files", "scored", "items"),
    [
        (("items.safetensors",), ("tensorrt_rtx",), {"tensorrt_rtx": "items.safetensors"}),
        (("items.safetensors",), ("torch",), {"torch": "items.safetensors"}),
        (
            ("items.safetensors", "items-torch.safetensors"),
            ("torch", "tensorrt_rtx"),
            {"tensorrt_rtx": "items.safetensors", "torch": "items-torch.safetensors"},
        ),
    ],
    ids=["where it runs", "where it does not", "both"],
)
def test_whose_items_a_file_holds(
    files: tuple[str, ...], scored: tuple[str, ...], items: dict[str, str], tmp_path: Path
) -> None:
    """What is exported first may be an engine, which does not run everywhere."""
    recipe = {"name": "x", "export": [{"tensorrt": {}}]}
    plant = EQUAL.but("x", changes={"recipe": recipe})
    path = write(tmp_path, plant)
    for name in files:
        plants.items(1).save(path / name)
    subject = read_rows(path / MEASUREMENTS)[0].subject
    rows = [scores(subject)[0].model_copy(update={"runtime": runtime}) for runtime in scored]
    write_rows(path / MEASUREMENTS, rows)
    side, _ = open_sides(plants.seal(path, plant), path)
    assert side.items() == items


@pytest.mark.parametrize(
    ("gates", "code"),
    [
        ({"kl_max": 0.25, "top1_agreement_min": 0.7}, 0),
        ({"kl_max": 0.25}, 0),  # what it says nothing of follows from it
        ({"perplexity_ratio_max": 1.5}, 0),  # what none bounds is told, as the compile has it
        ({"kl_max": 0.01}, 1),
        ({"cosine_min": 0.99}, 1),  # about another kind of model
        ({}, 1),
    ],
)
def test_what_the_recipe_s_gates_allow_is_no_failure(gates: dict[str, float], code: int, tmp_path: Path) -> None:
    """`compile` judged it by these gates and was content: so is `compare` with the model that it was made from."""
    recipe = {**planted.manifest().recipe, "gates": gates}
    made = write(tmp_path, EQUAL.but("made", changes={"recipe": recipe}))
    found = compared("hf:org/a-model@main", made)  # type: ignore[arg-type]
    assert found.exit == code
    assert cell(found, "accuracy.kl").answer == "worse"
    said = "B is smaller, faster and worse within what its recipe allows"
    assert (words.headline(found) == said) == (code == 0)
    said_of = {each["name"]: each for each in json.loads(json.dumps(found.as_dict(), allow_nan=False))["cells"]}
    assert said_of["accuracy.kl"]["is_allowed"] == (code == 0)
    # whoever names a margin is judged by it
    assert compared("hf:org/a-model@main", made, margins=Margins(accuracy=0.01)).exit == 1  # type: ignore[arg-type]


@pytest.mark.parametrize(("batch", "code"), [(1, 0), (None, 1)])
def test_a_loss_of_time_that_the_bundle_s_verdict_ships_is_no_failure(
    batch: int | None, code: int, tmp_path: Path
) -> None:
    """Slower at batch 2, of which `compile` said: ship it up to batch 1."""
    verdict = {"answer": "ship_up_to" if batch else "ship_it", "batch": batch, "because": []}
    recipe = {**planted.manifest().recipe, "gates": {"kl_max": 0.25}}
    slower = EQUAL.but("slow", ratios=(2.0, 0.8), changes={"recipe": recipe, "verdict": verdict})
    made = write(tmp_path, slower)
    found = compared("hf:org/a-model@main", made)  # type: ignore[arg-type]
    assert cell(found, "latency.decode_step", 2).answer == "worse"
    assert found.exit == code
    assert (words.headline(found) == "mixed") == (code == 1)
    asked = Margins(latency=0.05)
    assert compared("hf:org/a-model@main", made, margins=asked).exit == 1  # type: ignore[arg-type]


def test_a_file_is_timed_by_what_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle: Any = SimpleNamespace(path=tmp_path, manifest=SimpleNamespace())
    monkeypatch.setattr(sides.usage, "file_runtime", lambda manifest: "llama_cpp")
    monkeypatch.setattr(LlamaCpp, "checked", lambda self, given: given.path / "gguf")
    monkeypatch.setattr(sides, "holds_graph", lambda given: False)
    monkeypatch.setattr(LlamaCpp, "context", lambda self, folder: 77)
    assert sides._reader(bundle) == (tmp_path / "gguf", "llama_cpp", 77)
