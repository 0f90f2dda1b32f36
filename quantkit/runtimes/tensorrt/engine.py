"""Open an engine in its library, run it, and read its layers and their times.

Memory is torch's: tensors on the device are bound by their addresses and stay there, so that launches can be captured
once and replayed. TensorRT-RTX compiles its kernels when an engine first meets a shape; they are kept in the user's
cache, and the library checks them when it reads them again.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quantkit.bundle.disk import write_atomic
from quantkit.content import cache_dir
from quantkit.errors import InputError
from quantkit.runtimes.tensorrt.file import EngineFile, unreadable
from quantkit.runtimes.tensorrt.library import Library, Said

if TYPE_CHECKING:
    import torch

# library's name of a type -> torch's
TYPES = {
    "FLOAT": "float32",
    "HALF": "float16",
    "BF16": "bfloat16",
    "FP8": "float8_e4m3fn",
    "INT8": "int8",
    "UINT8": "uint8",
    "INT32": "int32",
    "INT64": "int64",
    "BOOL": "bool",
}


@dataclass(frozen=True)
class Binding:
    """An input or output of an engine.

    Args:
        shape: shape; -1 for a free size.
        type: torch's name of the type.
        output: whether it is an output.
        host: whether the CPU reads it, because shapes depend on it.
    """

    shape: tuple[int, ...]
    type: str
    output: bool
    host: bool


class Engine:
    """One engine, ready to run.

    Args:
        file: verified file.
        library: library that built it.
        device: torch device; `cpu` for a library of the tests.

    Raises:
        InputError: `hash-mismatch`; `engine-unreadable`, with the library's message.
    """

    def __init__(self, file: EngineFile, library: Library, *, device: str = "cuda") -> None:
        import torch

        self.file, self.library, self.device = file, library, torch.device(device)
        self.notes = list(file.notes)
        api = library.api
        self._said = Said(api)
        self._runtime = api.Runtime(self._said.logger)
        data = file.read()
        self._demand_valid(data)
        if file.described.may("version_compatible") and hasattr(self._runtime, "engine_host_code_allowed"):
            self._runtime.engine_host_code_allowed = True  # the engine contains host code; its file is verified
        engine = self._runtime.deserialize_cuda_engine(data)
        if engine is None:
            why = self._said.first or f"{library.name} {library.version} gives no reason"
            raise unreadable(file.path, "; ".join([why, *file.notes]))
        self.engine: Any = engine
        self.bindings = self._bindings()
        self._contexts: dict[int, Any] = {}
        self._side: torch.cuda.Stream | None = None
        self._kernels = _Kernels(library, engine, file.sha256)

    def _demand_valid(self, data: bytes) -> None:
        """Refuse an engine if TensorRT-RTX reports it as invalid before opening it."""
        if not hasattr(self._runtime, "get_engine_validity"):
            return
        api = self.library.api
        validity, flags = self._runtime.get_engine_validity(data)
        members = api.EngineInvalidityDiagnostics.__members__
        why = [name.lower().replace("_", " ") for name, flag in members.items() if int(flags) & int(flag)]
        reason = ", ".join(why)
        if validity == api.EngineValidity.SUBOPTIMAL:
            self.notes.append(f"{self.file.path.name} may be slower than possible: {reason or 'no reason is known'}")
        if validity == api.EngineValidity.INVALID:
            raise unreadable(self.file.path, reason or "the library calls it invalid", update="old cuda" in reason)

    def _bindings(self) -> dict[str, Binding]:
        api, engine = self.library.api, self.engine
        bindings = {}
        for place in range(engine.num_io_tensors):
            name = engine.get_tensor_name(place)
            bindings[name] = Binding(
                tuple(engine.get_tensor_shape(name)),
                TYPES[engine.get_tensor_dtype(name).name],
                engine.get_tensor_mode(name) == api.TensorIOMode.OUTPUT,
                engine.get_tensor_location(name) == api.TensorLocation.HOST,
            )
        return bindings

    @property
    def inputs(self) -> dict[str, Binding]:
        """Bindings of the inputs."""
        return {name: binding for name, binding in self.bindings.items() if not binding.output}

    @property
    def outputs(self) -> dict[str, Binding]:
        """Bindings of the outputs."""
        return {name: binding for name, binding in self.bindings.items() if binding.output}

    def range(self, profile: int, name: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the smallest and the largest shape of an input under a profile."""
        least, _, most = self.engine.get_tensor_profile_shape(name, profile)
        return tuple(least), tuple(most)

    def profile(self, batch: int, tokens: int) -> tuple[int, int]:
        """Return the best profile for new tokens of `batch` sequences, and the number of tokens that it takes at once.

        Raises:
            InputError: `shape-unsupported`, no profile takes this batch, or so few tokens.
        """
        fitting = []
        for number in range(self.engine.num_optimization_profiles):
            least, most = self.range(number, "input_ids")
            if least[0] <= batch <= most[0] and least[1] <= tokens:
                # if two profiles take it, the narrower one is tuned for it
                fitting.append((min(tokens, most[1]), -most[1], number))
        if fitting:
            taken, _, number = max(fitting)
            return number, taken
        ranges = [self.range(number, "input_ids") for number in range(self.engine.num_optimization_profiles)]
        value = f"batch {batch}, {tokens} tokens"
        rule = " or ".join(f"batch {a[0]} to {b[0]} with {a[1]} to {b[1]} tokens" for a, b in ranges)
        remedy = "another batch, or an engine for it: `profiles` in the target"
        raise InputError("shape-unsupported", str(self.file.path), value, rule, remedy)

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Make zeros of a binding's type on the device that reads it."""
        import torch

        binding = self.bindings[name]
        return torch.zeros(shape, dtype=getattr(torch, binding.type), device="cpu" if binding.host else self.device)

    def context(self, profile: int) -> Any:
        """Return the context of a profile, made at first use."""
        if profile not in self._contexts:
            self._contexts[profile] = self.new_context(profile)
        return self._contexts[profile]

    def new_context(self, profile: int) -> Any:
        """Make one more context of a profile. Raises InputError `out-of-memory`."""
        context = self._kernels.context()
        if context is None:
            value = self._said.last or "no execution context"
            rule = "activations of the largest shapes fit into the GPU's memory"
            remedy = "a smaller batch or context in the target's `profiles`"
            raise InputError("out-of-memory", str(self.file.path), value, rule, remedy)
        if profile and not context.set_optimization_profile_async(profile, self.stream()):
            raise unreadable(self.file.path, self._said.last or f"profile {profile} cannot be chosen")
        return context

    def stream(self) -> int:
        """Return the handle of torch's current stream."""
        import torch

        return int(torch.cuda.current_stream().cuda_stream) if self.device.type == "cuda" else 0

    def bind(self, context: Any, feed: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Bind shapes and addresses; outputs that are also inputs share their tensor, the others are new.

        Raises:
            InputError: `shape-unsupported`.
        """
        for name, tensor in feed.items():
            context.set_tensor_address(name, tensor.data_ptr())
            if not context.set_input_shape(name, tuple(tensor.shape)):
                value, rule = " x ".join(map(str, tensor.shape)), "the engine was built for other shapes"
                remedy = "another batch or length, or other `profiles` in the target"
                raise InputError("shape-unsupported", name, value, rule, remedy)
        outputs = {}
        for name in self.outputs:
            past = name.replace("present.", "past_key_values.")
            if past != name and past in feed:
                outputs[name] = feed[past]
            else:
                outputs[name] = self.tensor(name, tuple(context.get_tensor_shape(name)))
            context.set_tensor_address(name, outputs[name].data_ptr())
        return outputs

    def enqueue(self, context: Any) -> None:
        """Launch the bound run. Raises InputError `engine-failed`."""
        with self._aside():
            done = context.execute_async_v3(self.stream())
        if not done:
            value, rule = self._said.last or "no reason given", "an engine runs the shapes that it was built for"
            remedy = "please report it, with the recipe and the shapes"
            raise InputError("engine-failed", str(self.file.path), value, rule, remedy)

    def run(self, profile: int, feed: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Run a profile once and return the outputs. Raises InputError `shape-unsupported`, `engine-failed`."""
        context = self.context(profile)
        outputs = self.bind(context, feed)
        self.enqueue(context)
        self.wait()
        return outputs

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        """Switch to another stream than the default one, on which the library would wait for the whole device."""
        import torch

        if self.device.type != "cuda" or torch.cuda.current_stream() != torch.cuda.default_stream():
            yield
            return
        if self._side is None:
            self._side = torch.cuda.Stream()
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            yield
        torch.cuda.current_stream().wait_stream(self._side)

    def keep_kernels(self) -> None:
        """Save the kernels compiled for this engine in the user's cache."""
        self._kernels.keep()

    # --- facts about the layers ---------------------------------------------------------------------------------------

    def information(self) -> dict[str, Any]:
        """Return the inspector's JSON: `Layers`, inputs and outputs."""
        inspector = self.engine.create_engine_inspector()
        inspector.execution_context = self.context(0)
        facts = json.loads(inspector.get_engine_information(self.library.api.LayerInformationFormat.JSON))
        return dict(facts)

    def layer_times(
        self, profile: int, feed: Mapping[str, torch.Tensor], runs: int, *, warm: int = 3
    ) -> dict[str, list[float]]:
        """Map every layer to its seconds in every run, in a separate context: profiling slows an engine down."""
        api = self.library.api
        taken: dict[str, list[float]] = {}

        class Profiler(api.IProfiler):  # type: ignore[misc, name-defined]
            def __init__(self) -> None:
                api.IProfiler.__init__(self)

            def report_layer_time(self, layer_name: str, ms: float) -> None:
                taken.setdefault(layer_name, []).append(ms / 1e3)

        context = self.new_context(profile)
        context.profiler = profiler = Profiler()
        context.enqueue_emits_profile = True
        # kept until the last run: outputs are bound by address
        outputs = self.bind(context, feed)
        for number in range(warm + runs):
            if number == warm:
                taken.clear()
            self.enqueue(context)
            self.wait()
        del outputs, profiler
        return taken

    def wait(self) -> None:
        """Wait for the device."""
        import torch

        if self.device.type == "cuda":
            torch.cuda.synchronize()


class _Kernels:
    """Contexts, and kernels that TensorRT-RTX compiles in them, kept for the next process; TensorRT compiles none."""

    def __init__(self, library: Library, engine: Any, key: str) -> None:
        self._engine = engine
        self._path = cache_dir() / "kernels" / f"{library.name}-{library.version}-{key[:32]}.cache"
        self._config: Any = None
        self._cache: Any = None
        self._make: Callable[[], Any] = engine.create_execution_context
        if not library.ahead_of_time or not hasattr(engine, "create_runtime_config"):
            return
        self._config = engine.create_runtime_config()
        # compile for a shape before its first run: else a slower kernel runs until the right one is ready
        strategies = library.api.DynamicShapesKernelSpecializationStrategy
        self._config.dynamic_shapes_kernel_specialization_strategy = strategies.EAGER
        self._cache = self._config.create_runtime_cache()
        if self._path.is_file():
            self._cache.deserialize(self._path.read_bytes())  # the library ignores kernels that do not fit
        self._config.set_runtime_cache(self._cache)
        self._make = lambda: engine.create_execution_context(self._config)

    def context(self) -> Any:
        return self._make()

    def keep(self) -> None:
        if self._cache is None:
            return
        data = self._cache.serialize()
        if data is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(self._path, bytes(data))
