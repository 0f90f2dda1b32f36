"""Where a compile computes: the processor, or a GPU that a block with its activations fits on.

Who queues a GPU's work does not wait for it meanwhile, so what goes to it and comes from it runs beside that work: on a
thread and a stream of its own (`Lane`), which waits for itself alone.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
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
# bytes of page-locked memory that a copy to a GPU goes through at a time
_PIECE = 1 << 24
P = ParamSpec("P")
T = TypeVar("T")


def demand_name(name: str) -> str:
    """Check a device's name: `cpu`, `cuda`, `cuda:1`, `auto`. Raises InputError (`unknown-device`)."""
    if not _NAME.fullmatch(name):
        rule = "cpu, cuda, cuda:N (the GPU of that number), or auto"
        remedy = "--device auto takes the GPU if there is one, and a block fits on it"
        raise InputError("unknown-device", "--device", name, rule, remedy)
    return name


@dataclass(frozen=True)
class ComputeDevice:
    """Where blocks are run and solved.

    Args:
        name: `cpu` or `cuda:N`.
        model: of the card, as its driver names it; empty for a processor.
        chunk: sequences of one forward; None: as on a processor.
        resident: whether hidden states of the whole calibration set stay there.
        tf32: whether products round their inputs to 10 bits of mantissa, for speed.
    """

    name: str = CPU
    model: str = ""
    chunk: int | None = None
    resident: bool = True
    tf32: bool = False

    @property
    def is_cpu(self) -> bool:
        """Whether it is the processor."""
        return self.name == CPU

    @property
    def torch(self) -> TorchDevice:
        """As torch names it."""
        return torch.device(self.name)

    @property
    def place(self) -> TorchDevice:
        """Where hidden states lie."""
        return torch.device(self.name if self.resident else CPU)

    @property
    def strict(self) -> ComputeDevice:
        """The same, with products in float32: what holds a model against another, or scores it."""
        return replace(self, tf32=False)

    def as_dict(self) -> dict[str, Any]:
        """What a bundle's content depends on; empty for a processor, which the instruction set says."""
        if self.is_cpu:
            return {}
        # sums run in the order of the chunks
        return {"device": self.model or self.name, "products": self.products, "sequences_at_once": self.chunk}

    @property
    def products(self) -> str:
        """How float32 matrices are multiplied."""
        return "tf32" if self.tf32 else "float32"

    @contextmanager
    def arithmetic(self) -> Iterator[None]:
        """Within it this is the current device, and torch multiplies float32 as `products` says; then as before."""
        # not by `fp32_precision`: whoever then reads the older flags gets an error (torch 2.13)
        before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
        torch.set_float32_matmul_precision("high" if self.tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = self.tf32
        try:
            # Triton launches on the current device, whatever its arguments lie on
            with torch.cuda.device(self.torch) if self.torch.type == "cuda" else nullcontext():
                yield
        finally:
            torch.set_float32_matmul_precision(before[0])
            torch.backends.cudnn.allow_tf32 = before[1]


def put(tensor: Tensor, device: TorchDevice | None) -> Tensor:
    """Put a tensor of the processor on a device, on its present stream; None leaves it where it is."""
    if device is None:
        return tensor
    if device.type != "cuda" or tensor.device.type != "cpu" or tensor.nbytes < _PIECE:
        return tensor.to(device)
    pieces = iter(tensor.contiguous().view(-1).view(torch.uint8).split(_PIECE))
    found = filled(tensor.nbytes, lambda piece: piece.copy_(next(pieces)), device)
    return found.view(tensor.dtype).reshape(tensor.shape)


def filled(count: int, fill: Callable[[Tensor], object], device: TorchDevice) -> Tensor:
    """Fill bytes on a GPU, uint8 [count], on its present stream; `fill` writes the next bytes into a piece.

    They go through page-locked pieces, which torch keeps and hands out again. Ordinary memory that is written for the
    first time, and copied to the card by its driver, took half of a compile of 8B's shapes on an H200
    (benchmarks/results/gpu-run-20261126-2.json).
    """
    whole = torch.empty(count, dtype=torch.uint8, device=device)
    for there in whole.split(_PIECE):
        # torch hands out no page-locked memory that a copy still reads from
        piece = torch.empty(there.shape, dtype=torch.uint8, pin_memory=True)
        fill(piece)
        there.copy_(piece, non_blocking=True)
    return whole


def absent(name: str, value: str) -> InputError:
    """Make the error for a GPU that is not here."""
    rule = "a GPU that torch sees, counted from 0"
    remedy = "--device cpu; or install a torch build with CUDA (`quantkit doctor` says what is seen)"
    return InputError("device-absent", f"--device {name}", value, rule, remedy)


def present(name: str) -> tuple[str, str, int]:
    """Return name with its number, the card's model and bytes free of a GPU. Raises InputError (`device-absent`)."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    number = int(name.partition(":")[2] or 0)
    if number >= count:
        raise absent(name, f"torch {torch.__version__} sees {count} GPUs")
    if not has("triton"):
        raise absent(name, "triton, which its solvers are written in, is not installed")
    try:
        free, _ = torch.cuda.mem_get_info(number)
    except RuntimeError as problem:  # a driver that is too old, a card that another process holds alone
        raise absent(name, " ".join(str(problem).split())[:160]) from None
    return f"cuda:{number}", str(torch.cuda.get_device_name(number)), int(free)


class Lane:
    """One thread, and on a GPU one stream: what is submitted runs in order, beside what the device has to do."""

    def __init__(self, device: TorchDevice) -> None:
        self._device = device
        self._pool = ThreadPoolExecutor(1)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def submit(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run it when all that is queued on the device now is done."""
        if self._stream is None:
            return self._pool.submit(work, *args, **kwargs)
        stream, before = self._stream, torch.cuda.current_stream(self._device).record_event()

        def run() -> T:
            with torch.cuda.stream(stream):
                stream.wait_event(before)
                return work(*args, **kwargs)

        return self._pool.submit(run)

    def taken(self, tensors: list[Tensor]) -> None:
        """Use what the lane has made on the present stream from now on."""
        if self._stream is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(self._stream)
            for tensor in tensors:
                tensor.record_stream(current)

    def __enter__(self) -> Lane:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)


# torch's allocator of the CPU raises a plain RuntimeError; libraries written in Rust and C pass on the system's words
_NO_MEMORY = re.compile(r"DefaultCPUAllocator|Cannot allocate memory|\(os error 12\)")


def is_out_of_memory(error: BaseException | None) -> bool:
    """Tell whether an error, or one it was raised from, means that there was no more memory."""
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
    """Make the error for it: `out-of-memory`."""
    value = " ".join(str(error).split())[:160] or "there is no more memory"
    return InputError("out-of-memory", where, value, remedy="a larger machine, or less beside it here")
