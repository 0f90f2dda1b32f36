"""Device of a compile: the processor, or a GPU that holds a block with its activations.

Work on a GPU is asynchronous. So transfers run beside it, on a thread and a stream of their own (`Lane`), and only they
wait for each other.
"""

from __future__ import annotations

import errno
import functools
import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from quantkit.errors import InputError
from quantkit.lazy import torch
from quantkit.machine import has

if TYPE_CHECKING:
    from torch import Tensor
    from torch import device as TorchDevice  # noqa: N812

AUTO, CPU = "auto", "cpu"
_NAME = re.compile(r"auto|cpu|cuda(:\d+)?")
# bytes of a page-locked piece of a copy to a GPU
_PIECE = 1 << 24
P = ParamSpec("P")
T = TypeVar("T")
V = TypeVar("V")


def demand_name(name: str) -> str:
    """Check a device's name: `cpu`, `cuda`, `cuda:1`, `auto`. Raises InputError (`unknown-device`)."""
    if not _NAME.fullmatch(name):
        rule = "cpu, cuda, cuda:N (the GPU of that number), or auto"
        remedy = "--device auto takes the GPU if there is one, and a block fits on it"
        raise InputError("unknown-device", "--device", name, rule, remedy)
    return name


def half_pays(kind: str) -> bool:
    """Tell whether products in bfloat16 are faster: on a GPU, and on processors with instructions for them."""
    if kind != CPU:
        return True
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


@dataclass(frozen=True)
class ComputeDevice:
    """Device on which blocks run and are solved.

    Args:
        name: `cpu` or `cuda:N`.
        model: name of the card from its driver; empty for a processor.
        chunk: sequences per forward; None for the processor's number.
        resident: True if hidden states of the whole calibration set stay on the device.
        tf32: True if products round their inputs to 10 bits of mantissa, for speed.
    """

    name: str = CPU
    model: str = ""
    chunk: int | None = None
    resident: bool = True
    tf32: bool = False

    @property
    def is_cpu(self) -> bool:
        """True for the processor."""
        return self.name == CPU

    @property
    def torch(self) -> TorchDevice:
        """Torch device."""
        return torch.device(self.name)

    @property
    def place(self) -> TorchDevice:
        """Device of the hidden states."""
        return torch.device(self.name if self.resident else CPU)

    @property
    def strict(self) -> ComputeDevice:
        """Device with float32 products, for comparing and scoring models."""
        return replace(self, tf32=False)

    def as_dict(self) -> dict[str, Any]:
        """Return the properties with an effect on a bundle's content; empty for a processor, described by its
        instruction set.
        """
        if self.is_cpu:
            return {}
        # the chunks determine the order of sums
        return {"device": self.model or self.name, "products": self.products, "sequences_at_once": self.chunk}

    @property
    def products(self) -> str:
        """Precision of float32 matrix products: `tf32` or `float32`."""
        return "tf32" if self.tf32 else "float32"

    @contextmanager
    def arithmetic(self) -> Iterator[None]:
        """Make this the current device, with products as in `products`; restore the previous state at the end."""
        # not by `fp32_precision`: reading the older flags would then fail (torch 2.13)
        before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
        torch.set_float32_matmul_precision("high" if self.tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = self.tf32
        try:
            # Triton launches on the current device, not on that of its arguments
            with torch.cuda.device(self.torch) if self.torch.type == "cuda" else nullcontext():
                yield
        finally:
            torch.set_float32_matmul_precision(before[0])
            torch.backends.cudnn.allow_tf32 = before[1]


def put(tensor: Tensor, device: TorchDevice | None) -> Tensor:
    """Copy a tensor of the processor to a device, on its current stream; None leaves it where it is."""
    if device is None:
        return tensor
    if device.type != "cuda" or tensor.device.type != "cpu" or tensor.nbytes < _PIECE:
        return tensor.to(device)
    pieces = iter(tensor.contiguous().view(-1).view(torch.uint8).split(_PIECE))
    copied = filled(tensor.nbytes, lambda piece: piece.copy_(next(pieces)), device)
    return copied.view(tensor.dtype).reshape(tensor.shape)


def filled(count: int, fill: Callable[[Tensor], object], device: TorchDevice) -> Tensor:
    """Fill bytes on a GPU, uint8 [count], on its current stream; `fill` writes the next bytes into a piece.

    The bytes go through page-locked pieces, which torch reuses. Copies from ordinary memory that is written for the
    first
    time took half of a compile of 8B's shapes on an H200 (benchmarks/results/gpu-run-20261126-2.json).
    """
    whole = torch.empty(count, dtype=torch.uint8, device=device)
    for there in whole.split(_PIECE):
        # torch does not reuse page-locked memory while a copy reads from it
        piece = torch.empty(there.shape, dtype=torch.uint8, pin_memory=True)
        fill(piece)
        there.copy_(piece, non_blocking=True)
    return whole


def absent(name: str, value: str) -> InputError:
    """Make the error for a missing GPU."""
    rule = "a GPU that torch sees, counted from 0"
    remedy = "--device cpu; or install a torch build with CUDA (`quantkit doctor` lists the devices)"
    return InputError("device-absent", f"--device {name}", value, rule, remedy)


def present(name: str) -> tuple[str, str, int]:
    """Return the numbered name, the card's model and the free bytes of a GPU. Raises InputError (`device-absent`)."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    number = int(name.partition(":")[2] or 0)
    if number >= count:
        raise absent(name, f"torch {torch.__version__} sees {count} GPUs")
    if not has("triton"):
        raise absent(name, "triton, which its solvers are written in, is not installed")
    try:
        free, _ = torch.cuda.mem_get_info(number)
    except RuntimeError as problem:  # an old driver, or a card in exclusive use
        raise absent(name, " ".join(str(problem).split())[:160]) from None
    return f"cuda:{number}", str(torch.cuda.get_device_name(number)), int(free)


class Lane:
    """One thread, and on a GPU one stream; submitted work runs in order, beside the device's own work."""

    def __init__(self, device: TorchDevice) -> None:
        self._device = device
        self._pool = ThreadPoolExecutor(1)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def submit(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run work after everything now queued on the device."""
        if self._stream is None:
            return self._pool.submit(work, *args, **kwargs)
        stream, before = self._stream, torch.cuda.current_stream(self._device).record_event()

        def run() -> T:
            with torch.cuda.stream(stream):
                stream.wait_event(before)
                return work(*args, **kwargs)

        return self._pool.submit(run)

    def taken(self, tensors: list[Tensor]) -> None:
        """Make the current stream wait for the lane, so that it can use the lane's results."""
        if self._stream is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(self._stream)
            for tensor in tensors:
                tensor.record_stream(current)

    def __enter__(self) -> Lane:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()  # what is queued is done: a finished block is written, whatever stops the next


@contextmanager
def one_thread(of: Tensor | None = None) -> Iterator[int]:
    """Run torch's kernels in the body on one thread; does nothing if `of` is on a device.

    Vectors are too short for several threads, and on one thread sums and Cholesky factors are equal on every machine.

    Yields: number of threads for `spread`, those that there were.
    """
    if of is not None and of.device.type != "cpu":
        yield 1
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield before
    finally:
        torch.set_num_threads(before)


def spread(work: Callable[[T], V], parts: Iterable[T], threads: int) -> list[V]:
    """Work on each part, on so many threads with one of torch's each; the parts, and so the bits, do not depend on
    them. This thread is one of them: to wake another takes a tenth of a millisecond.

    Raises: the error of the first part that has one; none begins after it.
    """
    parts, graded = [*parts], torch.is_grad_enabled()
    if threads == 1 or len(parts) < 2:
        return [work(part) for part in parts]
    waiting, done, failed = iter(enumerate(parts)), dict[int, V](), dict[int, BaseException]()

    def some() -> None:
        with torch.set_grad_enabled(graded):  # which each thread has for itself
            for number, part in waiting:
                try:
                    done[number] = work(part)
                except BaseException as error:
                    failed[number] = error
                    deque(waiting, 0)

    others = list[Future[None]]()
    try:
        others += [_workers(threads, os.getpid()).submit(some) for _ in range(min(threads, len(parts)) - 1)]
        some()
    finally:
        deque(waiting, 0)
        wait([other for other in others if not other.cancel()])  # one that has not begun has nothing left to do
    if failed:
        raise failed[min(failed)]
    return [done[number] for number in range(len(parts))]


@functools.cache
def _workers(threads: int, process: int) -> ThreadPoolExecutor:
    """Make lasting threads: to start them takes longer than a part does. A forked process has none of its
    parent's."""
    return ThreadPoolExecutor(threads - 1, f"solver-{process}", torch.set_num_threads, (1,))


# torch's CPU allocator raises a plain RuntimeError; libraries in Rust and C pass on the system's message
_NO_MEMORY = re.compile(r"DefaultCPUAllocator|Cannot allocate memory|\(os error 12\)")


def is_out_of_memory(error: BaseException | None) -> bool:
    """Tell whether an error, or one of its causes, means that memory ran out."""
    while error is not None:
        if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # the latter is torch's
            return True
        if isinstance(error, OSError) and error.errno == errno.ENOMEM:
            return True
        if isinstance(error, RuntimeError | OSError) and _NO_MEMORY.search(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


def out_of_memory(where: str, error: BaseException) -> InputError:
    """Make the error `out-of-memory`."""
    value = " ".join(str(error).split())[:160] or "there is no more memory"
    return InputError("out-of-memory", where, value, remedy="use a larger machine, or end other programs here")
