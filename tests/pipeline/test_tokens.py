"""What calibrates and what scores: apart, long enough, and said where it is otherwise than asked."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quantkit.bundle import Decision
from quantkit.errors import InputError
from quantkit.pipeline.blocks import tokens
from quantkit.recipe import Recipe


def recipe(chosen: str = "prose-en", samples: int = 4, length: int = 32, template: str | None = None) -> Recipe:
    return Recipe.from_dict(
        {
            "summary": "",
            "scheme": {"weights": {"format": "int8"}},
            "passes": ["gptq"],
            "calibration": {"set": chosen, "samples": samples, "tokens": length, "template": template},
        },
        name="x",
    )


def source(tokenizer: Any = None, kind: str = "decoder", **config: Any) -> Any:
    def give() -> Any:
        if tokenizer is None:
            raise InputError("tokenizer-missing", where="x", value="none")
        return tokenizer

    whole = {"vocab_size": 258, **config}
    named = {"path": Path("none"), "architecture": "BertModel", "has_encoder": False, "sees": False, "hears": False}
    return SimpleNamespace(kind=kind, tokenizer=give, config=whole, **named)


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "SCORED", 300)


@pytest.fixture
def ids(tmp_path: Path) -> Any:
    def write(count: int) -> str:
        path = tmp_path / f"ids-{count}.jsonl"
        path.write_text("\n".join(json.dumps({"input_ids": [(i + j) % 200 for j in range(32)]}) for i in range(count)))
        return str(path)

    return write


def rows(found: torch.Tensor) -> set[tuple[int, ...]]:
    return {tuple(row) for row in found.tolist()}


def test_a_shipped_set_calibrates_and_scores_on_different_text(byte_tokenizer: Any) -> None:
    decisions: list[Decision] = []
    calibration, scoring = tokens.load(recipe(), source(byte_tokenizer), calibrate=True, decisions=decisions)
    assert calibration is not None
    assert calibration.ids.shape == (4, 32)
    assert (calibration.split, scoring.split) == ("calib", "eval")
    assert scoring.items >= 300
    assert scoring.ids.shape[1] == 32
    assert not rows(calibration.ids) & rows(scoring.ids)
    assert not decisions


def test_without_a_pass_that_looks_at_data_there_is_none(byte_tokenizer: Any) -> None:
    calibration, scoring = tokens.load(recipe(), source(byte_tokenizer), calibrate=False, decisions=[])
    assert calibration is None
    assert scoring.items >= 300


def test_sequences_are_no_longer_than_the_model(byte_tokenizer: Any) -> None:
    decisions: list[Decision] = []
    small = source(byte_tokenizer, max_position_embeddings=16)
    calibration, scoring = tokens.load(recipe(), small, calibrate=True, decisions=decisions)
    assert calibration is not None
    assert calibration.ids.shape[1] == scoring.ids.shape[1] == 16
    (only,) = decisions
    assert (only.code, only.from_, only.to) == ("sequences-shortened", 32, 16)
    assert tokens.sequence_length(32, source(n_positions=8), []) == 8
    assert tokens.sequence_length(32, source(max_position_embeddings=4096), []) == 32


def test_ids_are_used_as_given_and_what_calibrated_never_scores(byte_tokenizer: Any, ids: Any) -> None:
    """A file of ids has no splits: its ids would score what they calibrated."""
    path, decisions = ids(20), []
    calibration, scoring = tokens.load(recipe(path), source(byte_tokenizer), calibrate=True, decisions=decisions)
    assert calibration is not None
    assert calibration.ids[:, 0].tolist() == [0, 1, 2, 3]
    assert scoring.name == "prose-en"
    assert [each.code for each in decisions] == ["scored-elsewhere"]
    assert not rows(calibration.ids) & rows(scoring.ids)


def test_without_a_tokenizer_the_ids_behind_those_that_calibrate_score(ids: Any) -> None:
    with pytest.raises(InputError) as missing:
        tokens.load(recipe(), source(), calibrate=True, decisions=[])
    assert missing.value.code == "tokenizer-missing"
    wanted = int(re.search(r"a \.jsonl of (\d+) rows", missing.value.remedy)[1])  # type: ignore[index]
    decisions: list[Decision] = []
    calibration, scoring = tokens.load(recipe(ids(wanted)), source(), calibrate=True, decisions=decisions)
    assert calibration is not None and scoring.items >= 300
    assert not rows(calibration.ids) & rows(scoring.ids)
    assert decisions[-1].reason == "the first 4 sequences calibrate, the next 10 score"
    with pytest.raises(InputError) as few:
        tokens.load(recipe(ids(wanted - 1)), source(), calibrate=True, decisions=[])
    assert few.value.code == "nothing-to-score-on" and f"a .jsonl of {wanted} rows" in few.value.remedy
    # where nothing calibrates on them they may all score
    _, scoring = tokens.load(recipe(ids(10)), source(), calibrate=False, decisions=[])
    assert scoring.items >= 300
    with pytest.raises(InputError, match=r"a row has 32 ids, and a sequence 64; .*; --set calibration.tokens=32"):
        tokens.load(recipe(ids(wanted), length=64), source(), calibrate=False, decisions=[])


def test_too_little_to_calibrate_on_is_an_error_too_little_to_score_on_is_made_up_for(
    byte_tokenizer: Any, ids: Any
) -> None:
    with pytest.raises(InputError) as caught:
        tokens.load(recipe(ids(3)), source(byte_tokenizer), calibrate=True, decisions=[])
    assert caught.value.code == "calibration-short"
    decisions: list[Decision] = []
    _, scoring = tokens.load(recipe(ids(5)), source(byte_tokenizer), calibrate=True, decisions=decisions)
    assert scoring.name == "prose-en"
    reason = "too short to score on: its part for scores holds 5 sequences of 32 tokens, and 10 are needed; "
    assert decisions[0].reason == f"{reason}a longer file is scored itself"


def test_ids_beyond_the_vocabulary_are_refused(byte_tokenizer: Any, ids: Any) -> None:
    with pytest.raises(InputError, match="calibration-ids"):
        tokens.load(recipe(ids(20)), source(byte_tokenizer, vocab_size=10), calibrate=True, decisions=[])


def test_the_vocabulary_is_the_configs_else_the_embeddings() -> None:
    import zoo

    assert tokens.vocabulary(source()) == 258
    plain = SimpleNamespace(config={}, skeleton=lambda: zoo.tiny("llama"))
    assert tokens.vocabulary(plain) == zoo.VOCABULARY  # type: ignore[arg-type]


def test_random_tokens_calibrate_and_text_scores(byte_tokenizer: Any) -> None:
    chosen = Recipe.from_dict(
        {"summary": "", "calibration": {"set": "random-tokens", "samples": 3, "tokens": 16}}, name="x"
    )
    decisions: list[Decision] = []
    small = source(byte_tokenizer, max_position_embeddings=40)
    calibration, scoring = tokens.load(chosen, small, calibrate=True, decisions=decisions)
    assert calibration is not None
    assert calibration.ids.shape == (3, 16)
    assert (scoring.name, scoring.ids.shape[1]) == ("prose-en", 40), "as long as other recipes' sequences"
    assert [(each.code, each.to) for each in decisions] == [("note", "prose-en")]


def written(changes: dict[str, Any]) -> Recipe:
    found = {"samples": 4, "tokens": 16, "generated": 0.5} | changes
    return Recipe.from_dict({"summary": "", "calibration": {"set": "prose-en", **found}}, name="x")


def test_a_model_writes_its_share_itself(byte_tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    own = torch.arange(48).reshape(3, 16)
    monkeypatch.setattr("quantkit.calibrate.tokens.generated.generated", lambda *_, samples, **__: own[:samples])
    calibration, _ = tokens.load(written({}), source(byte_tokenizer), calibrate=True, decisions=[])
    plain, _ = tokens.load(written({"generated": 0}), source(byte_tokenizer), calibrate=True, decisions=[])
    assert calibration is not None
    assert plain is not None
    assert torch.equal(calibration.ids, torch.cat([plain.ids[:2], own[:2]]))
    assert (calibration.generated, plain.generated) == (2, 0)
    assert calibration.sha256 != plain.sha256
    none, _ = tokens.load(written({"samples": 3, "generated": 1}), source(byte_tokenizer), calibrate=True, decisions=[])
    assert none is not None
    assert torch.equal(none.ids, own), "no text of the set at all"


def test_sequences_of_the_set_stand_in_where_only_sizes_count(
    byte_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quantkit.calibrate.tokens.generated.fits", lambda *_: True)
    found, _ = tokens.load(written({}), source(byte_tokenizer), calibrate=True, decisions=[], write=False)
    assert found is not None
    assert found.ids.shape == (4, 16)


@pytest.mark.parametrize("write", [True, False])
def test_a_model_that_does_not_fit_whole_is_calibrated_on_the_set(
    write: bool, byte_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quantkit.calibrate.tokens.generated.generated", lambda *_, **__: None)
    monkeypatch.setattr("quantkit.calibrate.tokens.generated.fits", lambda *_: False)
    decisions: list[Decision] = []
    found, _ = tokens.load(written({}), source(byte_tokenizer), calibrate=True, decisions=decisions, write=write)
    assert found is not None
    assert (found.ids.shape, found.generated) == ((4, 16), 0)
    assert [(each.code, each.where) for each in decisions] == [("set-instead", "calibration.generated")]


def test_only_a_decoder_writes(byte_tokenizer: Any) -> None:
    with pytest.raises(InputError, match="calibration-generated"):
        tokens.load(written({}), source(byte_tokenizer, kind="encoder"), calibrate=True, decisions=[])


# --- as in use --------------------------------------------------------------------------------------------------------


def all_sets(chosen: Recipe, of: Any) -> list[Any]:
    """All that a decoder is calibrated on, scored on and chosen by."""
    calibration, scoring = tokens.load(chosen, of, calibrate=True, decisions=[])
    guiding = tokens.guiding(chosen, of, samples=3, tokens=24, calibration=calibration, decisions=[])
    return [calibration, scoring, guiding, tokens.long(chosen, of, 300, 2)]


def test_whatever_a_decoder_sees_begins_as_its_prompts_do(bos_tokenizer: Any) -> None:
    for found in all_sets(recipe(), source(bos_tokenizer)):
        assert (found.ids[:, 0] == bos_tokenizer("x").input_ids[0]).all()
        assert (found.ids[:, 1:] != 256).all()
        assert found.begins == "<s>"


def test_what_is_scored_elsewhere_begins_so_too(bos_tokenizer: Any, ids: Any) -> None:
    decisions: list[Decision] = []
    calibration, scoring = tokens.load(recipe(ids(20)), source(bos_tokenizer), calibrate=True, decisions=decisions)
    assert calibration is not None
    assert (calibration.begins, scoring.name, scoring.begins) == (None, "prose-en", "<s>")
    assert "no sequence" in calibration.notes[-1]


def test_ids_that_score_alone_are_told_of_too(bos_tokenizer: Any, ids: Any) -> None:
    decisions: list[Decision] = []
    tokens.load(recipe(ids(20)), source(bos_tokenizer), calibrate=False, decisions=decisions)
    assert [each.code for each in decisions] == ["note", "note"]
    assert "begins with <s>, as the model's inputs" in decisions[1].reason


def test_the_template_that_calibrates_scores(chat_tokenizer: Any, ids: Any) -> None:
    for found in all_sets(recipe(length=128, template="chat"), source(chat_tokenizer)):
        assert all(chat_tokenizer.decode(row).startswith("<s>[user]") for row in found.ids)
        assert (found.ids[:, 1:] != 256).all()
    # given ids calibrate as they are, and what scores elsewhere is what the recipe asks for
    _, scoring = tokens.load(recipe(ids(20), template="chat"), source(chat_tokenizer), calibrate=True, decisions=[])
    assert chat_tokenizer.decode(scoring.ids[0]).startswith("<s>[user]")


def test_a_template_is_for_decoders_that_have_one(chat_tokenizer: Any, bos_tokenizer: Any) -> None:
    for of in (source(chat_tokenizer, kind="encoder"), source(bos_tokenizer)):
        with pytest.raises(InputError) as caught:
            tokens.load(recipe(template="chat"), of, calibrate=True, decisions=[])
        assert caught.value.code == "calibration-template"
        assert "--set calibration.template=null" in str(caught.value)


def test_conversations_are_written_by_the_chat_template_and_a_decision_says_so(
    tmp_path: Path, chat_tokenizer: Any, bos_tokenizer: Any
) -> None:
    share, alpaca = tmp_path / "sharegpt.json", tmp_path / "alpaca.json"
    talks = [
        [{"from": "human", "value": f"What is {n}?"}, {"from": "gpt", "value": "A number. " * 9}] for n in range(200)
    ]
    share.write_text(json.dumps([{"conversations": talk} for talk in talks]))
    records = [{"instruction": f"Add {n}.", "input": f"to {n}", "output": "Done. " * 9} for n in range(200)]
    alpaca.write_text(json.dumps(records))
    cases = [(share, chat_tokenizer, "chat"), (alpaca, chat_tokenizer, "chat"), (alpaca, bos_tokenizer, "alpaca")]
    for path, tokenizer, form in cases:
        taken: list[Any] = []
        calibration, scoring = tokens.load(recipe(str(path)), source(tokenizer), calibrate=True, decisions=taken)
        chosen = [step for step in taken if step.code == tokens.FORM]
        assert [(step.pass_, step.where, step.from_, step.to) for step in chosen] == [
            ("calibrate", "calibration.template", None, form)
        ]
        assert calibration.form == scoring.form == form
        if form == "chat":
            assert all(tokenizer.decode(row).startswith("<s>[user]") for row in (*calibration.ids, *scoring.ids))
        # `quantkit measure --calibration` loads the set alone
        alone: list[Any] = []
        again = tokens.again(recipe(), source(tokenizer), str(path), None, alone)
        assert (again.sha256, [step.to for step in alone if step.code == tokens.FORM]) == (scoring.sha256, [form])
    with pytest.raises(InputError, match="give plain text") as caught:
        tokens.load(recipe(str(share)), source(bos_tokenizer), calibrate=True, decisions=[])
    assert caught.value.code == "calibration-template"


def test_an_encoder_sees_what_the_tokenizer_puts_around_a_text(byte_tokenizer: Any) -> None:
    calibration, scoring = tokens.load(recipe(), source(byte_tokenizer, "encoder"), calibrate=True, decisions=[])
    for found in (calibration, scoring):
        assert found is not None
        assert (found.ids[:, 0] == 256).all()
        assert (found.ids[:, -1] == 257).all()


def test_a_compile_scores_the_first_sequences_of_what_measure_scores(
    byte_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "LOOKED", 100)
    asked: dict[str, Any] = {"calibrate": True, "decisions": []}
    _, looked = tokens.load(recipe(), source(byte_tokenizer), whole=False, **asked)
    _, whole = tokens.load(recipe(), source(byte_tokenizer), **asked)
    assert 100 <= looked.items < 100 + 31 and whole.items >= 300
    first = whole.first(len(looked.ids))
    assert torch.equal(first.ids, looked.ids)
    assert (first.sha256, first.whole) == (looked.sha256, whole.sha256)
    assert whole.first(len(whole.ids)) is whole


def test_a_set_with_too_little_for_measure_is_scored_on_as_many_positions_as_a_compile(
    byte_tokenizer: Any, ids: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "LOOKED", 100)
    decisions: list[Decision] = []
    _, scoring = tokens.load(recipe(ids(6)), source(byte_tokenizer), calibrate=False, decisions=decisions)
    assert (scoring.items, {each.code for each in decisions}) == (4 * 31, {"note"})
    _, scoring = tokens.load(recipe(ids(3)), source(byte_tokenizer), calibrate=False, decisions=decisions)
    assert (scoring.name, decisions[-1].code) == ("prose-en", "scored-elsewhere")
