"""One word for each kind of model; what was written before is still read."""

from typing import Any, get_args

import pytest
from pydantic import TypeAdapter, ValidationError

from quantkit.errors import one
from quantkit.kinds import Kind, Said, today


def test_a_word_of_before_is_a_network() -> None:
    assert today("vision") == "network"
    assert [today(kind) for kind in get_args(Kind)] == ["decoder", "encoder", "network"]


@pytest.mark.parametrize("value", ["visoin", "graph", 3, None, ["vision"]])
def test_what_is_no_kind_stays_and_is_refused(value: Any) -> None:
    assert today(value) == value
    with pytest.raises(ValidationError, match="'decoder', 'encoder' or 'network'"):
        TypeAdapter(Said).validate_python(value)


def test_one_of_a_kind_in_a_sentence() -> None:
    assert [one(kind) for kind in get_args(Kind)] == ["a decoder", "an encoder", "a network"]
