"""Event-by-event simulation of continuous batching: requests arrive, wait, are prefilled, and decode together.

    a step         decoding: a token for each of B sequences with c tokens of context on average, D(B, c) seconds
                   prefill: T prompt tokens with a tokens of context on average, P(T, a) seconds
                   both at once: P(T + B, a) + D(B, c) − D(B, 1): weights are read once, caches on top of that
    chunked        every running sequence first gets its token; the rest of a step's tokens goes to prompts in order of
                   arrival, and the remainder of the last prompt waits for the next step. vLLM schedules so ("It
                   batches all pending decode requests before scheduling any prefill operations", docs.vllm.ai,
                   Optimization and Tuning, Chunked Prefill; always on in its V1 engine).
    prefill-first  waiting prompts are computed whole and alone, while running sequences pause. vLLM did so before
                   ("prioritizes prefills and doesn't batch prefill and decode to the same batch", docs.vllm.ai,
                   0.4.2, Performance and Tuning).
    admission      in order of arrival, once the batch has a place and the cache has room for prompt and whole output,
                   so that no running sequence is ever paused: TensorRT-LLM's default (GUARANTEED_NO_EVICT). vLLM
                   admits more and recomputes evicted sequences, which is not simulated.

Steps between two events (arrival, end of a prompt, end of an output) differ only in their context, which grows evenly;
seconds are linear in it between the points of a table. So these steps are summed in closed form, and a run costs a few
operations per event, not per token. Not simulated: the host, the network, shared prefixes, cancelled requests.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from quantkit.errors import InputError

Policy = Literal["chunked", "prefill-first"]
# vLLM's documentation recommends more than 8,192 tokens a step for throughput, and 2,048 for even steps
CHUNK = 2048


@dataclass(frozen=True)
class TimeGrid:
    """Seconds over two axes, linear between the points and beyond the outer ones.

    Args:
        rows: rising; sequences of a decode step, or tokens of a prefill.
        contexts: rising; mean context of a token.
        seconds: `[rows][contexts]`, all above zero.
    """

    rows: Sequence[float]
    contexts: Sequence[float]
    seconds: Sequence[Sequence[float]]
    _known: dict[float, list[tuple[float, float]]] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        for axis in (self.rows, self.contexts):
            if not axis or any(later <= earlier for earlier, later in pairwise(axis)):
                raise ValueError(f"an axis rises, got {list(axis)}")
        if [len(row) for row in self.seconds] != [len(self.contexts)] * len(self.rows):
            raise ValueError("seconds are [rows][contexts]")
        if not all(0 < value < math.inf for row in self.seconds for value in row):
            raise ValueError("seconds are positive and finite")

    @classmethod
    def of(
        cls, function: Callable[[float, float], float], rows: Sequence[float], contexts: Sequence[float]
    ) -> TimeGrid:
        """Tabulate a function of (row, context)."""
        return cls(rows, contexts, [[function(row, context) for context in contexts] for row in rows])

    def line(self, row: float, context: float) -> tuple[float, float, float]:
        """Return the seconds, the seconds per additional token of context, and the context up to which that holds."""
        if row not in self._known:
            self._known[row] = self._pieces(row)
        known = self._known[row]
        index = bisect_right(self.contexts, context, 1, len(known)) - 1 if len(known) > 1 else 0
        value, slope = known[index]
        end = self.contexts[index + 1] if index + 1 < len(known) else math.inf
        return value + slope * (context - self.contexts[index]), slope, end

    def at(self, row: float, context: float) -> float:
        """Return the seconds."""
        return self.line(row, context)[0]

    def _pieces(self, row: float) -> list[tuple[float, float]]:
        """Return (seconds, slope) at the start of each piece of a row's line; one piece for a single context."""
        if len(self.rows) == 1:
            values = list(self.seconds[0])
        else:
            index = bisect_right(self.rows, row, 1, len(self.rows) - 1) - 1
            part = (row - self.rows[index]) / (self.rows[index + 1] - self.rows[index])
            near, far = self.seconds[index], self.seconds[index + 1]
            values = [low + part * (high - low) for low, high in zip(near, far, strict=True)]
        if len(values) == 1:
            return [(values[0], 0.0)]
        points = pairwise(zip(self.contexts, values, strict=True))
        return [(value, (after - value) / (end - start)) for (start, value), (end, after) in points]


@dataclass(frozen=True)
class Server:
    """One copy of a model that serves requests, on any number of devices.

    Args:
        prefill: P(tokens, context), seconds of a step of prompts; context is the mean over its tokens: (n + 1) / 2 for
            a whole prompt of n.
        decode: D(sequences, context), seconds of a step that gives each sequence a token.
        cache_tokens: tokens that fit the cache, over all sequences.
        max_batch: most sequences that run at once.
        chunk: most tokens of a step; with `prefill-first` a longer prompt is still computed whole.
        policy: order of prefill and decoding.

    Raises:
        InputError: `server-invalid`.
    """

    prefill: TimeGrid
    decode: TimeGrid
    cache_tokens: int
    max_batch: int
    chunk: int = CHUNK
    policy: Policy = "chunked"

    def __post_init__(self) -> None:
        least = self.max_batch if self.policy == "chunked" else 1
        for name, value, low, rule in (
            ("max_batch", self.max_batch, 1, "at least one sequence runs"),
            ("cache_tokens", self.cache_tokens, 1, "the cache holds at least one token"),
            ("chunk", self.chunk, least, "a step has a token for each running sequence, so chunk >= max_batch"),
        ):
            if value < low:
                raise InputError("server-invalid", where=name, value=value, rule=rule)

    @classmethod
    def of(
        cls,
        seconds: Callable[[int, int, int], float],
        *,
        longest: int,
        cache_tokens: int,
        max_batch: int,
        chunk: int = CHUNK,
        policy: Policy = "chunked",
    ) -> Server:
        """Tabulate one function for both kinds of step, with about 80 calls.

        Args:
            seconds: function of (batch, tokens, past): seconds of a step in which each sequence adds tokens to past
                ones in the cache.
            longest: prompt and output of the longest request.
        """
        longest = max(longest, 4)
        quarters = sorted({1, *(longest * part // 4 for part in (1, 2, 3, 4))})

        def decode(batch: float, context: float) -> float:
            # a token without context would be a prompt
            return seconds(int(batch), 1, max(1, int(context) - 1))

        def prefill(tokens: float, context: float) -> float:
            # as many equal prompts as have this mean context; a longer context is one prompt behind past tokens
            length = max(1, min(round(tokens), round(2 * context - 1)))
            several = max(1, round(tokens / length))
            past = max(0, round(context - (length + 1) / 2))
            return seconds(several, length, past) * tokens / (several * length)

        most = max(chunk, longest if policy == "prefill-first" else 0)
        return cls(
            TimeGrid.of(prefill, _doubling(most), sorted({1, longest // 2, longest})),
            TimeGrid.of(decode, _doubling(max_batch), quarters),
            cache_tokens,
            max_batch,
            chunk,
            policy,
        )


def _doubling(most: int) -> list[int]:
    """Return 1, 2, 4, … and the largest value itself."""
    return [*(1 << power for power in range((most - 1).bit_length())), most]


@dataclass(frozen=True)
class Trace:
    """Course of a run, in seconds from its start; sequences have an entry for each request, in order of arrival.

    Args:
        arrival: arrival of each request.
        first: time of its first token.
        finish: time of its last token.
        prompt: tokens of its prompt.
        output: tokens of its output.
        busy: seconds with any work.
        steps: decode steps.
        decoded: tokens of the decode steps; the first token of a request comes with its prefill.
        prefilled: tokens of prompts.
        peak_cache: largest number of reserved tokens.
    """

    arrival: Sequence[float]
    first: Sequence[float]
    finish: Sequence[float]
    prompt: Sequence[int]
    output: Sequence[int]
    busy: float
    steps: int
    decoded: int
    prefilled: int
    peak_cache: int

    @property
    def end(self) -> float:
        """Time when the last request was done."""
        return max(self.finish, default=0.0)


def run(arrivals: Sequence[float], prompts: Sequence[int], outputs: Sequence[int], server: Server) -> Trace:
    """Serve requests to the end.

    Args:
        arrivals: seconds, not falling.
        prompts: tokens of each prompt, from 1 up.
        outputs: tokens of each output, from 1 up.

    Raises:
        InputError: `request-too-long`, if one request alone exceeds the cache.
    """
    count = len(arrivals)
    need = [prompt + output for prompt, output in zip(prompts, outputs, strict=True)]
    if max(need, default=0) > server.cache_tokens:
        raise too_long(max(need), server.cache_tokens)
    prefill, decode = server.prefill, server.decode
    chunked = server.policy == "chunked"
    first, finish = [0.0] * count, [0.0] * count
    running: list[tuple[int, int]] = []  # a heap: (last decode step, request)
    now = busy = 0.0
    head = done = 0  # next request to admit; finished requests
    part, left = -1, 0  # request whose prompt is computed in pieces, and its remaining tokens
    reserved = peak = 0
    steps = decoded = prefilled = looked = 0  # looked: context of all running requests in their next step

    while done < count:
        batch = len(running)
        if not batch and part < 0 and arrivals[head] > now:
            now = arrivals[head]
        budget = server.chunk - batch if chunked else server.chunk
        tokens = pairs = share = 0
        joining: list[int] = []
        if part >= 0:
            tokens = share = min(left, budget)
            pairs = _pairs(prompts[part] - left, share)
            if share == left:
                joining.append(part)
                part = -1
        while (
            part < 0
            and head < count
            and arrivals[head] <= now
            and batch + len(joining) < server.max_batch
            and reserved + need[head] <= server.cache_tokens
            and (tokens < budget if chunked else not tokens or tokens + prompts[head] <= budget)
        ):
            share = min(prompts[head], budget - tokens) if chunked else prompts[head]
            tokens += share
            pairs += _pairs(0, share)
            reserved += need[head]
            if share == prompts[head]:
                joining.append(head)
            else:
                part, left = head, prompts[head]
            head += 1
        peak = max(peak, reserved)

        # seconds of this step, growth per step, and number of steps of the same kind
        advances = batch > 0 and (chunked or not tokens)
        seconds = slope = 0.0
        alike = running[0][0] - steps if advances else left
        if tokens:
            context = pairs / tokens
            seconds, growth, end = prefill.line(tokens + batch if chunked else tokens, context)
            slope = growth * tokens
            alike = 1 if joining or part < 0 else min(alike, (left - 1) // share)
            if end < math.inf:
                alike = min(alike, int((end - context) / tokens) + 1)
        if advances:
            context = looked / batch
            own, growth, end = decode.line(batch, context)
            seconds += own - decode.at(batch, 1) if tokens else own
            slope += growth
            if end < math.inf:
                alike = min(alike, int(end - context) + 1)
            room = batch < server.max_batch and head < count and reserved + need[head] <= server.cache_tokens
            if room and not tokens:  # the next request is admitted at the end of the step in which it arrives
                alike = min(alike, _until(arrivals[head] - now, seconds, slope, alike))

        took = _sum(alike, seconds, slope)
        now += took
        busy += took
        prefilled += alike * tokens
        if part >= 0:
            left -= alike * share
        if advances:
            steps += alike
            decoded += alike * batch
            looked += alike * batch
            while running and running[0][0] == steps:
                which = heapq.heappop(running)[1]
                finish[which] = now
                looked -= need[which]
                reserved -= need[which]
                done += 1
        for which in joining:
            first[which] = now
            if outputs[which] == 1:
                finish[which] = now
                reserved -= need[which]
                done += 1
            else:
                heapq.heappush(running, (steps + outputs[which] - 1, which))
                looked += prompts[which] + 1
    return Trace(arrivals, first, finish, prompts, outputs, busy, steps, decoded, prefilled, peak)


def too_long(tokens: int, cache_tokens: int) -> InputError:
    """Make the error for a request that exceeds the cache."""
    return InputError(
        "request-too-long",
        where="cache",
        value=f"a request of {tokens:,} tokens",
        rule=f"the cache holds {cache_tokens:,} tokens, and a request stays in it whole",
        remedy="use a shorter context, a smaller format for weights or cache, or more devices",
    )


def _pairs(past: int, tokens: int) -> int:
    """Count (query, key) pairs of new tokens after past ones; each token attends to itself too."""
    return tokens * past + tokens * (tokens + 1) // 2


def _sum(steps: int, first: float, slope: float) -> float:
    """Sum an arithmetic series."""
    return steps * first + slope * (steps * (steps - 1) // 2)


def _until(gap: float, first: float, slope: float, most: int) -> int:
    """Count the steps, up to a limit, until a gap has passed."""
    return 1 + bisect_left(range(1, most), gap, key=lambda steps: _sum(steps, first, slope))
