"""Open an ONNX file in ONNX Runtime, as it is or changed for a check."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from quantkit.errors import InputError, MissingDependency
from quantkit.graph.protobuf import demand_attributes

if TYPE_CHECKING:
    import onnxruntime

    from quantkit.runtimes.onnxruntime.float_products import Way


# multiply dequantized weights in float: by default the runtime fuses such products to MatMulNBits of level 4
_IN_FLOAT = {"session.disable_quant_qdq": "1"}
# part of the library's message -> reason that a file does not load
_REASONS = {
    "is not a registered function/op": "an operator that this onnxruntime does not have",
    "No Op registered for": "an operator that this onnxruntime does not have",
    "No opset import for domain": "an operator that this onnxruntime does not have",
    "Fatal error": "an operator that this onnxruntime does not have",
    "Unsupported model IR version": "a newer file format than this onnxruntime reads",
    "external": "its external data file is missing or damaged",
    "beyond 32 bits": "an attribute that no operator has",
}


def _options(threads: int, level: int | None = None) -> onnxruntime.SessionOptions:
    try:
        import onnxruntime
    except ImportError:
        raise MissingDependency("onnxruntime", extra="onnx", purpose="running onnx/model.onnx") from None
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    # threads that spin between runs would slow down anything else that is measured
    options.add_session_config_entry("session.force_spinning_stop", "1")
    for name, value in _IN_FLOAT.items() if level == 0 else ():
        options.add_session_config_entry(name, value)
    return options


def open_graph(
    path: Path,
    threads: int,
    *,
    profile: str | None = None,
    level: int | None = None,
    shown: Sequence[str] = (),
    way: Way | None = None,
    own: bool = False,
) -> onnxruntime.InferenceSession:
    """Open a session.

    Args:
        threads: threads of one operator.
        profile: folder for the profile.
        level: accuracy level instead of the file's; with 0 all products are in float32.
        shown: values inside the graph that become outputs too.
        way: one way of a graph that multiplies in two; None with level 0 or `shown`: that of steps.
        own: whether quantkit's operators multiply 4-bit weights (`runtimes/quantkit_cpu`).

    Raises:
        MissingDependency: onnxruntime.
        InputError: `onnx-unreadable`; with `own`, `compiler-missing`, `kernels-not-compiled`, `nothing-to-multiply`.
    """
    options = _options(threads, level)
    import onnxruntime

    if profile is not None:
        options.enable_profiling = True
        options.profile_file_prefix = str(Path(profile) / "run")
    what: str | bytes = str(path)
    if own:
        from quantkit.kernels.cpu.library import register

        register(options)
    try:
        demand_attributes(path)
        if level is not None or shown or way or own:
            what = _changed(path, level, shown, way, own)
            options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(path.parent))
        return onnxruntime.InferenceSession(what, options, providers=["CPUExecutionProvider"])
    except InputError:
        raise
    except Exception as problem:
        raise unreadable(path, str(problem).strip() or type(problem).__name__) from None


def unreadable(path: Path, text: str) -> InputError:
    """Make the error `onnx-unreadable` from the library's message."""
    import onnxruntime

    reason = next((meaning for sign, meaning in _REASONS.items() if sign.lower() in text.lower()), "it does not load")
    value, rule = f"{reason}: {text.splitlines()[0][:200]}", f"onnxruntime {onnxruntime.__version__} loads it"
    remedy = "`quantkit verify` shows whether a file has changed; else update onnxruntime, or export again"
    return InputError("onnx-unreadable", str(path), value, rule, remedy)


def _changed(path: Path, level: int | None, shown: Sequence[str], way: Way | None, own: bool) -> bytes:
    """Serialize the graph with the changes; its weights stay in their file."""
    with MissingDependency.unless_found("onnx", extra="compile", purpose="changing a graph before it runs"):
        import onnx

    from quantkit.runtimes.onnxruntime.float_products import every_node, float_products, one_way
    from quantkit.runtimes.onnxruntime.own_products import own_products

    model = onnx.load(str(path), load_external_data=False)
    if level == 0 or shown or way:
        one_way(model, way or "steps")
    if level == 0:
        float_products(model)
    for node in every_node(model.graph):
        for attribute in node.attribute:
            if attribute.name == "accuracy_level" and level is not None:
                attribute.i = level
    outputs = {value.name for value in model.graph.output}
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in shown if name not in outputs)
    if own and not own_products(model):
        raise InputError(
            "nothing-to-multiply",
            str(path),
            "no product with 4-bit weights and accuracy level 4",
            "`quantkit_cpu` has operators for these products",
            "use the runtime `onnxruntime`, or compile with --recipe int4-cpu",
        )
    content: bytes = model.SerializeToString()
    return content


def write_optimized(path: Path, to: Path) -> None:
    """Write the graph as the runtime optimizes it on this machine, with its weights beside it.

    Raises:
        MissingDependency: onnxruntime.
        InputError: `onnx-unreadable`.
    """
    options = _options(1)
    import onnxruntime

    options.optimized_model_filepath = str(to)
    options.add_session_config_entry("session.optimized_model_external_initializers_file_name", f"{to.name}.data")
    options.add_session_config_entry("session.optimized_model_external_initializers_min_size_in_bytes", "1024")
    try:
        demand_attributes(path)
        onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as problem:
        raise unreadable(path, str(problem).strip() or type(problem).__name__) from None
