"""A few mutants of every target, and those that once were not clean."""

import random
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from fuzz.campaign import classed, late
from fuzz.targets import BY_NAME, TARGETS
from quantkit.errors import QuantkitError

# mutants of which a campaign said something: target -> their numbers
FOUND: dict[str, tuple[int, ...]] = {
    "onnx": (316, 947),
    "onnx-external": (173, 338, 471, 2235),
    "config": (14, 118, 694),
    "card": (9023,),
    "index": (7465, 15841),
    "recipe": (3313, 3451),
    "manifest": (12659,),
    "npz": (1004746,),
    "zip": (524, 3341),
    "tokenizer-config": (9, 104, 128),
}
MUTANTS, OF_SLOW = 15, 3


@pytest.fixture
def alarm() -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, late)
    yield
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("name", [target.name for target in TARGETS])
@pytest.mark.usefixtures("alarm")
def test_a_mutant_is_read_or_refused(name: str, tmp_path: Path, own_cache: Path) -> None:
    target = BY_NAME[name]
    file = target.seed(tmp_path)
    honest = file.read_bytes()
    with suppress(QuantkitError):  # an answer may be an error
        target.read(tmp_path)  # what is imported by that is not timed
    assert classed(target, tmp_path) == ("clean", ""), "the honest file is read"
    for number in (*FOUND.get(name, ()), *range(OF_SLOW if target.slow else MUTANTS)):
        file.write_bytes(target.mutate(honest, random.Random(f"{name} {number}")))
        assert classed(target, tmp_path) == ("clean", ""), f"mutant {number}"
