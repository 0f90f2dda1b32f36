"""Sets of pairs: read line by line, drawn, without a text that stands on a side twice."""

import re
from pathlib import Path
from typing import Any

import pytest
from test_card import write_card

from quantkit import content
from quantkit.calibrate.sets.card import Card
from quantkit.calibrate.sets.pairs import PairSet, load_pairs
from quantkit.calibrate.tokens.ids import is_pairs, load_pair_tokens
from quantkit.errors import InputError


def lines(first: int, last: int) -> str:
    return "".join(f"verse {n}\tthe old words {n}\tthe new words {n}\n" for n in range(first, last))


def load(reference: object, split: Any = "calib", samples: int | None = None, seed: int = 0) -> PairSet:
    return load_pairs(str(reference), split, samples=samples, seed=seed)


@pytest.fixture
def shipped(tmp_path: Path) -> Path:
    files = {"calib.tsv": lines(0, 30).encode(), "eval.tsv": lines(30, 50).encode()}
    write_card(tmp_path / "set", files, kind="pairs")
    return tmp_path / "set"


def test_pairs_stay_together_and_in_order(shipped: Path) -> None:
    found = load(shipped, "eval")
    assert found.left == [f"the old words {n}" for n in range(30, 50)]
    assert found.right == [f"the new words {n}" for n in range(30, 50)]
    assert (found.name, found.split, found.notes) == ("set", "eval", ())


def test_the_seed_moves_calib_and_nothing_else(shipped: Path) -> None:
    first, again, other = (load(shipped, samples=8, seed=seed) for seed in (0, 0, 1))
    assert first.sha256 == again.sha256 != other.sha256
    assert [text.replace("old", "new") for text in first.left] == first.right
    assert load(shipped, samples=4).left == first.left[:4]
    assert load(shipped, "eval", 8, seed=0).left == load(shipped, "eval", 8, seed=1).left
    assert load(shipped, samples=31).notes == ("set has 30 pairs to calib, 31 were asked for",)


def test_own_pairs_have_their_splits(tmp_path: Path) -> None:
    path = tmp_path / "own.tsv"
    path.write_bytes(b"\xef\xbb\xbf" + lines(0, 40).replace("\n", "\r\n").encode())
    parts = [load(path, split).left for split in ("calib", "tune", "eval")]
    assert [len(part) for part in parts] == [34, 2, 4]
    assert [*parts[0], *parts[1], *parts[2]] == [f"the old words {n}" for n in range(40)]
    assert "tune is pairs 35 to 36 of 40" in load(path, "tune").notes[0]


def test_a_text_that_repeats_has_no_single_answer(tmp_path: Path) -> None:
    text = lines(0, 6) + "again\tother words\tthe new words 2\n" + lines(6, 14)
    write_card(tmp_path / "set", {"calib.tsv": text.encode()}, kind="pairs")
    found = load(tmp_path / "set")
    assert len(found.left) == 14 and len(set(found.right)) == 14
    assert found.notes == ("1 pairs of set repeat a text of another and were left out",)


@pytest.mark.parametrize(
    "code, data, message",
    [
        ("columns", b"a\tb\tc\nd\te\n", "own.tsv:2: 2 columns"),
        ("columns", b"a\tb\tc\td\n", "4 columns"),
        ("columns", b"a\t \tc\n", "an empty text"),
        ("empty", b"\n \n", "no pair"),
        ("not-text", b"a\tb\t\xff\n", "0xff at 4"),
        ("short", b"a\tb\tc\n", "none of them left for calib"),
    ],
)
def test_what_is_no_pair_is_refused(tmp_path: Path, code: str, data: bytes, message: str) -> None:
    (tmp_path / "own.tsv").write_bytes(data)
    with pytest.raises(InputError) as caught:
        load(tmp_path / "own.tsv")
    assert caught.value.code == f"calibration-{code}"
    assert re.search(message, caught.value.line()) and caught.value.remedy


@pytest.mark.parametrize("name, code", [("prose-en", "kind"), ("./own.txt", "suffix"), (".", "suffix")])
def test_other_sets_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.txt").write_text("words")
    Path("set").mkdir()
    with pytest.raises(InputError) as caught:
        load("./set" if name == "." else name)
    assert caught.value.code == f"calibration-{code}"


SHIPPED = [
    name for name in content.names("calibration") if Card.load(content.find("calibration", name)).kind == "pairs"
]


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_pairs_share_no_text(name: str) -> None:
    seen: set[str] = set()
    for split in ("calib", "tune", "eval"):
        found = load(name, split)
        texts = {*found.left, *found.right}
        assert not found.notes and len(found.left) >= 100 and not texts & seen
        seen |= texts


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
