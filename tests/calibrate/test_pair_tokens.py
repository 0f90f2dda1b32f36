"""Pairs as rows of ids to calibrate on: as long as the longest text, each beginning with one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quantkit.calibrate.tokens.ids import is_pairs, load_pair_tokens
from quantkit.errors import InputError


@pytest.fixture
def own(tmp_path: Path) -> str:
    path = tmp_path / "own.tsv"
    path.write_text("".join(f"n{n}\told {'word ' * (n % 4)}{n}\tnew {n}\n" for n in range(60)))
    return str(path)


def test_calib_is_packed_and_eval_keeps_its_pairs(own: str, byte_tokenizer: Any) -> None:
    asked: dict[str, Any] = {"tokenizer": byte_tokenizer, "samples": 4, "tokens": 64, "vocab_size": 258}
    seen, again, other = (load_pair_tokens(own, "calib", seed=seed, **asked) for seed in (0, 0, 1))
    longest = len("old word word word 47") + 2
    assert seen.ids.shape == (-(-4 * 64 // longest), longest)
    assert (seen.ids[:, 0] == 256).all()
    assert seen.begins == "<s>"
    assert seen.sha256 == again.sha256 != other.sha256
    scored = load_pair_tokens(own, "eval", seed=0, **asked)
    assert scored.pairs is not None
    assert scored.items == 6
    assert scored.unit == "pair"
    assert scored.pairs.right == [f"new {n}" for n in range(54, 60)]
    assert scored.sha256 == load_pair_tokens(own, "eval", seed=1, **asked).sha256 == scored.pairs.sha256


def test_what_is_of_pairs_and_what_is_refused(own: str, byte_tokenizer: Any) -> None:
    assert is_pairs("verse-pairs")
    assert is_pairs(own)
    assert not is_pairs("prose-en")
    asked: dict[str, Any] = {"samples": 4, "tokens": 64, "seed": 0}
    with pytest.raises(InputError, match="no tokenizer"):
        load_pair_tokens(own, "calib", tokenizer=None, vocab_size=258, **asked)
    with pytest.raises(InputError, match="id 257"):
        load_pair_tokens(own, "calib", tokenizer=byte_tokenizer, vocab_size=256, **asked)
