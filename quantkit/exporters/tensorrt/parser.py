"""Read networks with TensorRT's parser; one error line names the nodes it refuses and the remedy.

`OnnxParser.parse` goes on after a refused node and reports every one, so its errors are complete. `supports_model_v2`
also lists their neighbours, which the parser does take. `supports_operator` needs no network. It knows ONNX's own
operators, but calls the contrib operator MatMulNBits supported although its plugin is missing. Some of ONNX's operators
have an importer and no kernel (`_EMPTY`). All of this is TensorRT-RTX 1.7.1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.errors import InputError, MissingDependency
from quantkit.runtimes import child
from quantkit.runtimes.tensorrt.library import Library, Said, load

_SHOWN = 4
_LEFT_OUT = "--set 'export=[{tensorrt: {engine: false}}]' writes only the network, for another library"
# operators of quantized graphs for other runtimes, and the setting that avoids them
_REMEDIES = (
    (
        ("DynamicQuantizeLinear", "MatMulInteger", "ConvInteger", "QLinearMatMul", "QLinearConv"),
        "--set scheme.activations.dynamic=false --set scheme.activations.granularity=tensor, "
        "or give the float graph, if this one is quantized already",
    ),
    (("TensorScatter",), "--set tensorrt.cache=grown"),
    (("Attention",), "export the graph again in an opset below 23, where attention is products and a softmax"),
)
# operators whose plugin is missing in TensorRT-RTX, or that no kernel implements on any GPU
_EMPTY = frozenset({"NonZero", "RoiAlign", "NonMaxSuppression", "Attention"})
_ZERO_POINT = "--set scheme.weights.symmetric=true --set scheme.activations.symmetric=true"
_CONTRIB = "export the graph without a runtime's own optimizations: TensorRT reads ONNX's own operators only"
_ELSEWHERE = (
    "no pass replaces it: export the graph without this operator, or run it in ONNX Runtime on the processor "
    "(--recipe int8-network for a graph, and no --target)"
)


@dataclass(frozen=True)
class Refused:
    """A node that the parser refuses, with its message; the domain "" is ONNX's own."""

    operator: str
    node: str = ""
    message: str = ""
    domain: str = ""


def demand_polygraphy() -> None:
    """Raise MissingDependency if Polygraphy is missing: its loaders read networks and build engines."""
    with MissingDependency.unless_found("polygraphy", extra="tensorrt", purpose="a TensorRT engine"):
        import polygraphy  # noqa: F401


def read(library: Library, log: Said, path: Path, where: str) -> tuple[Any, Any, Any]:
    """Return (builder, network, parser) of an ONNX file, by Polygraphy's loader.

    Polygraphy's `NetworkFromOnnxPath` stops at the parser's first error; here all errors are needed.

    Raises InputError: `network-unsupported` with the nodes.
    """
    from polygraphy.backend.trt import util
    from polygraphy.backend.trt.loader import BaseNetworkFromOnnx

    util.TRT_LOGGER = log.logger
    typed = hasattr(library.api.NetworkDefinitionCreationFlag, "STRONGLY_TYPED")  # version 11 knows no other
    builder, network, parser = BaseNetworkFromOnnx(strongly_typed=typed)()
    if not parser.parse_from_file(str(path)):
        raise refusal(where, f"{library.name} {library.version}", of_parser(parser))
    return builder, network, parser


def demand_read(library: Library, network: Path, where: str) -> None:
    """Read a network by a library's parser in a child process, without building it.

    Raises InputError: `network-unsupported` with the nodes. MissingDependency: polygraphy.
    """
    demand_polygraphy()
    job = {"library": library.name, "network": str(network), "where": where}
    child.run(_read, job, remedy=_LEFT_OUT, died="network-unsupported", where=where, environment=library.environment())


def _read(job: Mapping[str, str], caller: child.Caller) -> None:
    library = load(job["library"])  # type: ignore[arg-type]
    read(library, Said(library.api), Path(job["network"]), job["where"])


def of_parser(parser: Any) -> list[Refused]:
    """List the nodes refused by a parser."""
    errors = [parser.get_error(place) for place in range(parser.num_errors)]
    # TensorRT 10 before 10.1 names no nodes
    return [
        Refused(
            getattr(error, "node_operator", str)() or "a node",
            getattr(error, "node_name", str)(),
            " ".join(error.desc().split())[:240],
        )
        for error in errors
    ]


def unknown(library: Library, operators: Iterable[str]) -> set[str]:
    """Return ONNX operators without an importer in the library's parser, or with an empty one."""
    log = Said(library.api)
    # both keep a name: a parser does not keep its builder and network alive
    builder = library.api.Builder(log.logger)
    network = library.network(builder)
    parser = library.api.OnnxParser(network, log.logger)
    return {name for name in operators if name in _EMPTY or not parser.supports_operator(name)}


def refusal(where: str, library: str, refused: Sequence[Refused]) -> InputError:
    """Make `network-unsupported`.

    Args:
        refused: refused nodes in the order of the graph; the first one decides the remedy.
    """
    first, *_ = refused = list(refused) or [Refused("a node", message="no reason")]
    kinds: dict[str, list[str]] = {}
    for node in refused:
        kinds.setdefault(node.operator, []).append(node.node)
    named = [f"{kind} ({_some([name for name in names if name])})" for kind, names in kinds.items()]
    more = f"; and {len(named) - _SHOWN} more kinds" if len(named) > _SHOWN else ""
    return InputError(
        "network-unsupported",
        where=f"{where}: {first.operator} {first.node}".rstrip(),
        value=f"{library} does not take {'; '.join(named[:_SHOWN])}{more}".replace(" ()", ""),
        # TensorRT's own checks report only `false`
        rule="the library supports every node" if first.message in ("", "false") else first.message,
        remedy=_remedy(first),
    )


def _some(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _remedy(first: Refused) -> str:
    if "zero point is not supported" in first.message:
        return _ZERO_POINT
    for operators, remedy in _REMEDIES:
        if first.operator in operators:
            return remedy
    if first.domain or "Plugin not found" in first.message:
        return _CONTRIB
    if first.operator in ("QuantizeLinear", "DequantizeLinear"):
        return f"--set keep=[{first.node.partition('/')[0] or 'LAYER'}] leaves that layer in floats"
    return _ELSEWHERE
