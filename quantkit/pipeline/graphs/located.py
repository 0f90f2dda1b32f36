"""Which models are compiled as float ONNX graphs, and where the file of one lies.

A torch module is exported into the user's cache, and named after what it is.
A bundle of it says `module:CLASS` and the hash of the exported graph; `quantkit measure` finds that in the cache.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.content import cache_dir
from quantkit.errors import InputError, MissingDependency, one
from quantkit.graph.open import is_graph
from quantkit.model.source.alias import ALIASES, Alias, materialize
from quantkit.model.source.hashes import file_sha256
from quantkit.model.source.weights import disk_errors
from quantkit.pipeline.request import Request

if TYPE_CHECKING:
    from torch import Tensor, nn


REF = "module:"


def place(sha256: str) -> Path:
    """Where the graph of a module is kept."""
    return cache_dir() / "modules" / f"{sha256}.onnx"


def with_module(request: Request, module: nn.Module, example_inputs: Any) -> Request:
    """The request with a module's exported graph for its model.

    Args:
        module: of tensors to tensors, in float32.
        example_inputs: a tensor, several in their order, or by name: [n, ...] each. All sizes but n are fixed in the
            graph; n is free, unless the module fixes it.

    Raises:
        InputError: `module-kind`, `module-inputs`, `module-export`.
        MissingDependency: torch.
    """
    try:
        import onnx_ir as ir
        from torch import nn
    except ImportError as problem:
        raise MissingDependency(str(problem.name), extra="compile", purpose="exporting a module") from None
    from quantkit.model.to_onnx import write_onnx

    name = type(module).__name__
    if not isinstance(module, nn.Module):
        value, rule = one(name), "a model is a name, a path or a torch.nn.Module"
        raise InputError("module-kind", where="model", value=value, rule=rule, remedy="check what is given")
    examples = _examples(example_inputs, name)
    home = place("").parent
    with disk_errors(home):
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=home) as folder:
            file = Path(folder) / "model.onnx"
            try:
                write_onnx(module, examples, file)
                model = ir.load(file)
                for node in model.graph.all_nodes():
                    node.metadata_props.clear()  # paths of whoever exported it
                ir.save(model, file)
            except Exception as problem:  # of the module itself, or whatever torch's exporter raises
                raise _not_exported(name, problem) from None
            kept = place(file_sha256(file))
            file.replace(kept)
    return replace(request, model=str(kept), module=name)


def _examples(given: Any, name: str) -> list[Tensor] | dict[str, Tensor]:
    """By position or by name, two samples at least: of one, the exporter takes it that there is never another."""
    import torch

    by_name = isinstance(given, Mapping)
    tensors = dict(given) if by_name else dict(enumerate(given if isinstance(given, Sequence) else [given]))
    if not tensors or not all(isinstance(each, torch.Tensor) and each.ndim for each in tensors.values()):
        raise InputError(
            "module-inputs",
            where=name,
            value="no example_inputs" if given is None else f"example_inputs are {one(type(given).__name__)}",
            rule="a module is exported as it is called: a tensor, several, or a dict of them, [n, ...] each",
            remedy="example_inputs=torch.randn(2, 3, 224, 224)",
        )
    doubled = {key: torch.cat([each, each]) if len(each) == 1 else each for key, each in tensors.items()}
    return {str(key): each for key, each in doubled.items()} if by_name else list(doubled.values())


def _not_exported(name: str, problem: Exception) -> InputError:
    cause = problem.__cause__ or problem
    reason = next((line.strip() for line in str(cause).splitlines() if line.strip()), type(cause).__name__)
    return InputError(
        "module-export",
        where=name,
        value=f"{type(cause).__name__}: {reason[:300]}",
        rule="torch.onnx.export(module, example_inputs, dynamo=True) makes a graph of it",
        remedy="mend what it names, or export it yourself and give the .onnx file",
    )


@dataclass(frozen=True)
class Located:
    """The file of a graph.

    Args:
        path: of the ONNX file.
        ref: what a manifest calls it.
        name: what the bundle is named after.
        alias: of a shipped model, which has a calibration set of its own, and says what becomes of images before it.
    """

    path: Path
    ref: str
    name: str
    alias: Alias | None = None


def takes_graph(model: str) -> bool:
    """Whether a model is compiled as a float ONNX graph: a file of one, or a shipped network."""
    alias = ALIASES.get(model)
    return is_graph(model) or (alias is not None and alias.kind == "network")


def located(request: Request) -> Located:
    """Where the graph of a request lies; a shipped one is materialized."""
    alias = ALIASES.get(request.model)
    if alias is not None:
        return Located(materialize(alias) / "model.onnx", f"alias:{alias.name}", alias.name, alias)
    path = Path(request.model).expanduser()
    ref = f"{REF}{request.module}" if request.module else f"path:{path.name}"
    return Located(path, ref, request.module or path.stem)
