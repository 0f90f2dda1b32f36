"""Continuous batching step by step and request by request, as it is told: the oracle of `plan.batching`."""

from collections.abc import Sequence
from dataclasses import dataclass

from quantkit.planning.batching import Server


@dataclass
class Request:
    """One request on its way."""

    arrival: float
    prompt: int
    output: int
    computed: int = 0  # of its prompt
    given: int = 0  # of its output
    first: float = 0.0
    finish: float = 0.0


def serve(arrivals: Sequence[float], prompts: Sequence[int], outputs: Sequence[int], server: Server) -> list[Request]:
    """Every step on its own; every running request is looked at in each."""
    requests = [Request(*each) for each in zip(arrivals, prompts, outputs, strict=True)]
    waiting, running, now = list(requests), [], 0.0
    while waiting or running:
        if not running and waiting[0].arrival > now:
            now = waiting[0].arrival
        decoding = [each for each in running if each.computed == each.prompt]
        budget = server.chunk - (len(decoding) if server.policy == "chunked" else 0)
        shares: list[tuple[Request, int]] = []
        for each in running:
            if each.computed < each.prompt:
                shares.append((each, min(each.prompt - each.computed, budget)))
                budget -= shares[-1][1]
        while waiting and waiting[0].arrival <= now and len(running) < server.max_batch:
            each = waiting[0]
            reserved = sum(other.prompt + other.output for other in running)
            if reserved + each.prompt + each.output > server.cache_tokens:
                break
            share = each.prompt
            if server.policy == "chunked":
                share = min(share, budget)
                if not share:
                    break
            elif shares and share > budget:
                break
            running.append(waiting.pop(0))
            shares.append((each, share))
            budget -= share

        tokens = sum(share for _, share in shares)
        looked = sum(share * each.computed + share * (share + 1) // 2 for each, share in shares)
        stalled = server.policy == "prefill-first" and tokens > 0
        took = 0.0
        if tokens:
            rows = tokens if stalled else tokens + len(decoding)
            took += server.prefill.at(rows, looked / tokens)
        if decoding and not stalled:
            context = sum(each.prompt + each.given for each in decoding) / len(decoding)
            took += server.decode.at(len(decoding), context)
            if tokens:
                took -= server.decode.at(len(decoding), 1)
        now += took
        if not stalled:
            for each in decoding:
                each.given += 1
        for each, share in shares:
            each.computed += share
            if each.computed == each.prompt:
                each.given, each.first = 1, now
        for each in [each for each in running if each.given == each.output]:
            each.finish = now
            running.remove(each)
    return requests
