import copy
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.calibrate.tokens import pack
from quantkit.calibrate.tokens.pack import begins, filled, frame, named, sample, sample_documents, sections
from quantkit.errors import InputError


def words(count: int) -> str:
    return " ".join(f"w{number}" for number in range(count))


def encode(text: str) -> list[int]:
    """One token a word, its number: a window of a text counts up by one."""
    return [int(word[1:]) for word in text.split()]


@settings(deadline=None, max_examples=40)
@given(st.text("ab \n\u3000日", max_size=200), st.integers(1, 30))
def test_sections_are_the_text(text, size):
    parts = sections(text, size)
    assert "".join(parts) == text
    assert all(size <= len(part) for part in parts[:-1])
    assert all(len(part) <= 2 * size for part in parts)


def test_no_word_is_cut():
    assert [word for part in sections(words(500), 40) for word in part.split()] == words(500).split()


def test_windows_come_from_all_over_and_are_whole():
    found = sample(words(20_000), encode, samples=16, tokens=32, generator=np.random.default_rng(0))
    assert found.shape == (16, 32)
    assert (np.diff(found, axis=1) == 1).all()
    assert len({tuple(row) for row in found}) == 16
    # of 16 places in the text, a uniform draw leaves no half empty
    assert (found[:, 0] < 10_000).sum() in range(3, 14)


def test_only_what_is_used_is_tokenized():
    seen = []

    def counting(text: str) -> list[int]:
        seen.append(len(text))
        return encode(text)

    text = words(200_000)
    sample(text, counting, samples=4, tokens=32, generator=np.random.default_rng(0))
    assert sum(seen) < len(text) / 100


def test_fewer_samples_are_the_first_of_more():
    text = words(20_000)
    many = sample(text, encode, samples=16, tokens=32, generator=np.random.default_rng(0))
    few = sample(text, encode, samples=8, tokens=32, generator=np.random.default_rng(0))
    assert (few == many[:8]).all()


@pytest.mark.parametrize("count, expected", [(31, 0), (32, 1), (320, 10), (351, 10), (352, 11)])
def test_a_small_text_is_used_to_the_last_window(count, expected):
    found = sample(words(count), encode, samples=11, tokens=32, generator=np.random.default_rng(0))
    assert found.shape == (expected, 32)
    assert sorted(found[:, 0]) == [32 * number for number in range(expected)]


def test_without_a_draw_it_starts_at_the_beginning():
    found = sample(words(20_000), encode, samples=3, tokens=32, generator=None)
    assert (found == np.arange(96).reshape(3, 32)).all()


def test_a_wordy_vocabulary_still_gives_all():
    # 20 characters a token, so no section fills a window
    text = " ".join(f"w{number:019d}" for number in range(3200))
    found = sample(text, encode, samples=100, tokens=32, generator=np.random.default_rng(0))
    assert sorted(found[:, 0]) == [32 * number for number in range(100)]


def test_documents_have_their_own_tokens_but_what_is_put_before_all() -> None:
    def encoded(text: str) -> list[int]:
        return [-1, *encode(text), -2]

    how = {"documents": ["w1 w2", "w3", "w4 w5 w6"], "encode": encoded, "samples": 9, "generator": None}
    assert sample_documents(**how, tokens=4).tolist() == [[-1, 1, 2, -2], [-1, 3, -2, -1], [4, 5, 6, -2]]
    # as they will be: -1 1 2 -2 | -1 3 -2 -1 | -1 4 5 6
    assert sample_documents(**how, tokens=3, before=[-1]).tolist() == [[1, 2, -2], [3, -2, -1], [4, 5, 6]]


def test_rows_begin_with_a_text_and_leave_out_what_does_not_fit():
    texts = [[1, 5, 2], [1, 6, 6, 2], [1, 7, 2], [1, 8, 2], [1, 9]]
    assert filled(texts, 5, 9).tolist() == [[1, 5, 2, 1, 6], [1, 7, 2, 1, 8]]  # the last alone would be too short
    assert filled(texts, 5, 1).tolist() == [[1, 5, 2, 1, 6]]
    assert filled([[1, 2]], 5, 1).shape == (0, 5)


def test_what_begins_a_row_stands_in_it_once():
    texts = [[1, 5, 2], [1, 6, 6, 2], [1, 7, 2], [8, 1, 2], [1, 9, 9, 9, 9]]
    assert filled(texts, 5, 9, before=[1]).tolist() == [[1, 5, 2, 6, 6], [1, 7, 2, 8, 1], [1, 9, 9, 9, 9]]


def test_texts_are_taken_only_as_rows_need_them():
    taken = iter([[1, 2, 3]] * 9)
    assert filled(taken, 5, 2).shape == (2, 5)
    assert len(list(taken)) == 5


def tokenizer(single: str) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = {"[UNK]": 0, "[gMASK]": 1, "<sop>": 2, "</s>": 3, "one": 4, "two": 5}
    made = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    special = [(word, number) for word, number in words.items() if number in (1, 2, 3)]
    made.post_processor = processors.TemplateProcessing(single=single, special_tokens=special)
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]", eos_token="</s>")


def test_several_before_and_one_after() -> None:
    """Two before a text, as ChatGLM has it; the settings name neither of them as its beginning."""
    found = tokenizer("[gMASK] <sop> $A </s>")
    assert frame(found) == ([1, 2], [3])
    assert found("one two").input_ids == [1, 2, 4, 5, 3]
    assert named([1, 2], found) == "[gMASK]<sop>"


def test_no_tokenizer_and_a_bare_one_put_nothing_around_a_text(bare_tokenizer: Any) -> None:
    assert frame(None) == frame(bare_tokenizer) == frame(tokenizer("$A")) == ([], [])


def test_what_all_sequences_begin_with() -> None:
    found = tokenizer("[gMASK] <sop> $A </s>")
    rows = [[1, 2, 4, 5], [1, 2, 4, 4]]
    assert begins(np.array(rows), found) == "[gMASK]<sop>", "and no ordinary word that they share"
    assert begins(np.array([*rows, [1, 3, 4, 4]]), found) == "[gMASK]"
    assert begins(np.array([*rows, [4, 2, 4, 4]]), found) is None
    assert begins(np.array([[3, 4], [3, 5]]), found) == "</s>", "special, though nothing puts it there"
    assert begins(np.array(rows), None) is None
    assert begins(np.zeros((0, 4), np.int64), found) is None


TALK = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because."}]


@pytest.fixture
def with_template(chat_tokenizer: Any) -> Any:
    def make(template: Any) -> Any:
        tokenizer = copy.deepcopy(chat_tokenizer)
        tokenizer.chat_template = template
        return tokenizer

    return make


def test_ids_are_those_that_transformers_gives_a_model(chat_tokenizer: Any) -> None:
    found = pack.renderer(chat_tokenizer)(TALK, "x")
    assert found == chat_tokenizer.apply_chat_template(TALK, tokenize=True, return_dict=False)
    assert found.count(256) == 1, "the tokenizer would add another"
    assert chat_tokenizer.decode(found) == "<s>[user]Why?[assistant]Because."


def test_a_template_without_it_gets_none(with_template: Any) -> None:
    """What the model sees in use: transformers adds nothing to what a template writes."""
    tokenizer = with_template("{% for message in messages %}{{ message.content }}{% endfor %}")
    assert 256 not in pack.renderer(tokenizer)(TALK, "x")


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(messages[0]) }}",
        "{{ messages[0].update({'content': 'other'}) }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_a_template_is_kept_in_its_sandbox(with_template: Any, template: str) -> None:
    talk = copy.deepcopy(TALK)
    with pytest.raises(InputError) as caught:
        pack.renderer(with_template(template))(talk, "talks.jsonl:3")
    assert (caught.value.code, caught.value.where) == ("calibration-template", "talks.jsonl:3")
    assert "\n" not in str(caught.value)
    assert talk == TALK


def test_the_clock_of_a_template_stands(with_template: Any) -> None:
    """Llama 3, Granite and gpt-oss write the date of the day: ids would be others tomorrow."""
    template = (
        "{%- if strftime_now is defined -%}{{ strftime_now('%d %b %Y, %Y-%m-%d, %B %-d, %A, %H:%M') }}{%- endif -%}"
        "{% for message in messages %}{{ message.content }}{% endfor %}"
    )
    tokenizer = with_template(template)
    text = tokenizer.decode(pack.renderer(tokenizer)(TALK, "x"))
    assert text == "26 Jul 2024, 2024-07-26, July 26, Friday, 12:00Why?Because."


@pytest.mark.parametrize("template", [None, {"tools": "{{ messages }}", "rag": "{{ messages }}"}])
def test_without_a_template_there_is_one_line(with_template: Any, template: Any) -> None:
    with pytest.raises(InputError) as caught:
        pack.renderer(with_template(template))
    assert caught.value.code == "calibration-template"
    assert "calibration.template=null" in str(caught.value)


def test_of_several_templates_the_default_is_taken(with_template: Any) -> None:
    several = {"tools": "{{ 1 }}", "default": "{{ messages[0].content }}"}
    tokenizer = with_template(several)
    assert tokenizer.decode(pack.renderer(tokenizer)(TALK, "x")) == "Why?"


def test_a_piece_of_text_is_an_exchange() -> None:
    text = " one two three four five six seven eight\n"
    asked, answered = pack.exchange(text)
    assert (asked["role"], answered["role"]) == ("user", "assistant")
    assert f"{asked['content']} {answered['content']}" == text.strip()
    assert len(asked["content"]) < len(answered["content"])
    assert pack.exchange("oneword") == [{"role": "user", "content": "oneword"}]
