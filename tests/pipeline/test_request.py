"""What is asked of a compile, refused as a whole before anything heavy is imported."""

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from quantkit.errors import InputError
from quantkit.pipeline.request import Request, default_out, this_machine
from quantkit.planning.support import stored_formats
from quantkit.recipe import Recipe
from quantkit.target import Stored, Target


def recipe(**changes: Any) -> Recipe:
    data = {"summary": "", "scheme": {"weights": {"format": "int4", "symmetric": False}}, "passes": ["rtn"], **changes}
    return Recipe.from_dict(data, name="own")


def refused(**options: Any) -> InputError:
    with pytest.raises(InputError) as caught:
        Request.of(**options)
    return caught.value


def test_the_defaults_are_what_the_command_says() -> None:
    found = Request.of()
    assert found.model == "smollm2-135m"
    assert found.recipe.name == "awq-int4"
    assert found.target.name == this_machine()
    assert found.out is None


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        ({"recipe": "awq-int5"}, "unknown-recipe", "did you mean 'awq-int4'?"),
        ({"target": "l5"}, "unknown-target", "did you mean 'l4'?"),
        ({"calibration": "prose-em"}, "unknown-calibration", "did you mean 'prose-en'?"),
        ({"recipe": "./none.yaml"}, "file-missing", "check the path"),
        ({"calibration": "./none.txt"}, "file-missing", "check the path"),
        ({"changes": ["awk.grid=3"]}, "set-invalid", "did you mean 'awq'?"),
    ],
)
def test_what_is_misspelt_is_named(options: dict[str, Any], code: str, says: str) -> None:
    error = refused(**options)
    assert error.code == code
    assert says in error.line()


def test_gates_of_a_shipped_recipe_were_not_asked_for() -> None:
    assert Request.of().gates_asked == set()
    assert Request.of(changes=["gates.kl_max=0.3"]).gates_asked == {"kl_max"}
    assert Request.of(changes=["gates={agreement_min: 0.9}"]).gates_asked == {"agreement_min"}
    assert Request.of(recipe=recipe(gates={"kl_max": 0.1})).gates_asked == {"kl_max"}


def test_changes_reach_a_recipe_however_it_is_given() -> None:
    for given in ("gptq-int4", Recipe.load("gptq-int4")):
        found = Request.of(recipe=given, changes=["scheme.weights.group=32"]).recipe
        assert found.scheme.weights is not None
        assert (found.name, found.scheme.weights.group) == ("gptq-int4", 32)


def test_another_calibration_set_replaces_only_the_set(tmp_path: Path) -> None:
    text = tmp_path / "own.txt"
    text.write_text("words")
    plain = Recipe.load("gptq-int4").calibration
    found = Request.of(recipe="gptq-int4", calibration=text).recipe.calibration
    assert found.set == str(text)
    assert (found.samples, found.tokens) == (plain.samples, plain.tokens)


def test_a_path_object_is_a_path_however_it_is_spelt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    Path("own").write_text(yaml.safe_dump(recipe().as_dict()))
    found = Request.of(recipe=Path("own"), calibration=Path("./data"))
    assert found.recipe.name == "own"
    assert found.recipe.calibration.set == "./data"
    assert refused(calibration="data").code == "unknown-calibration", "a bare word is a shipped name"


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    for out in (tmp_path, tmp_path / "file"):
        (tmp_path / "file").touch()
        error = refused(recipe="float", out=out)
        assert (error.code, error.where) == ("out-exists", str(out))
    assert Request.of(recipe="float", out=tmp_path, resume=True).out == tmp_path
    assert Request.of(recipe="float", out=tmp_path / "new").out == tmp_path / "new"


def target(**changes: Any) -> Target:
    data = Target.load("l4").as_dict()
    name = data.pop("name")
    return Target.from_dict({**data, **changes}, name=name)


def cell(state: str, **more: Any) -> dict[str, Any]:
    return {"torch": {"state": state, "source": "a test", **more}}


def test_a_recipe_that_the_target_cannot_run_is_refused() -> None:
    able = target(runtimes=["torch"], formats={"int4": cell("emulated")})
    assert Request.of(recipe=recipe(), target=able).target is able
    absent = target(runtimes=["torch"], formats={"int4": cell("absent"), "int8": cell("native")})
    error = refused(recipe=recipe(), target=absent)
    assert error.code == "target-cannot-run"
    assert "int4 weights do not run in torch" in error.value
    assert "int8" in error.remedy
    symmetric = target(runtimes=["torch"], formats={"int4": cell("native", symmetric_only=True)})
    assert "symmetric=true" in refused(recipe=recipe(), target=symmetric).remedy
    Request.of(recipe=recipe(), target=symmetric, changes=["scheme.weights.symmetric=true"])


def test_a_target_without_any_runtime_for_the_export_is_refused() -> None:
    formats = {"int4": {"tensorrt_rtx": {"state": "native", "source": "a test"}}}
    error = refused(recipe=recipe(), target=target(runtimes=["tensorrt_rtx"], formats=formats, build={}))
    assert error.code == "target-cannot-run"
    assert "runtime torch" in error.value


def test_overrides_count_whatever_their_glob_looks_like() -> None:
    """A glob with brackets does not match its own text."""
    found = recipe(
        overrides=[
            {"match": "*.[qk]_proj", "weights": {"format": "int8"}},
            {"match": "*.o_proj"},
            {"match": "*.v_proj", "weights": {"symmetric": True}},
        ]
    )
    assert stored_formats(found) == [Stored("int4", False), Stored("int8", False), Stored("int4", True)]
    absent = target(runtimes=["torch"], formats={"int4": cell("native"), "int8": cell("absent")})
    assert "int8 weights" in refused(recipe=found, target=absent).value


def test_bundles_are_numbered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert default_out("m", "r", resume=False) == Path("m--r")
    Path("m--r").mkdir()
    assert default_out("m", "r", resume=False) == Path("m--r-2")
    Path("m--r-2.partial").mkdir()
    assert default_out("m", "r", resume=False) == Path("m--r-3")
    assert default_out("m", "r", resume=True) == Path("m--r-2")
    assert default_out("m", "q", resume=True) == Path("m--q"), "nothing to go on with: a fresh one"


def test_resuming_takes_the_latest_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for age, name in enumerate(
        ("m--r-3.partial", "m--r.partial", "m--r-fast.partial", "m--rtn.partial", "m--r-x2.partial")
    ):
        Path(name).mkdir()
        os.utime(name, (1_000_000 + age, 1_000_000 + age))
    assert default_out("m", "r", resume=True) == Path("m--r"), "r-fast is another recipe"
    Path("m[1]--r.partial").mkdir()
    assert default_out("m[1]", "r", resume=True) == Path("m[1]--r")
