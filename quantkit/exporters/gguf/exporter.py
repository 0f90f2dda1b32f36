"""One GGUF file of a decoder, which llama.cpp and all that is built on it load.

`gguf/model.gguf` holds the weights in ggml's types, and tokenizer, chat template and all that llama.cpp has to know as
llama.cpp's own converter writes it (`architecture.py`, `tokenizer.py`). Which type a linear, the head or the embedding
gets is the recipe's to say; nothing is decided here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from quantkit import machine
from quantkit.bundle import Check, Decision
from quantkit.content import Closed
from quantkit.errors import InputError, MissingDependency
from quantkit.exporters import Exporter, LayerSpec
from quantkit.exporters.gguf.architecture import KNOWN, architecture_of, names_of
from quantkit.scheme import WeightScheme

if TYPE_CHECKING:
    from quantkit.exporters.values import Values
    from quantkit.model.sizes.storage import LaidOver, Storage
    from quantkit.scheme import ActivationScheme, CacheScheme
    from quantkit.target import State

FOLDER, MODEL = "gguf", "model.gguf"
# what processors with products in bfloat16 say, x86's and Arm's
_BFLOAT16 = {"avx512_bf16", "bf16"}


class GgufOptions(Closed):
    """Settings of `export: - gguf: {…}`.

    Args:
        floats: how weights without codes are stored; vectors and norms are float32 in any case. `auto` is bfloat16 of a
            source in bfloat16, else float16.
        embedding: the scheme of token embeddings, as a recipe writes one: `{format: q6_k}`; None: as floats. A head
            that is tied to them gives them its codes.
    """

    floats: Literal["auto", "float16", "bfloat16", "float32"] = "auto"
    embedding: WeightScheme | None = None

    def high(self, dtype: str) -> str:
        """The float format of a source of a dtype."""
        return self.floats if self.floats != "auto" else "bfloat16" if dtype == "bfloat16" else "float16"


class Gguf(Exporter):
    """See the module."""

    name = "gguf"
    runtimes = ("llama_cpp",)
    stores = "file"
    adds = True
    place = FOLDER
    classes = tuple(KNOWN)
    Options = GgufOptions

    def accepts(self, options: GgufOptions, asked: LayerSpec) -> None:
        """Refuse, before any work, what the file cannot hold.

        Raises:
            InputError: `layout-unsupported`, naming the first layer; `gguf-tokenizer`.
            MissingDependency: gguf.
        """
        demand_package()
        _refuse(asked.schemes, asked.activations, asked.cache, options.embedding)
        for linear in asked.padded:
            raise InputError(
                "layout-unsupported",
                where=linear,
                value="its last group is filled up",
                rule="a row of a GGUF file is whole blocks",
                remedy="another format, or leave `gguf` out of `export`",
            )
        if asked.source is not None:
            from quantkit.exporters.gguf.tokenizer import demand_held
            from quantkit.model.source import pretrained

            source = asked.source
            config = pretrained.config(source.path, trust=source.trust_remote_code).to_dict()
            config |= {"tie_word_embeddings": False} if source.untied else {}
            found = architecture_of(source.architecture, config, source.ref)
            names_of((name for name, _ in source.skeleton().named_parameters()), found, config, source.ref)
            demand_held(source)
            _demand_reach(asked, options.high(source.dtype), options.embedding)

    def holds(self, options: GgufOptions, runtime: str, asked: LayerSpec) -> State:
        """See `Exporter`."""
        _refuse(asked.schemes, asked.activations, asked.cache, options.embedding)
        return "native"

    def storage(self, options: GgufOptions, laid: LaidOver) -> Storage:
        """See `Exporter`."""
        return laid.file(options.high(laid.architecture.dtype), options.embedding)

    def for_floats(self, options: GgufOptions) -> GgufOptions:
        """The floats that llama.cpp multiplies fastest in here: bfloat16 where the processor does, else float16."""
        fastest: Any = "bfloat16" if _BFLOAT16 & machine.cpu_flags() else "float16"
        return GgufOptions(floats=fastest if options.floats == "auto" else options.floats)

    def export(self, folder: Path, values: Values, options: GgufOptions) -> list[Decision]:
        """Write the file.

        Raises:
            InputError: `layout-unsupported`, `gguf-tokenizer`, `float16-overflow`, `scale-inexact`.
            MissingDependency: gguf.
            Stopped: `disk-full`.
        """
        demand_package()
        content = _content(values, options)
        folder.mkdir(parents=True, exist_ok=True)
        content.write(folder / MODEL)
        taken: list[Decision] = content.decisions()
        return taken

    def held(self, values: Values, options: GgufOptions) -> Values:
        """See `Exporter`: the table is rounded, and floats are the file's."""
        found: Values = _content(values, options).held
        return found

    def check(
        self,
        bundle: Path,
        values: Values | None = None,
        options: GgufOptions | None = None,
        *,
        inputs: Mapping[str, Any] | None = None,
        blocks: int | None = None,
    ) -> list[Check]:
        """Read the file by the `gguf` package and by transformers, and hold it against what was decided on.

        Returns:
            checks `gguf.tensors` (every tensor); where llama.cpp is installed `gguf.tokens` (a few texts) and
            `reload.llama_cpp` (its logits); where as many blocks fit as the model has, `reload.gguf` (logits of
            transformers' own reading). Of a file with no checkpoint beside it: that it is read and run (`gguf.logits`).
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
    """Raises MissingDependency for the `gguf` package."""
    with MissingDependency.unless_found("gguf", extra="compile", purpose="writing a GGUF file"):
        import gguf  # noqa: F401


def _content(values: Values, options: GgufOptions) -> Any:
    from quantkit.exporters.gguf.writer import Content

    return Content(values, options.high(values.source.dtype), options.embedding)


def _refuse(
    weights: Mapping[str, WeightScheme],
    activations: Mapping[str, ActivationScheme],
    cache: CacheScheme | None,
    embedding: WeightScheme | None,
) -> None:
    """Refuse what no type of ggml holds. Raises InputError `layout-unsupported`."""
    from quantkit.exporters.gguf.architecture import type_of

    for place, value in [("scheme.kv_cache", cache), *activations.items()]:
        if value is not None:
            raise InputError(
                "layout-unsupported",
                where=place,
                value=f"{'a KV cache' if place == 'scheme.kv_cache' else 'activations'} in {value.format}",
                rule="a GGUF file says nothing of it: llama.cpp rounds inputs of its products by itself",
                remedy="leave `gguf` out of `export`",
            )
    for linear, scheme in weights.items():
        type_of(scheme, linear)
    if embedding is not None:
        type_of(embedding, "embedding")


def _demand_reach(asked: LayerSpec, high: str, embedding: WeightScheme | None) -> None:
    """Refuse weights beyond what float16 holds of their codes, or of themselves. Raises InputError `float16-overflow`.

    Args:
        high: how what has no codes is stored.
        embedding: the scheme of token embeddings.
    """
    from quantkit.formats import load_format
    from quantkit.formats.base.blocks import FLOAT16, BlockFormat

    assert asked.source is not None
    skeleton: Any = asked.source.skeleton()
    table = skeleton.get_input_embeddings().weight
    for name, parameter in skeleton.named_parameters():
        scheme = asked.schemes.get(name.removesuffix(".weight")) or (embedding if parameter is table else None)
        form = None if scheme is None else load_format(scheme.format)
        floats = FLOAT16 if parameter.dim() > 1 and high == "float16" else float("inf")
        most = form.reach if isinstance(form, BlockFormat) else floats
        if (reaches := asked.largest.get(name, 0.0)) > most:
            kept = name.removesuffix(".weight")
            raise InputError(
                "float16-overflow",
                where=name,
                value=f"up to {reaches:.3g}",
                rule=f"{scheme.format if scheme else high} ends at {most:.0f} in a GGUF file",
                remedy=(f"--set 'keep=[{kept}]' " if kept in asked.schemes else "")
                + "--set 'export=[{gguf: {floats: bfloat16}}]'",
            )


EXPORT = Gguf()
