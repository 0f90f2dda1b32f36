"""lm-eval's interface of a model, on quantkit's runtimes; imported only where lm-eval is installed.

Tokens, windows and stop sequences are those of lm-eval's `HFLM`, so that a score means the same. Answers are written as
they come, and are not asked for again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lm_eval import utils
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import (
    handle_stop_sequences,
    has_bos_prefix,
    normalize_gen_kwargs,
    postprocess_generated_text,
)

from quantkit import content, limits
from quantkit.bundle.disk import fsync, stopping_when_full
from quantkit.errors import InputError
from quantkit.runtimes.generate import Answerer, Asked, Prompt

# new tokens of a text whose task states no number, as in lm-eval
_NEW_TOKENS = 256


class KeptAnswers:
    """Answers in the user's cache: a file of JSON lines, appended to as they come.

    Answers from before a kill are not asked for again, and an original answers once for all its bundles. The name of a
    file has all that the answers depend on; that of an answer, the tokens of its question.

    Args:
        key: all that they depend on: model, runtime, versions, instruction set, threads.
        folder: place of the file; None is the user's cache.
    """

    def __init__(self, key: Mapping[str, Any], folder: Path | None = None) -> None:
        name = hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode()).hexdigest()[:32]
        self.path = (folder or content.cache_dir() / "answers") / f"{name}.jsonl"
        self._held: dict[str, Any] = {}
        self._new: list[str] = []
        if self.path.is_file():
            for line in limits.read(self.path, limits.DATA).decode(errors="replace").split("\n"):
                try:
                    name, answer = json.loads(line)
                except (ValueError, TypeError):  # a line that a kill cut
                    continue
                self._held[name] = answer

    @staticmethod
    def name(kind: str, asked: Any) -> str:
        """Return the name of an answer."""
        return hashlib.sha256(json.dumps([kind, asked]).encode()).hexdigest()[:24]

    def __contains__(self, name: str) -> bool:
        return name in self._held

    def __getitem__(self, name: str) -> Any:
        return self._held[name]

    def add(self, name: str, answer: Any) -> None:
        """Add an answer; `write` keeps it."""
        self._held[name] = answer
        self._new.append(json.dumps([name, answer]))

    def write(self) -> None:
        """Append the new answers to the file. Raises Stopped: `disk-full`."""
        with stopping_when_full(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # a cut line before them must not swallow the first
            data = "".join(f"\n{line}" for line in self._new).encode() + b"\n"
            with self.path.open("ab") as file:
                file.write(data)
            fsync(self.path)
        self._new = []


class RuntimeLM(TemplateLM):  # type: ignore[misc]
    """One side of a comparison.

    Args:
        tokenizer: of transformers.
        side: that answers.
        context: most tokens of a text.
        kept: answers that it gave already.
        ends: tokens at which the model ends a text, besides the tokenizer's own.
        tell: callback with the answered and all requests.
    """

    def __init__(
        self,
        tokenizer: Any,
        side: Answerer,
        context: int,
        kept: KeptAnswers,
        ends: frozenset[int] = frozenset(),
        tell: Callable[[int, int], None] = lambda done, of: None,
    ) -> None:
        super().__init__()
        self.tokenizer, self.side, self.max_length, self.kept, self.tell = tokenizer, side, context, kept, tell
        self.ends = ends | {self.eot_token_id}

    @property
    def eot_token_id(self) -> int:
        """Token at the end of a text."""
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """Token before a text without a context."""
        begin = self.tokenizer.bos_token_id
        return self.eot_token_id if begin is None else int(begin)

    @property
    def tokenizer_name(self) -> str:
        """Name of the tokenizer, for lm-eval's caches, which are not used."""
        return str(self.tokenizer.name_or_path)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Return the ids of a text."""
        how = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        if add_special_tokens is None and has_bos_prefix(string, self.tokenizer.decode(self.prefix_token_id)):
            how = {"add_special_tokens": False}
        ids: list[int] = self.tokenizer.encode(string, **how)
        return ids

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Put messages into the model's chat template."""
        text: str = self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        return text

    def demand_fits(self, task: str, instances: Sequence[Any]) -> None:
        """Refuse items longer than the context. Raises InputError `task-too-long`, `task-unsupported`."""
        longest = 0
        for instance in instances:
            if instance.request_type == "loglikelihood_rolling":
                continue
            if instance.request_type == "generate_until":
                count = len(self.tok_encode(instance.args[0])) + self._how(instance.args[1])[1]
                if self._how(instance.args[1])[2]:
                    value, rule = f"{task} draws its answers", "two models are compared by their most likely answers"
                    raise InputError("task-unsupported", "--tasks", value, rule)
            else:
                count = len(self.tok_encode("".join(instance.args))) - 1
            longest = max(longest, count)
        if longest > self.max_length:
            rule, remedy = f"the model's context holds {self.max_length:,}", "leave the task out, or take --limit"
            raise InputError("task-too-long", f"--tasks {task}", f"an item of {longest:,} tokens", rule, remedy)

    def prompt(self, text: str, chat: bool) -> list[int]:
        """Return the ids of a prompt, in the chat template if asked for."""
        return self.tok_encode(self.apply_chat_template([{"role": "user", "content": text}]) if chat else text)

    def demand_room(self, task: str, prompts: Sequence[str], chat: bool, tokens: int) -> None:
        """Refuse prompts without room for so many tokens. Raises InputError `task-too-long`."""
        longest = tokens + max(len(self.prompt(text, chat)) for text in prompts)
        if longest > self.max_length:
            rule, remedy = f"the model's context holds {self.max_length:,}", "shorten the longest prompt"
            raise InputError("task-too-long", f"--tasks {task}", f"a text of {longest:,} tokens", rule, remedy)

    def continued(self, prompts: Sequence[str], chat: bool, tokens: int) -> list[list[int]]:
        """Return the most likely ids after each prompt, up to the end of the text."""
        asked: list[Prompt] = [(self.prompt(text, chat), tokens, self._ends(())) for text in prompts]
        return self.written(asked, [()] * len(asked))

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """Return how likely each continuation is, and whether each of its tokens is the most likely one."""
        answers: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=True)
        return answers

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        texts: list[Asked] = []
        for _pair, context, continuation in requests:
            tokens = [*context, *continuation][-(self.max_length + 1) :]
            texts.append((tokens, len(tokens) - len(continuation)))
        return [(value, first) for value, first in self._answers("likelihood", texts, self.side.likelihoods)]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihoods of whole texts, in windows of the context."""
        texts: list[Asked] = []
        counts = []
        for request in requests:
            windows = utils.get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            parts = [utils.make_disjoint_window(window) for window in windows]
            texts += [([*context, *continuation], len(context)) for context, continuation in parts]
            counts.append(len(parts))
        values = iter(self._answers("likelihood", texts, self.side.likelihoods))
        return [sum(next(values)[0] for _ in range(count)) for count in counts]

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the most likely texts, up to their stop sequences."""
        prompts: list[Prompt] = []
        stops = []
        for request in requests:
            until, count, _ = self._how(request.args[1])
            ids = self.tok_encode(request.args[0])[-(self.max_length - count) :]
            prompts.append((ids, count, self._ends(until)))
            stops.append(until)
        texts = [self.tokenizer.decode(ids, skip_special_tokens=True) for ids in self.written(prompts, stops)]
        return [str(postprocess_generated_text(text, stop, None)) for text, stop in zip(texts, stops, strict=True)]

    def written(self, prompts: Sequence[Prompt], stops: Sequence[Sequence[str]]) -> list[list[int]]:
        """Return the most likely ids after each prompt."""
        keys = [[list(ids), count, list(until)] for (ids, count, _), until in zip(prompts, stops, strict=True)]
        return self._answers("text", prompts, self.side.written, keys)

    def _how(self, kwargs: dict[str, Any]) -> tuple[list[str], int, bool]:
        how = normalize_gen_kwargs(dict(kwargs), _NEW_TOKENS)
        until = handle_stop_sequences(list(how.get("until") or []), eos=self.tokenizer.decode(self.eot_token_id))
        return until, int(how["max_gen_toks"]), bool(how["do_sample"])

    def _ends(self, until: Sequence[str]) -> Callable[[Sequence[int]], bool]:
        def ended(ids: Sequence[int]) -> bool:
            if ids[-1] in self.ends:
                return True
            text = self.tokenizer.decode(list(ids), skip_special_tokens=False)
            return any(stop in text for stop in until if stop)

        return ended

    def _answers(self, kind: str, asked: Sequence[Any], ask: Callable[[Any], Any], keys: Any = None) -> list[Any]:
        """Return all answers; new ones are kept at once."""
        names = [self.kept.name(kind, key) for key in (keys or asked)]
        new = {name: number for number, name in enumerate(names) if name not in self.kept}
        # longest first, as in lm-eval: what does not fit into memory shows at once
        order = sorted(new.values(), key=lambda number: (-len(asked[number][0]), list(asked[number][0])))
        done = 0
        for part in _parts(order, [len(one[0]) for one in asked], self.side.at_once):
            for number, answer in zip(part, ask([asked[number] for number in part]), strict=True):
                self.kept.add(names[number], answer)
            self.kept.write()
            self.tell(done := done + len(part), len(order))
        return [self.kept[name] for name in names]


def _parts(order: Sequence[int], sizes: Sequence[int], most: int) -> Iterator[list[int]]:
    """Cut an order into parts of at most so many tokens, padding included: the first is the longest."""
    part: list[int] = []
    for number in order:
        if part and (len(part) + 1) * sizes[part[0]] > most:
            yield part
            part = []
        part.append(number)
    if part:
        yield part
