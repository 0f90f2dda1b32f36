"""Ranks: processes that compile one model together, as torchrun starts them, and what they tell each other.

They are joined by torch.distributed: gloo on processors, nccl beside it on GPUs. Every rank calls the same functions in
the same order; who has nothing to add says so. A rank that ends breaks the connections of the others, and one that
hangs is noticed by a time limit: both are `rank-lost` there.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from quantkit.calibrate import PARTS
from quantkit.errors import InputError, QuantkitError, Stopped, Told
from quantkit.formats import Nested, QuantTensor, SuperBlocks
from quantkit.scheme import WeightScheme

# seconds in which the first rank, which knows what is kept, may tell of an interrupt before others do
_FIRST = 5.0
_TOLD = "told"
_KINDS: dict[str, Any] = {kind.__name__: kind for kind in (QuantTensor, Nested, SuperBlocks)}

T = TypeVar("T")
R = TypeVar("R")


class Ranks:
    """Group of processes, each with its number.

    Args:
        number: number of this one, from 0; the first one alone writes and prints.
        count: number of ranks: 1, 2, 4 or 8.
        local: number of this one on its machine, and of its GPU.
        store: what they meet in: names -> values.
    """

    def __init__(self, number: int, count: int, local: int, store: Any) -> None:
        self.number, self.count, self.local, self._store = number, count, local, store

    @property
    def leads(self) -> bool:
        """True for the first rank, the one to write and print."""
        return self.number == 0

    @classmethod
    def joined(cls, patience: float, *, on_gpus: bool = False) -> Ranks:
        """Meet the other ranks, at the address in the environment.

        Args:
            patience: seconds after which a rank that does not answer is lost.

        Raises:
            InputError: `ranks-invalid`; Stopped: `rank-lost`; Told: the first rank tells the error.
        """
        number, count, local = _numbers()
        limit = timedelta(seconds=patience)
        try:
            store, _, _ = next(rendezvous("env://", timeout=limit))
            store.set_timeout(limit)
            backend = "cpu:gloo,cuda:nccl" if on_gpus else "gloo"
            dist.init_process_group(backend, store=store, rank=number, world_size=count, timeout=limit)
        except (RuntimeError, ValueError) as problem:
            where = f"rank {number} of {count}"
            value = f"the others did not all come within {patience:g} s ({_first_line(problem)})"
            rule, remedy = "ranks start together", "look at the other ranks; --rank-timeout SECONDS waits longer"
            raise Stopped("rank-lost", where, value, rule, remedy) from None
        return cls(number, count, local, store)

    @contextmanager
    def told_once(self) -> Iterator[None]:
        """Let one rank tell of an error in the body; the others raise `Told`, with their exit code."""
        try:
            yield
        except Told:
            raise
        except BaseException as problem:
            safe = isinstance(problem, KeyboardInterrupt | Stopped)
            if safe and not self.leads:  # the first rank knows what is kept, unless it is the one that is lost
                with suppress(RuntimeError), _unstopped():
                    self._store.wait([_TOLD], timedelta(seconds=_FIRST))
            if self._claims():
                if isinstance(problem, KeyboardInterrupt) and not self.leads:
                    raise self._lost("the first rank has ended, or does not answer") from None
                raise
            code = problem.exit if isinstance(problem, QuantkitError) else Stopped.exit if safe else InputError.exit
            raise Told(code) from None
        finally:
            with suppress(RuntimeError, ValueError):
                dist.destroy_process_group()

    def _claims(self) -> bool:
        try:
            return int(self._store.add(_TOLD, 1)) == 1
        except RuntimeError:  # it went with the first rank
            return True

    # --- what they tell each other ------------------------------------------------------------------------------------

    def exchange(self, message: bytes) -> list[bytes]:
        """Return the messages of all ranks, by number. Raises Stopped: `rank-lost`."""
        with self._met():
            sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.count)]
            dist.all_gather(sizes, torch.tensor([len(message)]))
            longest = max(int(size) for size in sizes)
            padded = torch.zeros(longest, dtype=torch.uint8)
            padded[: len(message)] = torch.frombuffer(bytearray(message), dtype=torch.uint8) if message else padded[:0]
            heard = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.count)]
            if longest:
                dist.all_gather(heard, padded)
        return [one[: int(size)].numpy().tobytes() for one, size in zip(heard, sizes, strict=True)]

    def agree(self, message: Any) -> list[Any]:
        """Return the JSON of every rank, by its number. Raises Stopped: `rank-lost`."""
        return [json.loads(text) for text in self.exchange(json.dumps(message).encode())]

    def swap(self, peer: int, mine: Tensor | None, theirs: Tensor | None) -> Tensor | None:
        """Send a tensor to another rank, and fill `theirs` with its own; None: nothing goes that way.

        Raises Stopped: `rank-lost`.
        """
        way = [] if mine is None else [dist.P2POp(dist.isend, mine.contiguous(), peer)]
        way += [] if theirs is None else [dist.P2POp(dist.irecv, theirs, peer)]
        with self._met(peer):
            for work in dist.batch_isend_irecv(way) if way else ():
                work.wait()
        return theirs

    def total(self, counts: Sequence[int]) -> list[int]:
        """Add integers over all ranks. Raises Stopped: `rank-lost`."""
        return [sum(values) for values in zip(*self.agree(list(counts)), strict=True)]

    def over(
        self, work: Callable[[T], R], items: Sequence[T], sizes: Sequence[int] | None, device: torch.device
    ) -> list[R]:
        """Return the result of each item, found by one rank and told to all.

        Args:
            work: function whose results are floats, tensors, quantized matrices, None, or tuples of these.
            sizes: how much work each item is; the largest go first, each to the rank with the least so far.
            device: where results of other ranks are put.

        Raises:
            Stopped: `rank-lost`; those of `work`.
        """
        sizes = [1] * len(items) if sizes is None else sizes
        owners, busy = [0] * len(items), [0] * self.count
        for index in sorted(range(len(items)), key=lambda index: -sizes[index]):
            owners[index] = busy.index(min(busy))
            busy[owners[index]] += sizes[index]
        mine = {index: work(item) for index, item in enumerate(items) if owners[index] == self.number}
        if self.count == 1:
            return list(mine.values())
        results = dict(mine)
        for number, text in enumerate(self.exchange(_packed(mine))):
            if number != self.number:
                results |= _unpacked(text, device)
        return [results[index] for index in range(len(items))]

    @contextmanager
    def _met(self, peer: int | None = None) -> Iterator[None]:
        try:
            yield
        except RuntimeError as problem:
            other = "another rank" if peer is None else f"rank {peer}"
            raise self._lost(f"{other} has ended, or does not answer ({_first_line(problem)})") from None

    def _lost(self, value: str) -> Stopped:
        where, rule = f"rank {self.number} of {self.count}", "all ranks work to the end"
        remedy = "the same command with --resume goes on, with any number of ranks"
        return Stopped("rank-lost", where, value, rule, remedy)


@contextmanager
def _unstopped() -> Iterator[None]:
    """Ignore SIGTERM from torchrun: this rank ends already, and has to tell why."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _numbers() -> tuple[int, int, int]:
    try:
        number, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        local = int(os.environ.get("LOCAL_RANK", "0"))
    except ValueError:
        number, count, local = 0, 0, 0
    if count not in (1, 2, 4, PARTS):
        value = f"{os.environ['WORLD_SIZE']} ranks"
        rule = f"1, 2, 4 or 8 ranks, since sums have {PARTS} parts"
        told = InputError("ranks-invalid", "torchrun", value, rule, "start as many")
        raise told if number == 0 else Told(InputError.exit)
    return number, count, local


def _first_line(problem: BaseException) -> str:
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    return (lines[0] if lines else type(problem).__name__)[:160]


# --- results as bytes: no rank unpickles what comes over a network ----------------------------------------------------


def _packed(results: Mapping[int, Any]) -> bytes:
    """Write results as the JSON of their structure, with their tensors as safetensors behind it."""
    tensors: dict[str, Tensor] = {}

    def told(value: Any) -> Any:
        if isinstance(value, Tensor):
            tensors[str(len(tensors))] = value.detach().cpu().contiguous().clone()
            return {"tensor": str(len(tensors) - 1)}
        if isinstance(value, tuple | list):
            return [told(one) for one in value]
        if isinstance(value, WeightScheme):
            return {"scheme": value.model_dump(mode="json")}
        if type(value).__name__ in _KINDS:
            parts = {field.name: told(getattr(value, field.name)) for field in fields(value)}
            return {"kind": type(value).__name__, "parts": parts}
        return value

    text = json.dumps({str(index): told(value) for index, value in results.items()}).encode()
    return len(text).to_bytes(8, "little") + text + bytes(save(tensors))


def _unpacked(packed: bytes, device: torch.device) -> dict[int, Any]:
    length = int.from_bytes(packed[:8], "little")
    tensors = load(packed[8 + length :])

    def heard(value: Any) -> Any:
        if isinstance(value, list):
            return tuple(heard(one) for one in value)
        if not isinstance(value, dict):
            return value
        if "tensor" in value:
            return tensors[value["tensor"]].to(device)
        if "scheme" in value:
            return WeightScheme.model_validate(value["scheme"])
        return _KINDS[value["kind"]](**{name: heard(part) for name, part in value["parts"].items()})

    return {int(index): heard(value) for index, value in json.loads(packed[8 : 8 + length]).items()}
