"""`quantkit compare`: exit codes, the envelope, and one line for what is wrong."""

from pathlib import Path
from typing import Any

import pytest
from planted_items import Plant, write

GOOD = Plant("good")


@pytest.mark.parametrize(
    ("plant", "code", "error"),
    [
        (Plant("equal", seed=2), 0, None),
        (Plant("worse", seed=2, worse=0.04), 1, "worse"),
        (Plant("noisy", seed=2, reach=0.2), 3, "inconclusive"),
    ],
    ids=lambda value: value.name if isinstance(value, Plant) else "",
)
def test_the_exit_code_says_whether_it_is_no_worse(
    plant: Plant, code: int, error: str | None, tmp_path: Path, quantkit: Any
) -> None:
    a, b = write(tmp_path, GOOD), write(tmp_path, plant)
    ran = quantkit("compare", a, b, "--examples", 0)
    assert ran.code == code
    assert "verdict: " in ran.out
    found = quantkit("compare", a, b, "--examples", 0, "--json").envelope
    assert found["exit"] == found["result"]["verdict"]["exit"] == code
    assert (found["error"] or {}).get("code") == error
    assert found["result"]["a"]["name"] == str(a)
    assert quantkit("compare", b, a, "--examples", 0).code == (3 if code == 3 else 0)


def test_margins_and_what_is_compared_are_the_user_s(tmp_path: Path, quantkit: Any) -> None:
    a, b = write(tmp_path, GOOD), write(tmp_path, Plant("b", seed=2, worse=0.04, size=1200, reach=0.2))
    assert quantkit("compare", a, b, "--examples", 0).code == 1
    options = ("--accuracy-margin", 0.2, "--size-margin", 0.5)
    assert quantkit("compare", a, b, *options).code == 3
    assert quantkit("compare", a, b, *options, "--no-speed").code == 0
    assert quantkit("compare", a, b, *options, "--latency-margin", 1.0).code == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--draft", "./a"), "--draft and --of name a bundle each"),
        (("--of", "./a"), "--draft and --of name a bundle each"),
        (("./a", "./b", "--draft", "./c", "--of", "./d"), "leave A out"),
        (("--draft", "./c", "--of", "./d", "--measure"), "leave --measure out"),
        (("./a",), "A and B, or --draft and --of"),
    ],
)
def test_a_draft_is_named_with_its_target(options: tuple[str, ...], words: str, quantkit: Any) -> None:
    ran = quantkit("compare", *options)
    assert ran.code == 2 and "[usage]" in ran.err and words in ran.err
    assert ran.err.count("\n") == 1
