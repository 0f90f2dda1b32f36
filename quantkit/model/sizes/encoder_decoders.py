"""Sizes of models with an encoder and a decoder: T5, BART, Marian, Whisper and their relatives.

An encoder block is attention over the whole source and a perceptron. A decoder block has attention to its own earlier
tokens, attention to what the encoder puts out, and a perceptron. Keys and values of both are cached, so a sequence of P
tokens of source and O tokens of answer keeps P + O of them in each decoder block:

    cross-attention   P keys and values, made once, with the prompt; of Whisper 1,500, however short the recording is
    self-attention    O keys and values, one more at each step

A step of decoding reads neither the encoder's linears nor those of the keys and values over the source (`Matrix.when`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from quantkit.model.sizes.architecture import MOST_LAYERS, Architecture, Attention, BlockShapes, Figures, Matrix, When


@dataclass(frozen=True)
class Relative:
    """Parameters of a relative of BART beside its blocks.

    Args:
        class_name: class with the head.
        behind: rows of its tables of positions before the first position.
        first_norm: True if each stack begins with a norm.
        last_norm: True if each stack ends with a norm.
        hears: True if the source is a recording: two convolutions over features, and tables of positions that differ.
        head: name of the linear for logits.
    """

    class_name: str
    behind: int = 0
    first_norm: bool = False
    last_norm: bool = False
    hears: bool = False
    head: str = "lm_head"


BART = {
    "bart": Relative("BartForConditionalGeneration", behind=2, first_norm=True),
    "mbart": Relative("MBartForConditionalGeneration", behind=2, first_norm=True, last_norm=True),
    "marian": Relative("MarianMTModel"),
    "pegasus": Relative("PegasusForConditionalGeneration", last_norm=True),
    "whisper": Relative("WhisperForConditionalGeneration", last_norm=True, hears=True, head="proj_out"),
}
T5 = {"t5": "T5ForConditionalGeneration", "mt5": "MT5ForConditionalGeneration"}
PAIRS = {**T5, **{name: relative.class_name for name, relative in BART.items()}}
# part of a block, its leaves: query, key, value, output
_BART_LEAVES = ("q_proj", "k_proj", "v_proj", "out_proj")


def encoder_decoder(figures: Figures, name: str) -> Architecture:
    """Build a model of `PAIRS` from its config. Raises InputError (`config-invalid`)."""
    return (_t5 if figures.model_type in T5 else _bart)(figures, name)


def _bart(figures: Figures, name: str) -> Architecture:
    hidden, vocabulary = figures.size("d_model"), figures.size("vocab_size")
    own = BART[figures.model_type]
    positions = figures.size("max_target_positions" if own.hears else "max_position_embeddings")
    source = figures.size("max_source_positions") if own.hears else positions
    # convolutions of 3 frames: the bins, then the width; else a bias of the logits
    others = 3 * hidden * (figures.size("num_mel_bins") + hidden) + 2 * hidden if own.hears else vocabulary
    layers: list[BlockShapes] = []
    for part in ("encoder", "decoder"):
        heads, wide = figures.size(f"{part}_attention_heads"), figures.size(f"{part}_ffn_dim")
        if hidden % heads:
            raise figures.wrong(f"{part}_attention_heads", f"{heads}, d_model {hidden}", "heads divide d_model")
        attention = Attention("full", heads, heads, hidden // heads, hidden // heads, causal=part == "decoder")
        norms = 3 if part == "decoder" else 2
        for index in range(figures.size(f"{part}_layers", most=MOST_LAYERS)):
            path = f"model.{part}.layers.{index}"
            matrices = list(_attentions(path, part, ("self_attn", "encoder_attn"), _BART_LEAVES, hidden, hidden, True))
            if own.hears:  # its keys have no bias
                matrices = [replace(one, bias=not one.name.endswith("k_proj")) for one in matrices]
            when: When = "prompt" if part == "encoder" else "step"
            matrices.append(Matrix(f"{path}.fc1", wide, hidden, bias=True, when=when))
            matrices.append(Matrix(f"{path}.fc2", hidden, wide, bias=True, when=when))
            layers.append(BlockShapes(path, matrices, attention, others=norms * 2 * hidden))
    read = f"{source:,} positions of every recording" if own.hears else f"up to {source:,} tokens of source"
    figures.assume(f"{read}, and {f'up to {positions:,} tokens ' if own.hears else ''}of answer")
    return Architecture(
        name=name,
        kind="decoder",
        model_type=figures.model_type,
        dtype=figures.dtype("float32"),
        hidden=hidden,
        layers=layers,
        embeddings=(vocabulary + positions + source + 2 * own.behind) * hidden,
        others=4 * hidden * (own.first_norm + own.last_norm) + others,
        head=Matrix(own.head, vocabulary, hidden),
        tied=figures.flag("tie_word_embeddings", True),
        vocabulary=vocabulary,
        max_context=source + positions,
        assumed=tuple(figures.assumed),
        class_name=own.class_name,
        source_positions=source if own.hears else None,
    )


def _t5(figures: Figures, name: str) -> Architecture:
    hidden, vocabulary = figures.size("d_model"), figures.size("vocab_size")
    heads, size, wide = figures.size("num_heads"), figures.size("d_kv"), figures.size("d_ff")
    count = figures.size("num_layers", most=MOST_LAYERS)
    counts = {"encoder": count, "decoder": figures.size("num_decoder_layers", default=count, most=MOST_LAYERS)}
    gated = str(figures.config.get("feed_forward_proj", "relu")).startswith("gated")
    buckets = figures.size("relative_attention_num_buckets", default=32)
    layers: list[BlockShapes] = []
    for part, blocks in counts.items():
        attention = Attention("full", heads, heads, size, size, causal=part == "decoder")
        last = 2 if part == "decoder" else 1
        for index in range(blocks):
            path = f"{part}.block.{index}.layer"
            places = ("0.SelfAttention", "1.EncDecAttention")
            matrices = list(_attentions(path, part, places, ("q", "k", "v", "o"), hidden, heads * size, False))
            when: When = "prompt" if part == "encoder" else "step"
            place, inward = f"{path}.{last}.DenseReluDense", ("wi_0", "wi_1") if gated else ("wi",)
            matrices += [Matrix(f"{place}.{leaf}", wide, hidden, when=when) for leaf in inward]
            matrices.append(Matrix(f"{place}.wo", hidden, wide, when=when))
            bias = buckets * heads if index == 0 else 0  # the first block's table of relative positions
            layers.append(BlockShapes(path.removesuffix(".layer"), matrices, attention, (last + 1) * hidden + bias))
    return Architecture(
        name=name,
        kind="decoder",
        model_type=figures.model_type,
        dtype=figures.dtype("float32"),
        hidden=hidden,
        layers=layers,
        embeddings=vocabulary * hidden,
        others=2 * hidden,
        head=Matrix("lm_head", vocabulary, hidden),
        tied=figures.flag("tie_word_embeddings", figures.model_type == "t5"),
        vocabulary=vocabulary,
        assumed=tuple(figures.assumed),
        class_name=T5[figures.model_type],
    )


def _attentions(
    path: str, part: str, places: tuple[str, str], leaves: tuple[str, ...], hidden: int, inner: int, bias: bool
) -> Iterator[Matrix]:
    """Yield the linears of self-attention and, in a decoder, of cross-attention, whose keys and values are the
    source's.
    """
    _, key, value, output = leaves
    for cross, place in enumerate(places[: 2 if part == "decoder" else 1]):
        for leaf in leaves:
            n, k = (hidden, inner) if leaf == output else (inner, hidden)
            of_source = part == "encoder" or (cross and leaf in (key, value))
            yield Matrix(f"{path}.{place}.{leaf}", n, k, bias=bias, when="prompt" if of_source else "step")
