"""A whole search on a tiny model: what is written, what is kept, what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import zoo

from quantkit import cli
from quantkit.bundle import Bundle
from quantkit.errors import InputError
from quantkit.pipeline import Request
from quantkit.recipe import Recipe
from quantkit.tuning import harm as measurement
from quantkit.tuning.front import Budget
from quantkit.tuning.search import Tuned, TuneQuestion, scored_in, tune
from tuning.conftest import recipe


def search(model: Path, out: Path, *limits: str, check: bool = False, **changes: Any) -> Tuned:
    request = Request.of(str(model), recipe=recipe(**changes), out=out, speed=False)
    return tune(TuneQuestion(request, Budget.parse(limits), formats=["int4", "int8", "float"], samples=1, check=check))


def test_the_choice_is_compiled_and_is_what_was_promised(model: Path, tmp_path: Path) -> None:
    tuned = search(model, tmp_path / "out", "bits=5.5", check=True)
    names = {"tuned.yaml", "front.json", "harm.jsonl", "report.html", "bundle"}
    assert {path.name for path in tuned.out.iterdir()} == names
    front = json.loads((tuned.out / "front.json").read_text())
    assert front == json.loads(json.dumps(tuned.front))
    bundle = Bundle.load(tuned.out / "bundle")
    # bits by the tables, by the recipe, by what was stored
    chosen = front["chosen"]
    assert 5.0 < chosen["bits"] <= 5.5
    sizes = {layer.name: layer.shape[0] * layer.shape[1] for layer in bundle.manifest.layers}
    stored = sum(layer.bits_per_weight * sizes[layer.name] for layer in bundle.manifest.layers)
    assert stored / sum(sizes.values()) == pytest.approx(chosen["bits"])
    made = Recipe.load(tuned.out / "tuned.yaml")
    for unit in front["units"]:
        for name in unit["members"]:
            scheme = made.weights_for(name)
            assert scheme is not None
            assert unit["chosen"] == f"{scheme.format} g32"
            layer = next(layer for layer in bundle.manifest.layers if layer.name == name)
            assert layer.scheme == scheme.model_dump(mode="json")
    assert chosen["predicted"] == pytest.approx(sum(unit["harm"][unit["chosen"]] for unit in front["units"]))
    assert chosen["content_sha256"] == bundle.manifest.content_sha256
    assert front["factor"] == pytest.approx(chosen["measured"] / chosen["predicted"])
    # one scheme for all that fits was compiled too, and is worse
    assert (front["uniform"]["name"], front["uniform"]["bits"]) == ("int4 g32", pytest.approx(4.5))
    assert front["uniform"]["measured"] > chosen["measured"]
    assert front["texts"]["harm"]["split"] == front["texts"]["check"]["split"] == "tune"
    # a limit on KL is met by what was measured
    limit = front["uniform"]["measured"] / 3
    met = search(model, tmp_path / "kl", f"kl={limit}", check=True).front
    assert 1 <= len(met["checks"]) <= 3
    assert met["chosen"]["measured"] == met["checks"][-1]["measured"]
    assert met["checks"][-1]["measured"] <= limit or len(met["checks"]) == 3
    assert 4.5 < met["chosen"]["bits"] < 32


def test_harms_are_measured_once_for_all_budgets(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = search(model, tmp_path / "first", "bits=5")
    monkeypatch.setattr(measurement, "measure", lambda *_: pytest.fail("measured again"))
    second = search(model, tmp_path / "second", "bits=6.5")
    assert (first.out / "harm.jsonl").read_text() == (second.out / "harm.jsonl").read_text()
    assert second.front["chosen"]["predicted"] < first.front["chosen"]["predicted"]
    with pytest.raises(pytest.fail.Exception):
        search(model, tmp_path / "third", "bits=5", seed=1)  # another question


def test_a_search_that_was_killed_goes_on_where_it_was(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = search(model, tmp_path / "whole", "bits=5")
    kept = next((tmp_path / "cache" / "tune").iterdir())
    lines = kept.read_text().splitlines(keepends=True)
    kept.write_text("".join(lines[:8]))  # the first of three blocks
    started = []
    real = measurement.measure
    monkeypatch.setattr(
        measurement, "measure", lambda asked, start, tell: started.append(start) or real(asked, start, tell)
    )
    (tmp_path / "again.partial").mkdir()  # and left something
    again = search(model, tmp_path / "again", "bits=5")
    assert (started, (again.out / "harm.jsonl").read_text()) == ([1], (whole.out / "harm.jsonl").read_text())
    assert not (tmp_path / "again.partial").exists()


def test_nothing_is_left_where_a_budget_cannot_be_met(model: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="budget-unreachable"):
        search(model, tmp_path / "out", "bits=3")
    assert {path.name for path in tmp_path.iterdir()} == {"cache"}  # with the harms


def test_models_without_a_next_word_are_refused(tmp_path: Path, byte_tokenizer: Any) -> None:
    folder = tmp_path / "bert.tiny"
    zoo.save(folder, byte_tokenizer, "bert", vocab_size=len(byte_tokenizer))
    with pytest.raises(InputError, match="model-kind"):
        search(folder, tmp_path / "out", "bits=5")


def test_the_command_prints_one_object(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes = [
        "calibration.samples=2",
        "calibration.tokens=32",
        "scheme.weights.group=32",
        "scheme.weights.symmetric=true",
    ]
    asked = [part for change in changes for part in ("--set", change)]
    asked += ["--formats", "int4,int8", "--no-check", "--out", str(tmp_path / "out"), "--recipe", "rtn-int4", "--json"]
    assert cli.run(["tune", str(model), "--budget", "bits=5", *asked]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["command"], answer["error"]) == ("tune", None)
    assert Path(answer["result"]["recipe"]).is_file()
    assert answer["result"]["chosen"]["measured"] is None
    asked[asked.index(str(tmp_path / "out"))] = str(tmp_path / "other")
    assert cli.run(["tune", str(model), "--budget", "bits=4", *asked]) == 2
    answer = json.loads(capsys.readouterr().out)
    assert answer["error"]["code"] == "budget-unreachable"
    assert "bits=4.5" in answer["error"]["rule"]


def test_what_was_not_measured_keeps_the_recipes_scheme(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, hidden = measurement.measure, "model.layers.1.self_attn.o_proj"

    def partly(*asked: Any) -> Any:
        for wave in real(*asked):
            yield [each for each in wave if each.members != (hidden,)]

    monkeypatch.setattr(measurement, "measure", partly)
    tuned = search(model, tmp_path / "out", "bits=7")
    scheme = Recipe.load(tuned.out / "tuned.yaml").weights_for(hidden)
    assert scheme is not None
    assert scheme.format == "int4"
    assert [each.where for each in tuned.decisions if each.code == "not-measured"] == [hidden]
    # and counts with its 64 x 64 weights in 4.5 bits
    wide = [unit for unit in tuned.front["units"] if unit["chosen"] == "int8 g32"]
    sizes = sum(unit["weights"] for unit in tuned.front["units"])
    large = sum(unit["weights"] for unit in wide)
    bits = (8.5 * large + 4.5 * (sizes - large + 64 * 64)) / (sizes + 64 * 64)
    assert tuned.front["chosen"]["bits"] == pytest.approx(bits)


def test_the_first_runtime_that_is_here_scores() -> None:
    assert scored_in(["torch", "onnxruntime"], "a recipe") == "torch"


def test_an_engine_alone_is_refused_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    from quantkit.runtimes.tensorrt import TensorrtRuntime

    monkeypatch.setattr(TensorrtRuntime, "why_not_here", lambda self, folder=None: "no NVIDIA GPU")
    assert scored_in(["tensorrt", "onnxruntime"], "a recipe") == "onnxruntime"
    with pytest.raises(InputError) as caught:
        scored_in(["tensorrt"], "int4-tensorrt")
    assert caught.value.code == "tune-unscored"
    assert "tensorrt: no NVIDIA GPU" in caught.value.line()
