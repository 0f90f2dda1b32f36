"""Tasks by lm-eval's definitions on quantkit's runtimes: what each item answers is what lm-eval's own model answers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import networks
import numpy as np
import pytest
import zoo

from quantkit.cli import run
from quantkit.errors import InputError, MissingDependency
from quantkit.measurement.rows import Row
from quantkit.measurement.tasks import documents
from quantkit.stats.shares import for_loss, from_counts

if TYPE_CHECKING:
    from quantkit.bundle import Bundle

LINES = [
    {"question": f"The {thing} is", "choices": ["blue", "green and wide", "a cat"], "answer": number % 3}
    for number, thing in enumerate(("sky", "sea", "old house", "night", "bread", "way home", "rain", "fourth of May"))
]
ASKED = [{"prompt": f"{number} and {number} is", "expected": "b"} for number in range(4)]
BUNDLE = "export=[{checkpoint: {}}, {onnx: {}}]"


def written(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="module", params=[pytest.param("float32", marks=pytest.mark.thorough), "bfloat16"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, bos_tokenizer: Any) -> Path:
    import torch

    folder = tmp_path_factory.mktemp("models") / "tiny"
    decoder: Any = zoo.tiny("llama", vocab_size=len(bos_tokenizer), max_position_embeddings=128)
    decoder.to(getattr(torch, request.param)).save_pretrained(folder)
    bos_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def bundle(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    import quantkit

    out, patch = tmp_path_factory.mktemp("bundles") / "bundle", pytest.MonkeyPatch()
    with patch.context() as context:
        context.setenv("QUANTKIT_CACHE", str(out.parent / "cache"))
        changes = [BUNDLE, "scheme.weights.group=16", "calibration.samples=2", "calibration.tokens=32"]
        return quantkit.compile(model, recipe="rtn-int4", out=out, changes=changes, speed=False)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def measured(bundle: Bundle, model: Path, *names: object, runtime: str = "torch", **how: Any) -> list[Any]:
    from quantkit.pipeline.tasks import TaskQuestion, measure_tasks

    return measure_tasks(bundle, TaskQuestion([str(name) for name in names], **how), str(model), runtime=runtime)


@pytest.fixture
def mine(tmp_path: Path) -> tuple[Path, Path]:
    return written(tmp_path / "mine.jsonl", LINES), written(tmp_path / "asked.jsonl", ASKED)


def test_every_item_is_answered_as_lm_eval_answers_it(model: Path, mine: tuple[Path, Path]) -> None:
    pytest.importorskip("lm_eval")
    from lm_eval.models.huggingface import HFLM

    from quantkit.measurement.tasks.defined import opened
    from quantkit.measurement.tasks.scored import build
    from quantkit.model.source.open import open_model
    from quantkit.model.streaming.stream import StreamedModel
    from quantkit.pipeline.tasks import asked_side
    from quantkit.runtimes.generate import LocalAnswers
    from quantkit.runtimes.torch import RUNTIME

    source, theirs = open_model(str(model)), HFLM(pretrained=str(model), device="cpu", dtype="float32", batch_size=1)
    side = LocalAnswers(lambda: StreamedModel(source), lambda: RUNTIME.writer(source.path))
    ours = asked_side("tiny", "torch", side, source, 128, lambda done, of: None).lm
    side.at_once = 64  # several parts
    tasks = opened([str(path) for path in mine], None)
    build(tasks, ours, None, False)
    choices, texts = (task.task.instances for task in tasks)
    for got, expected in zip(ours.loglikelihood(choices), theirs.loglikelihood(choices), strict=True):
        assert got[0] == pytest.approx(expected[0], abs=1e-4)
        assert got[1] == expected[1]
    assert ours.generate_until(texts) == theirs.generate_until(texts)
    whole = [type(choices[0])("loglikelihood_rolling", {}, ("A long text. " * 30,), 0)]
    assert ours.loglikelihood_rolling(whole) == pytest.approx(theirs.loglikelihood_rolling(whole), rel=1e-5)


def test_items_rows_and_files_of_a_bundle(bundle: Bundle, model: Path, mine: tuple[Path, Path], cache: Path) -> None:
    pytest.importorskip("lm_eval")
    rows = measured(bundle, model, *mine, floor=True, runtime="onnxruntime")
    named = {(row.settings["task"], row.settings["metric"], bool(row.settings.get("floor"))): row for row in rows}
    assert {key[:2] for key in named} == {("mine", "acc"), ("mine", "acc_norm"), ("asked", "exact_match")}
    items = [json.loads(line) for line in (bundle.path / "tasks-onnxruntime.jsonl").read_text().splitlines()]
    for (task, metric, floor), row in named.items():
        assert row.n == row.data.items == (8 if task == "mine" else 4)
        if floor:
            assert row.value == row.baseline.value  # both are the float model
            continue
        pairs = [
            (item["original"], item["value"]) for item in items if (item["task"], item["metric"]) == (task, metric)
        ]
        before, after = np.array(pairs).T
        assert (row.baseline.value, row.value) == (before.mean(), after.mean())
        assert row.shape["lost"] == (before > after).sum()
        assert row.baseline.p_value == from_counts(row.shape["lost"], row.shape["gained"]).p
        if before.mean():
            low, high = row.baseline.ratio_ci95
            assert low <= row.baseline.ratio == after.mean() / before.mean() <= high
    answers = sorted((cache / "answers").iterdir())
    before = [path.stat().st_size for path in answers]
    assert measured(bundle, model, *mine, floor=True, runtime="onnxruntime") == rows
    assert [path.stat().st_size for path in answers] == before  # asked once


def test_open_prompts_say_where_texts_part(bundle: Bundle, model: Path, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    path = written(tmp_path / "talk.jsonl", [{"prompt": prompt} for prompt in ("Tell me", "The sea is", "One, two")])
    (row,) = measured(bundle, model, path)
    texts = [json.loads(line) for line in (bundle.path / "tasks-torch.jsonl").read_text().splitlines()]
    texts = [text for text in texts if text["task"] == "talk"]
    assert [text["prompt"] for text in texts] == ["Tell me", "The sea is", "One, two"]
    places = [text["departs"] for text in texts]
    assert row.value == np.median([64 if place is None else place for place in places])
    assert row.shape == {"same": places.count(None), "tokens": 64}
    assert [text["original"] == text["value"] for text in texts] == [place is None for place in places]


def test_two_bundles_are_set_side_by_side_over_the_items_that_both_answered(
    bundle: Bundle, model: Path, mine: tuple[Path, Path], tmp_path: Path
) -> None:
    pytest.importorskip("lm_eval")
    import quantkit
    from quantkit.report.compared import document
    from quantkit.report.kit.tree import Sheet

    changes = ["export=[{checkpoint: {}}]", "calibration.samples=2", "calibration.tokens=32"]
    changes += ["scheme.weights.group=16", "scheme.weights.format=int8"]
    other = quantkit.compile(model, recipe="rtn-int4", out=tmp_path / "other", changes=changes, speed=False)
    measured(bundle, model, *mine, runtime="torch")
    rows = quantkit.measure(other, str(model), "torch", tasks=list(mine), limit=6)
    assert {(row["name"], row["n"]) for row in rows} == {("task.score", 6), ("task.score", 4)}
    found = quantkit.compare(bundle, other, runtime="torch", speed=False)
    sides = [
        [json.loads(line) for line in (one.path / "tasks-torch.jsonl").read_text().splitlines()]
        for one in (bundle, other)
    ]
    assert {(row.settings["task"], row.settings["metric"]) for row in found.tasks} == {
        *(("mine", "acc"), ("mine", "acc_norm"), ("asked", "exact_match"))
    }
    for row in found.tasks:
        of = (row.settings["task"], row.settings["metric"])
        before, after = (
            [item["value"] for item in side if (item["task"], item.get("metric")) == of][: row.n] for side in sides
        )
        assert row.n == row.data.items == (6 if of[0] == "mine" else 4)
        assert (row.baseline.value, row.value) == (np.mean(before), np.mean(after))
        assert row.shape["lost"] == sum(x > y for x, y in zip(before, after, strict=True))
        assert (row.baseline.subject, row.subject) == (found.a.content_sha256, found.b.content_sha256)
    against = quantkit.compare(str(model), other, runtime="torch", speed=False)
    assert [row.value for row in against.tasks] == [row["value"] for row in rows]
    assert [row.baseline.value for row in against.tasks] == [row["baseline"]["value"] for row in rows]
    (section,) = [part for part in document(found).parts if part.title == "Tasks"]
    assert next(part for part in section.parts if isinstance(part, Sheet)).head[1:3] == ("A", "B")
    assert {row["name"] for row in found.as_dict()["tasks"]} == {"task.score"}
    (other.path / "tasks-torch.jsonl").unlink()  # rows without their items are not compared
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("quantkit.bundle.Bundle.demand_intact", lambda *_: None)
        assert not quantkit.compare(bundle, other, runtime="torch", speed=False).tasks


SCORER = """
import numpy as np
def right(outputs, inputs, labels):
    assert len(inputs["images"]) == len(labels)
    return next(iter(outputs.values())).argmax(1) == labels
def surely(outputs, inputs, labels):
    return next(iter(outputs.values())).max(1)
def broken(outputs, inputs, labels):
    raise ValueError("no such class\\nand more")
def few(outputs, inputs, labels):
    return [1.0]
number = 3
"""


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import quantkit

    folder = tmp_path_factory.mktemp("network")
    networks.write(folder / "tiny.onnx")
    networks.image_set(folder / "set.npz", 60)
    (folder / "score.py").write_text(SCORER)
    how: dict[str, Any] = {"calibration": folder / "set.npz", "out": folder / "bundle", "speed": False}
    quantkit.compile(str(folder / "tiny.onnx"), "int8", **how)
    return folder


def test_a_network_is_scored_by_a_function_of_one_s_own(network: Path) -> None:
    import quantkit

    how: dict[str, Any] = {"baseline": network / "tiny.onnx", "task_data": network / "set.npz"}
    names = [f"{network}/score.py:right", f"{network}/score.py:surely"]
    rows = {row["settings"]["task"]: row for row in quantkit.measure(network / "bundle", tasks=names, **how)}
    scored = quantkit.measure(network / "bundle", how["baseline"], calibration=how["task_data"], speed=False)
    (top1,) = [row for row in scored if row["name"] == "accuracy.top1"]
    right = rows["score:right"]
    for name in ("value", "n", "ci95"):
        assert right[name] == top1[name]
    for name in ("value", "difference", "difference_ci95", "p_value", "subject"):
        assert right["baseline"][name] == top1["baseline"][name]
    assert "lost" in right["shape"]
    assert rows["score:surely"]["shape"] is None  # no share: it has no flips
    items = [json.loads(line) for line in (network / "bundle" / "tasks-onnxruntime.jsonl").read_text().splitlines()]
    assert np.mean([x["value"] for x in items if x["task"] == "score:surely"]) == pytest.approx(
        rows["score:surely"]["value"]
    )
    few = quantkit.measure(network / "bundle", tasks=names[:1], limit=6, **how)
    assert few[0]["n"] == 6


@pytest.mark.parametrize(
    ("name", "code", "told"),
    [
        ("piqa", "task-unsupported", "name it: ./score.py:function"),
        ("score.py:broken", "scorer-failed", "ValueError: no such class"),
        ("score.py:few", "scorer-failed", "shape [1]"),
        ("score.py:number", "plugin-broken", "number is an int"),
        ("score.py:none", "plugin-broken", "it defines no none"),
        ("nowhere.py:right", "file-missing", "nowhere.py"),
        ("no_such_module:right", "plugin-broken", "No module named 'no_such_module'"),
        (":right", "usage", "module:function"),
    ],
)
def test_a_scorer_that_fails_is_one_line(network: Path, name: str, code: str, told: str) -> None:
    import quantkit

    before = sorted((path.name, path.stat().st_size) for path in (network / "bundle").iterdir())
    asked = f"{network}/{name}" if name.partition(":")[0].endswith(".py") else name
    with pytest.raises(InputError) as caught:
        quantkit.measure(network / "bundle", network / "tiny.onnx", tasks=asked, task_data=network / "set.npz")
    assert caught.value.code == code
    assert told in caught.value.line()
    assert "\n" not in caught.value.line()
    assert sorted((path.name, path.stat().st_size) for path in (network / "bundle").iterdir()) == before


def test_an_encoder_has_no_task_but_pairs(bundle: Bundle, tmp_path: Path) -> None:
    manifest = bundle.manifest
    encoder = SimpleNamespace(
        path=tmp_path,
        manifest=manifest.model_copy(update={"model": manifest.model.model_copy(update={"kind": "encoder"})}),
    )
    with pytest.raises(InputError, match="recall and nDCG") as caught:
        measured(encoder, tmp_path, "piqa")  # type: ignore[arg-type]
    assert caught.value.code == "task-unsupported"


def test_without_lm_eval_the_extra_is_named(bundle: Bundle, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "lm_eval"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(MissingDependency, match="tasks"):
        measured(bundle, model, "piqa")


def test_arguments_of_python_that_do_not_go_together(bundle: Bundle) -> None:
    import quantkit

    for how in ({"tasks": "piqa", "quick": True}, {"tasks": "piqa", "calibration": "prose-en"}, {"limit": 3}):
        with pytest.raises(InputError) as caught:
            quantkit.measure(bundle, **how)
        assert caught.value.code == "usage"


def test_the_first_token_at_which_texts_part() -> None:
    from quantkit.measurement.tasks.scored import departures

    assert departures([[1, 2, 3], [1, 2], [4], [7, 8]], [[1, 5, 3], [1, 2], [4, 6], [9, 8]]) == [1, None, 1, 0]


def test_a_killed_run_goes_on(model: Path, mine: tuple[Path, Path]) -> None:
    pytest.importorskip("lm_eval")
    from quantkit.measurement.tasks.adapter import KeptAnswers

    kept = KeptAnswers({"model": "tiny"})
    kept.add("a", [-1.5, True])
    kept.write()
    with kept.path.open("ab") as file:
        file.write(b'["b", [-2')  # cut by a kill
    again = KeptAnswers({"model": "tiny"})
    assert "b" not in again
    again.add("b", [-2.5, False])
    again.write()
    last = KeptAnswers({"model": "tiny"})
    assert (last["a"], last["b"]) == ([-1.5, True], [-2.5, False])
    assert "a" not in KeptAnswers({"model": "another"})


@pytest.mark.parametrize(
    ("names", "how", "code", "told"),
    [
        (["pica"], {}, "unknown-task", "did you mean 'piqa'"),
        (["piqa"], {"data": "."}, "task-data-missing", "no .jsonl"),
        (["piqa"], {"data": "nowhere"}, "task-data-missing", "a folder with a file NAME.jsonl"),
        (["mine.jsonl"], {"chat": True}, "no-chat-template", "leave --chat out"),
        (["long.jsonl"], {}, "task-too-long", "context holds 128"),
        (["bad.jsonl"], {}, "task-data-invalid", "bad.jsonl:2"),
    ],
)
def test_refused_before_the_work(
    bundle: Bundle,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    names: list[str],
    how: Any,
    code: str,
    told: str,
) -> None:
    pytest.importorskip("lm_eval")
    written(tmp_path / "mine.jsonl", LINES)
    folder = tmp_path / "data"
    folder.mkdir()
    written(tmp_path / "long.jsonl", [{**LINES[0], "question": "x" * 200}])
    (tmp_path / "bad.jsonl").write_text(json.dumps(LINES[0]) + '\n{"question": "a"\n')
    monkeypatch.setattr("quantkit.measurement.tasks.scored.answered", None)  # no work is begun
    names = [str(tmp_path / name) if name.endswith("jsonl") else name for name in names]
    how = {**how, **({"data": folder / how["data"]} if "data" in how else {})}
    with pytest.raises(InputError) as caught:
        measured(bundle, model, *names, **how)
    assert caught.value.code == code
    assert told in caught.value.line()


@pytest.mark.parametrize(
    ("item", "told"),
    [
        ({"question": "a", "choices": ["b"], "answer": 0}, "two texts or more"),
        ({"question": "a", "choices": ["b", "c"], "answer": 2}, "from 0 to 1"),
        ({"question": "a", "choices": ["b", "c"], "answer": True}, "from 0 to 1"),
        ({"question": "a"}, "a line has `question`"),
        ({"prompt": "a", "expected": ""}, "`expected` is a text"),
        ({"prompt": "a"}, "of one kind"),
    ],
)
def test_bad_lines_of_one_s_own(tmp_path: Path, item: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError) as caught:
        documents.own(written(tmp_path / "mine.jsonl", [LINES[0], item]))
    assert caught.value.code == "task-data-invalid"
    assert told in caught.value.line()


def test_answers_as_text_letter_and_number(tmp_path: Path) -> None:
    lines = [{"question": "a", "choices": ["x", "y"], "answer": answer} for answer in ("y", "B", 1)]
    assert [item["answer"] for item in documents.own(written(tmp_path / "mine.jsonl", lines))[1]] == [1, 1, 1]


def test_a_folder_s_questions_become_the_fields_of_a_definition(tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    from quantkit.measurement.tasks.defined import opened

    written(
        tmp_path / "piqa.jsonl", [{"goal": "Open it", "choices": ["pull", "push"], "answer": "B"} for _ in range(2)]
    )
    written(
        tmp_path / "hellaswag.jsonl",
        [{"question": "It rains. she", "choices": ["runs.", "sits.", "eats.", "flies."], "answer": "A"}],
    )
    (piqa, hellaswag) = opened(["piqa", "hellaswag"], tmp_path)
    doc = next(iter(piqa.task.eval_docs))
    assert piqa.task.doc_to_text(doc) == "Question: Open it\nAnswer:"
    assert (piqa.task.doc_to_choice(doc), piqa.task.doc_to_target(doc)) == (["pull", "push"], 1)
    doc = next(iter(hellaswag.task.eval_docs))
    assert hellaswag.task.doc_to_text(doc) == "It rains. She"
    assert hellaswag.flags == ["prompt-without-activity-label"]


@pytest.mark.parametrize("right", [0, 1, 9, 10, 200])
def test_recovery_has_a_finite_interval_however_few_are_right(right: int) -> None:
    from quantkit.measurement.tasks.scored import recovery

    many = (np.arange(400) % 2).astype(float)
    few = many * (np.cumsum(many) <= right)
    told = recovery(many, few)
    low, high = told["ratio_ci95"]
    assert 0 <= low <= told["ratio"] == right / 200 <= high < 1 + 0.02 * (right == 200)
    assert right == 0 or np.isfinite(recovery(few, many)["ratio_ci95"]).all()
    assert recovery(np.zeros(400), many) == {}


def test_items_for_a_point() -> None:
    # McNemar's test, simulated: four of five draws of so many items show the loss
    count, generator = for_loss(0.02, 0.1), np.random.default_rng(0)
    lost, gained = (generator.binomial(count, share, 400) for share in (0.06, 0.04))
    found = np.mean([from_counts(int(b), int(c)).p <= 0.05 for b, c in zip(lost, gained, strict=True)])
    assert found == pytest.approx(0.8, abs=0.06)


def test_options_that_do_not_go_together(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["measure", "x", "--tasks", "piqa", "--quick"]) == 2
    assert "leave --quick out" in capsys.readouterr().err
    assert run(["measure", "x", "--chat"]) == 2
    assert "need --tasks" in capsys.readouterr().err


def test_a_gate_goes_by_the_lower_bound() -> None:
    from quantkit.pipeline.gates import judge
    from quantkit.recipe import Gates

    about = {"unit": "1", "subject": "a", "runtime": "torch", "value": 0.6}
    base = {"subject": "b", "value": 0.62, "ratio": 0.97}
    rows = [
        Row(
            name="task.score",
            **about,
            baseline={**base, "ratio_ci95": (low, 1.0)},
            settings={"task": "piqa", "metric": metric, **({"floor": True} if low < 0.9 else {})},
        )
        for metric, low in (("acc", 0.95), ("acc_norm", 0.93), ("acc", 0.5))
    ]
    limits = {"piqa": 0.94, "piqa acc": 0.94, "boolq": 0.9}
    checks, decisions = judge(Gates(recovery_min=limits), rows)
    assert [(check.name, check.value, check.ok) for check in checks] == [
        ("gate.piqa recovery_min", 0.93, False),
        ("gate.piqa acc recovery_min", 0.95, True),
    ]
    assert [taken.where for taken in decisions] == ["gates.boolq recovery_min"]
    assert "--tasks boolq" in decisions[0].reason
