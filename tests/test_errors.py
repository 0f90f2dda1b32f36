"""Errors: one line each, whole through a pickle, with the exit codes of the contract."""

import json
import pickle

import pytest
from pydantic import BaseModel, ConfigDict, ValidationError

from quantkit import errors
from quantkit.errors import (
    GateError,
    Inconclusive,
    InputError,
    MissingDependency,
    QuantkitError,
    Stopped,
    Told,
    did_you_mean,
    escaped,
    from_validation,
    unknown_name,
)

EXITS = {QuantkitError: 2, InputError: 2, GateError: 1, Inconclusive: 3, Stopped: 75, MissingDependency: 2, Told: 2}


def test_every_error_has_its_exit_code() -> None:
    family = {kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, QuantkitError)}
    assert {kind: kind.exit for kind in family} == EXITS


@pytest.mark.parametrize("kind", [kind for kind in EXITS if kind not in (MissingDependency, Told)])
def test_pickled_and_back(kind: type[QuantkitError]) -> None:
    error = kind("a-code", where="w", value=3, rule="r", remedy="m")
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is kind
    assert (
        back.as_dict() == error.as_dict() == {"code": "a-code", "where": "w", "value": "3", "rule": "r", "remedy": "m"}
    )
    assert str(back) == "[a-code] w: 3; r; m"


def test_a_missing_dependency_stays_one_through_a_pickle_and_says_what_to_install() -> None:
    error = MissingDependency("torch", extra="compile", purpose="quantizing")
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is MissingDependency
    assert back.line() == error.line()
    assert "pip install -e '.[compile]'" in back.line()
    assert "quantizing needs it" in back.line()


@pytest.mark.parametrize("nasty", ["a\nb", "a\r\nb", "a\rb", "a\x0bb", "a\x85b", "a\u2028b", "a\n\n\tb"])
def test_an_error_is_one_line_whatever_is_in_it(nasty: str) -> None:
    error = InputError("code", where=nasty, value=nasty, rule=nasty, remedy=nasty)
    assert error.line() == "[code] a b: a b; a b; a b"
    assert error.value == nasty


def test_what_is_empty_leaves_no_trace() -> None:
    assert InputError("code", rule="r").line() == "[code] r"
    assert InputError("code", where="w", remedy="m").line() == "[code] w: m"


def test_did_you_mean_guesses_only_what_is_near() -> None:
    known = ["awq-int4", "gptq-int4", "float"]
    assert did_you_mean("awq-int5", known) == "did you mean 'awq-int4'? known: awq-int4, float, gptq-int4"
    assert did_you_mean("zzz", known) == "known: awq-int4, float, gptq-int4"
    many = did_you_mean("file-7.jpeg", [f"file-{number}.jpg" for number in range(60)])
    assert many.startswith("did you mean 'file-7.jpg'? known: file-7.jpg, ") and many.endswith(", and 52 more")
    assert did_you_mean("x", []) == "known: none"
    error = unknown_name("pass", "rtm", ["rtn", "gptq"], where="passes")
    assert error.line() == "[unknown-pass] passes: no pass is called 'rtm'; did you mean 'rtn'? known: gptq, rtn"


class Inner(BaseModel):
    model_config = ConfigDict(extra="forbid")
    size: int


class Outer(BaseModel):
    model_config = ConfigDict(extra="forbid")
    inner: list[Inner]
    name: str = ""


@pytest.mark.parametrize(
    ("data", "line"),
    [
        ({"inner": [{"size": 1}], "nam": 1}, "[bad] f: nam: unknown key; Extra inputs are not permitted; did you mean"),
        (
            {"inner": [{"size": 1, "sise": 1}]},
            "[bad] f: inner.0.sise: unknown key; Extra inputs are not permitted;",
        ),
        ({"inner": [{"size": "x"}], "name": 3}, "[bad] f: inner.0.size: got 'x'; Input should be a valid integer,"),
        ({}, "[bad] f: inner: Field required"),
    ],
)
def test_validation_gives_the_first_problem_its_place_and_a_guess(data: object, line: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Outer.model_validate(data)
    known = {"": ["inner", "name"], "inner": ["size"]}
    error = from_validation(caught.value, where="f", code="bad", known=known)
    assert error.line().startswith(line)
    assert ("(and 1 more)" in error.rule) == (len(caught.value.errors()) > 1)


def test_a_terminal_obeys_nothing_that_an_error_says() -> None:
    hostile = "a\x1b]0;title\x07\x9b2J\u202eb"
    line = InputError("file-missing", where=hostile, value=hostile).line()
    assert "a␛]0;title␇�2J�b" in line
    coloured = InputError("export-untraceable", value="\x1b[31m\x1b[1mCould not guard\x1b[0m on data")
    assert coloured.as_dict()["value"] == "Could not guard on data"
    assert json.loads(escaped(json.dumps({"name": hostile}, ensure_ascii=False))) == {"name": hostile}
