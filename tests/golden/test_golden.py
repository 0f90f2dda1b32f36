"""What does not change while the code does; `golden/__init__.py` says how each part is written anew."""

from pathlib import Path
from typing import Any

import pytest
from thorough import beside

from golden import contents, goldens, shapes, words


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("contents")


LARGE = {name for name in contents.COMPILES if name.startswith(("smollm2", "efficientnet"))}


@pytest.mark.parametrize("name", beside(set(contents.COMPILES) - LARGE, contents.COMPILES))
def test_the_same_bytes_come_out(name: str, folder: Path, one_thread: None, fresh_traces: None) -> None:
    known = goldens()["contents"].get(contents.here(), {})
    if name not in known:
        pytest.skip(f"no content of {name} on {contents.here()}; `cd tests && python -m golden contents`")
    if not contents.installed(name):
        pytest.skip(f"the model of {name} is not installed")
    assert contents.compiled(name, folder)["content_sha256"] == known[name]


def test_the_words_of_the_command_line() -> None:
    assert words.words() == goldens()["words"]


def test_the_codes_of_errors_and_what_commands_exit_with() -> None:
    assert words.codes() == goldens()["codes"]
    assert words.exits() == goldens()["exits"]


def test_every_command_has_a_shape() -> None:
    groups = {"quantkit", "device", "nightly", "runtime"}
    commands = {name.removeprefix("quantkit ") for name in words.words()} - groups
    known = {name.removeprefix("result of ") for name in goldens()["shapes"]} - {"envelope", "error", "decisions"}
    assert known == commands | {"compile --dry-run"}


@pytest.mark.parametrize(
    ("value", "wrong"),
    [
        ({"a": 1, "b": []}, []),
        ({"a": None, "b": [{"c": "x"}]}, []),
        ({"a": 1}, ["result of x.b: missing"]),
        ({"a": 1, "b": [], "d": 1}, ["result of x.d: a new key"]),
        ({"a": "1", "b": []}, ["result of x.a: text for ['null', 'number']"]),
        ({"a": 1, "b": [{}]}, ["result of x.b[].c: missing"]),
    ],
)
def test_a_shape_tells_keys_and_types_apart(value: Any, wrong: list[str]) -> None:
    known = shapes.merged(shapes.shape_of({"a": 1, "b": [{"c": ""}]}), shapes.shape_of({"a": None, "b": []}))
    envelope = {"command": "x", "error": None, "decisions": [], "result": value}
    parts = {"envelope": shapes.shape_of(envelope | {"result": None}), "error": "null", "result of x": known}
    assert shapes.differences(envelope, parts) == wrong
