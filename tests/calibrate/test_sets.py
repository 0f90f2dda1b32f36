from __future__ import annotations

import hashlib
import json
import re
from typing import Any

import numpy as np
import pytest
import torch
from test_card import write_card

from quantkit.calibrate.sets import frame, ids_sha256, load_tokens
from quantkit.errors import InputError


def prose(first: int, count: int) -> str:
    return "\n\n".join(f"Document {number} says little, and says it {number} times." for number in range(first, count))


def load(reference, split="calib", *, tokenizer=None, samples=4, tokens=16, seed=0, vocab_size=258):
    return load_tokens(
        str(reference), split, tokenizer=tokenizer, samples=samples, tokens=tokens, seed=seed, vocab_size=vocab_size
    )


def texts(found, tokenizer):
    return [tokenizer.decode(row) for row in found.ids]


@pytest.fixture
def own_text(tmp_path):
    path = tmp_path / "own.txt"
    path.write_text(prose(0, 200))
    return path


@pytest.fixture
def id_file(tmp_path):
    path = tmp_path / "own.jsonl"
    rows = [{"input_ids": [number] * (16 + number)} for number in range(6)]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def test_a_text_becomes_ids(own_text, byte_tokenizer):
    found = load(own_text, tokenizer=byte_tokenizer)
    assert found.ids.shape == (4, 16)
    assert found.ids.dtype == torch.int64
    assert found.name == "own.txt"
    assert found.items == 60
    whole = own_text.read_text()
    assert all(text in whole for text in texts(found, byte_tokenizer))
    assert found.sha256 == ids_sha256(found.ids.numpy())


def test_splits_of_a_text_do_not_meet(own_text, byte_tokenizer):
    numbers = {}
    for split, samples in (("calib", 100), ("tune", 6), ("eval", 12)):
        found = load(own_text, split, tokenizer=byte_tokenizer, samples=samples, tokens=60)
        pattern = re.compile(r"Document (\d+) says")
        numbers[split] = {int(number) for text in texts(found, byte_tokenizer) for number in pattern.findall(text)}
        assert f"has no splits: {split} is documents" in found.notes[0]
    assert numbers["calib"] <= set(range(170))
    assert numbers["tune"] <= set(range(170, 180))
    assert numbers["eval"] <= set(range(180, 200))
    assert all(len(found) > 4 for found in numbers.values())


def test_splits_of_one_long_text_do_not_meet(tmp_path, byte_tokenizer):
    path = tmp_path / "long.txt"
    path.write_text(" ".join(f"{number:07d}" for number in range(5000)))
    numbers = {}
    for split in ("calib", "tune", "eval"):
        found = load(path, split, tokenizer=byte_tokenizer, samples=60, tokens=32)
        numbers[split] = {word for text in texts(found, byte_tokenizer) for word in text.split() if len(word) == 7}
    assert (
        not numbers["calib"] & numbers["tune"] | numbers["tune"] & numbers["eval"] | numbers["calib"] & numbers["eval"]
    )


def test_the_recipes_seed_moves_calib_and_never_eval(own_text, byte_tokenizer):
    first, second = (load(own_text, tokenizer=byte_tokenizer, seed=seed) for seed in (0, 1))
    assert first.sha256 != second.sha256
    first, second = (load(own_text, "eval", tokenizer=byte_tokenizer, seed=seed) for seed in (0, 1))
    assert first.sha256 == second.sha256


def test_a_card_has_its_splits(tmp_path, byte_tokenizer):
    files = {"calib.txt": prose(0, 90).encode(), "tune.txt": prose(90, 95).encode(), "eval.txt": b"elsewhere " * 40}
    write_card(tmp_path / "set", files)
    found = load(tmp_path / "set", "eval", tokenizer=byte_tokenizer, samples=8)
    assert all(text in "elsewhere " * 40 for text in texts(found, byte_tokenizer))
    assert (found.name, found.notes) == ("set", ())
    by_card = load(tmp_path / "set/card.yaml", "eval", tokenizer=byte_tokenizer, samples=8)
    assert by_card.sha256 == found.sha256


def test_special_tokens_where_the_card_says_so(tmp_path, byte_tokenizer):
    sampling = {"special_tokens": True, "shuffle": False}
    write_card(tmp_path / "set", {"calib.txt": prose(0, 9).encode()}, sampling=sampling)
    found = load(tmp_path / "set", tokenizer=byte_tokenizer, tokens=50, samples=2)
    assert found.ids[0, 0] == 256
    assert (found.ids == 257).sum() >= 1
    write_card(tmp_path / "set", {"calib.txt": prose(0, 9).encode()}, sampling={"shuffle": False})
    found = load(tmp_path / "set", tokenizer=byte_tokenizer, tokens=50, samples=2)
    assert byte_tokenizer.decode(found.ids.flatten()) == prose(0, 9)[:100]


@pytest.mark.parametrize("split", ["calib", "tune", "eval"])
def test_ids_are_used_as_given(id_file, split):
    found = load(id_file, split, samples=5)
    assert found.ids.tolist() == [[number] * 16 for number in range(5)]
    assert "as given" in found.notes[0]


def test_the_hash_is_of_shape_and_little_endian_bytes():
    ids = np.arange(6, dtype=np.int32).reshape(2, 3)
    plain = hashlib.sha256(b"int64 2x3\n" + b"".join(n.to_bytes(8, "little") for n in range(6))).hexdigest()
    assert ids_sha256(ids) == ids_sha256(ids.astype(">i8")) == ids_sha256(np.asfortranarray(ids)) == plain
    assert ids_sha256(ids.reshape(3, 2)) != plain


def test_draws_are_the_same_everywhere(own_text, byte_tokenizer):
    # moves only when the sampling changes, and then every published figure does too
    assert load(own_text, tokenizer=byte_tokenizer).sha256.startswith("4dca6de8fd01d951")


def test_a_saved_dataset(tmp_path, byte_tokenizer):
    import datasets

    datasets.Dataset.from_dict({"text": prose(0, 100).split("\n\n")}).save_to_disk(tmp_path / "data")
    found = load(tmp_path / "data", tokenizer=byte_tokenizer)
    assert found.name == "data"
    assert all(text in prose(0, 85) for text in texts(found, byte_tokenizer))


def refused(code, *arguments, **options):
    with pytest.raises(InputError) as caught:
        load(*arguments, **options)
    assert caught.value.code == code
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_too_short(own_text, id_file, byte_tokenizer):
    message = refused("calibration-short", own_text, "tune", tokenizer=byte_tokenizer, samples=1000)
    assert "own.txt (tune part)" in message
    assert "1000 were asked for" in message
    has = int(message.split("calibration.samples=")[1].split(",")[0])
    assert load(own_text, "tune", tokenizer=byte_tokenizer, samples=has).ids.shape == (has, 16)
    refused("calibration-short", own_text, "tune", tokenizer=byte_tokenizer, samples=has + 1)
    assert "0 sequences of 100000" in refused("calibration-short", own_text, tokenizer=byte_tokenizer, tokens=100_000)
    assert "6 sequences" in refused("calibration-short", id_file, samples=7)
    assert "own.jsonl:1: 16 ids" in refused("calibration-short", id_file, tokens=17)


@pytest.mark.parametrize("wrong", [-1, 258, 10**30])
def test_ids_beyond_the_vocabulary(tmp_path, wrong):
    path = tmp_path / "ids.jsonl"
    path.write_text(json.dumps([1] * 16) + "\n" + json.dumps([1] * 15 + [wrong]))
    message = refused("calibration-ids", path, samples=2)
    assert f"ids.jsonl:2: id {wrong}; ids lie in 0..257" in message


def test_a_tokenizer_of_another_model(own_text, byte_tokenizer):
    assert "another model" in refused("calibration-ids", own_text, tokenizer=byte_tokenizer, vocab_size=20)


def test_what_cannot_be_read(tmp_path, own_text, byte_tokenizer):
    assert "did you mean" in refused("unknown-calibration", "prose-em")
    refused("file-missing", tmp_path / "nowhere.txt")
    refused("calibration-folder", tmp_path)
    refused("calibration-tokenizer", own_text)
    (tmp_path / "empty.txt").write_bytes(b"")
    refused("calibration-empty", tmp_path / "empty.txt", tokenizer=byte_tokenizer)
    (tmp_path / "binary.txt").write_bytes(bytes(range(256)))
    refused("calibration-not-text", tmp_path / "binary.txt", tokenizer=byte_tokenizer)
    write_card(tmp_path / "images", kind="images")
    assert "holds images" in refused("calibration-kind", tmp_path / "images", tokenizer=byte_tokenizer)
    write_card(tmp_path / "changed")
    (tmp_path / "changed/eval.txt").write_bytes(b"to score oN")
    refused("calibration-checksum", tmp_path / "changed", "eval", tokenizer=byte_tokenizer)
    refused("calibration-split", tmp_path / "changed", "tune", tokenizer=byte_tokenizer)


def test_the_shipped_set(byte_tokenizer):
    first, again = (load("prose-en", "eval", tokenizer=byte_tokenizer, samples=12, tokens=512) for _ in range(2))
    assert first.sha256 == again.sha256
    assert first.items == 6132


def test_random_tokens_are_drawn_from_the_vocabulary_by_seed_and_score_nothing():
    found = load("random-tokens", samples=8, tokens=64, vocab_size=1000)
    assert found.ids.shape == (8, 64)
    assert 0 <= int(found.ids.min()) < 50
    assert 950 < int(found.ids.max()) < 1000
    assert found.sha256 == load("random-tokens", samples=8, tokens=64, vocab_size=1000).sha256
    assert found.sha256 != load("random-tokens", samples=8, tokens=64, vocab_size=1000, seed=1).sha256
    with pytest.raises(InputError) as caught:
        load("random-tokens", "eval")
    assert caught.value.code == "calibration-random"


def test_an_encoder_s_sequences_have_the_tokenizer_s_tokens_around_them(byte_tokenizer: Any) -> None:
    asked: dict[str, Any] = {"tokenizer": byte_tokenizer, "samples": 3, "tokens": 32, "seed": 0, "vocab_size": 258}
    framed, bare = load_tokens("prose-en", "calib", framed=True, **asked), load_tokens("prose-en", "calib", **asked)
    assert framed.ids.shape == bare.ids.shape == (3, 32)
    assert framed.ids[:, 0].tolist() == [256] * 3
    assert framed.ids[:, -1].tolist() == [257] * 3
    assert int(framed.ids[:, 1:-1].max()) < 256
    assert framed.sha256 != bare.sha256
    assert frame(None) == ([], [])
