"""One GGUF file of a decoder, for llama.cpp and programs built on it.

`gguf/model.gguf` holds the weights in ggml's types, with tokenizer, chat template and the fields that llama.cpp needs,
as its own converter writes them (`architecture.py`, `tokenizer.py`). The recipe chooses the type of every linear, the
head and the embedding.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from quantkit import machine
from quantkit.bundle import Check, Decision
from quantkit.content import Closed
from quantkit.errors import MissingDependency
from quantkit.exporters import Exporter, LayerSpec, unheld
from quantkit.exporters.gguf.architecture import KNOWN, architecture_of, grouped, names_of, overflow, type_of
from quantkit.scheme import WeightScheme

if TYPE_CHECKING:
    from quantkit.exporters.values import Values
    from quantkit.model.sizes.storage import LaidOver, Storage
    from quantkit.model.source.open import Source
    from quantkit.target import State

FOLDER, MODEL = "gguf", "model.gguf"
_LEAVE, _ONE = "leave `gguf` out of `export`", "experts of a layer are one tensor in the file"
# CPU flags for products in bfloat16, x86's and Arm's
_BFLOAT16 = {"avx512_bf16", "bf16"}


class GgufOptions(Closed):
    """Settings of `export: - gguf: {…}`.

    Args:
        floats: type of weights without codes; vectors and norms are always float32. `auto` is bfloat16 for a source in
            bfloat16, else float16.
        embedding: scheme of token embeddings, as in a recipe: `{format: q6_k}`; None: floats. A tied head gives them
            its codes.
    """

    floats: Literal["auto", "float16", "bfloat16", "float32"] = "auto"
    embedding: WeightScheme | None = None

    def high(self, dtype: str) -> str:
        """Return the float format for a source of this dtype."""
        return self.floats if self.floats != "auto" else "bfloat16" if dtype == "bfloat16" else "float16"


class Gguf(Exporter):
    """Exporter `gguf`."""

    name = "gguf"
    runtimes = ("llama_cpp",)
    stores = "file"
    adds = True
    place = FOLDER
    classes = tuple(KNOWN)
    Options = GgufOptions

    def accepts(self, options: GgufOptions, asked: LayerSpec) -> None:
        """Refuse layers beyond the file. Raises as `Exporter`; InputError `gguf-tokenizer`, `float16-overflow`."""
        demand_package()
        asked.demand_text(self.name)
        asked.demand_one_stack(self.name)
        _refuse(asked, options)
        for linear in asked.padded:
            value, rule = "its last group is padded", "a row of a GGUF file has only whole blocks"
            raise unheld(linear, value, rule, f"another format, or {_LEAVE}")
        if asked.source is not None:
            from quantkit.exporters.gguf.tokenizer import demand_held
            from quantkit.model.source import pretrained

            source = asked.source
            config = pretrained.config(source.path, trust=source.trust_remote_code).to_dict()
            config |= {"tie_word_embeddings": False} if source.untied else {}
            own = architecture_of(source.architecture, config, source.ref)
            names_of((name for name, _ in source.skeleton().named_parameters()), own, config, source.ref)
            for name, members in grouped(f"{linear}.weight" for linear in {**asked.shapes, **asked.schemes}).items():
                if len({asked.schemes.get(member.removesuffix(".weight")) for member in members}) > 1:
                    raise unheld(name, "experts of several types", _ONE, _LEAVE)
            if asked.partly:
                value, remedy = "keep may leave an expert in high precision", "--set calibration.experts=force"
                raise unheld("calibration.experts", value, _ONE, remedy)
            demand_held(source)
            _demand_reach(asked, source, options)

    def holds(self, options: GgufOptions, runtime: str, asked: LayerSpec) -> State:
        """Return the support as `Exporter.holds` does."""
        _refuse(asked, options)
        return "native"

    def storage(self, options: GgufOptions, laid: LaidOver) -> Storage:
        """Predict the bytes as `Exporter.storage` does."""
        return laid.file(options.high(laid.architecture.dtype), options.embedding)

    def for_floats(self, options: GgufOptions) -> GgufOptions:
        """Choose the fastest float type of llama.cpp here: bfloat16 if the CPU multiplies it, else float16."""
        fastest: Any = "bfloat16" if _BFLOAT16 & machine.cpu_flags() else "float16"
        return GgufOptions(floats=fastest if options.floats == "auto" else options.floats)

    def export(self, folder: Path, values: Values, options: GgufOptions) -> list[Decision]:
        """Write the file.

        Raises InputError: `layout-unsupported`, `gguf-tokenizer`, `float16-overflow`, `scale-inexact`;
        MissingDependency: gguf; Stopped: `disk-full`.
        """
        demand_package()
        content = _content(values, options)
        folder.mkdir(parents=True, exist_ok=True)
        content.write(folder / MODEL)
        return content.decisions()  # type: ignore[no-any-return]

    def held(self, values: Values, options: GgufOptions) -> Values:
        """Return the values of the file: the embedding is rounded, and floats have the file's type."""
        return _content(values, options).held  # type: ignore[no-any-return]

    def check(
        self, bundle: Path, values: Values | None = None, options: Any = None, blocks: int | None = None, **how: Any
    ) -> list[Check]:
        """Read the file by the `gguf` package and by transformers, and compare it with the expected values.

        Checks are `gguf.tensors`, `gguf.fields`, with llama.cpp `gguf.tokens` and `reload.llama_cpp`, for a whole model
        `reload.gguf`. Without a checkpoint in the bundle, the file is only read and run (`gguf.logits`).
        """
        demand_package()
        from quantkit.exporters.check import decided
        from quantkit.exporters.gguf.check import check, check_alone, read_options

        values = values or decided(bundle)
        if values is None:
            return check_alone(bundle / FOLDER / MODEL)
        options = options or GgufOptions(**read_options(bundle / FOLDER / MODEL))
        return check(bundle / FOLDER / MODEL, _content(values, options), blocks)


def demand_package() -> None:
    """Raise MissingDependency for the `gguf` package."""
    with MissingDependency.unless_found("gguf", extra="compile", purpose="writing a GGUF file"):
        import gguf  # noqa: F401


def _content(values: Values, options: GgufOptions) -> Any:
    from quantkit.exporters.gguf.writer import Content

    return Content(values, options.high(values.source.dtype), options.embedding)


def _refuse(asked: LayerSpec, options: GgufOptions) -> None:
    """Refuse layers without a type in ggml. Raises InputError `layout-unsupported`."""
    rule = "a GGUF file cannot state it: llama.cpp rounds the inputs of its products by itself"
    if asked.cache is not None:
        raise unheld("scheme.kv_cache", f"a KV cache in {asked.cache.format}", rule, _LEAVE)
    for linear, inputs in asked.activations.items():
        raise unheld(linear, f"activations in {inputs.format}", rule, _LEAVE)
    for linear, scheme in asked.schemes.items():
        type_of(scheme, linear)
    if options.embedding is not None:
        type_of(options.embedding, "embedding")


def _demand_reach(asked: LayerSpec, source: Source, options: GgufOptions) -> None:
    """Refuse weights, or scales, beyond the range of float16."""
    from quantkit.formats import load_format
    from quantkit.formats.base.blocks import FLOAT16, BlockFormat

    skeleton: Any = source.skeleton()
    table, high = skeleton.get_input_embeddings().weight, options.high(source.dtype)
    for name, parameter in skeleton.named_parameters():
        kept = name.removesuffix(".weight")
        scheme = asked.schemes.get(kept) or (options.embedding if parameter is table else None)
        form = None if scheme is None else load_format(scheme.format)
        floats = FLOAT16 if parameter.dim() > 1 and high == "float16" else float("inf")
        most = form.reach if isinstance(form, BlockFormat) else floats
        if (reaches := asked.largest.get(name, 0.0)) > most:
            rule = f"{scheme.format if scheme else high} ends at {most:.0f} in a GGUF file"
            keep = f"--set 'keep=[{kept}]' " if kept in asked.schemes else ""
            raise overflow(name, reaches, rule, keep)


EXPORT = Gguf()
