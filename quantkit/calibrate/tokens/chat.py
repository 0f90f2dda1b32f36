"""Conversations -> token ids, by the chat template of the model's own tokenizer.

    [{role: user, content: Why?}]  --template-->  <bos><start_of_turn>user\\nWhy?<end_of_turn>  --tokenizer-->  ids

The tokenizer adds nothing: a template writes itself what a prompt begins with, which must not stand there twice.

A template comes with the model, and is not trusted: transformers renders it in Jinja's `ImmutableSandboxedEnvironment`.
Some write the date of the day (`strftime_now`); here it is always the same day, or ids would change overnight.

Plain text is cut into pieces of about one sequence. The first quarter of a piece is what a user says, the rest is what
the model answers: most of what a model of conversations reads is what it has written itself.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from typing import Any

from quantkit import limits
from quantkit.errors import InputError

Message = dict[str, Any]
Messages = Sequence[Message]

CODE = "calibration-template"
NONE = "--set calibration.template=null"
# the day that Llama's templates take where there is no clock
_DAY = datetime.datetime(2024, 7, 26, 12)
_ASKED = 0.25


def renderer(tokenizer: Any) -> Callable[[Messages, str], list[int]]:
    """What makes token ids of messages; its second argument is where they stand, for errors.

    Raises:
        InputError: `calibration-template`: the tokenizer has none. What is returned raises it for a conversation that
            the template does not take.
    """
    try:
        template = _stopped_clock() + tokenizer.get_chat_template()
    except (AttributeError, ValueError):  # none, or several and none of them the default
        raise InputError(
            CODE,
            where="calibration.template",
            value="the model's tokenizer has no chat template",
            rule="conversations are written by the model's own",
            remedy=f"put its chat_template.jinja beside the tokenizer, or {NONE}",
        ) from None

    def render(messages: Messages, where: str) -> list[int]:
        try:
            with limits.guarded(where):
                text = tokenizer.apply_chat_template(list(messages), chat_template=template, tokenize=False)
            ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        except InputError:
            raise
        except Exception as problem:  # whatever a template makes of what it was not written for
            said = " ".join(str(problem).split())[:200] or type(problem).__name__
            raise InputError(
                CODE,
                where=where,
                value=said,
                rule="the model's chat template takes every conversation",
                remedy="mend that conversation, or leave it out",
            ) from None
        return ids

    return render


def exchange(text: str) -> Messages:
    """A piece of text as a conversation: a user begins it, the model goes on.

    >>> exchange("One two three four five")
    [{'role': 'user', 'content': 'One two'}, {'role': 'assistant', 'content': 'three four five'}]
    """
    text = text.strip()
    place = int(len(text) * _ASKED)
    while place < len(text) and not text[place].isspace():
        place += 1
    asked, answered = text[:place], text[place:].strip()
    messages = [{"role": "user", "content": asked}]
    return [*messages, {"role": "assistant", "content": answered}] if answered else messages


def _stopped_clock() -> str:
    """A macro that stands before a template, and in it for the `strftime_now` that transformers offers."""
    codes = [f"replace('%{code}', '{_DAY.strftime('%' + code)}')" for code in "aAbBdHIjmMpSyY"]
    unpadded = [f"replace('%-{code}', '{int(_DAY.strftime('%' + code))}')" for code in "dHIm"]
    return (
        f"{{%- macro strftime_now(format) -%}}{{{{ {' | '.join(['format', *unpadded, *codes])} }}}}{{%- endmacro -%}}"
    )
