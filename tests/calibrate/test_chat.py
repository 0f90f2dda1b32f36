"""Conversations by the model's own template: as transformers writes them, in its sandbox, with a clock that stands."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from quantkit.calibrate.tokens import pack
from quantkit.errors import InputError

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
