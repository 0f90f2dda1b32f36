"""Sizes of encoders of text and of images by family.

An encoder block (BERT and relatives, vision transformers) is attention over all tokens and a multilayer perceptron of
two linears, each with a bias and a layer norm (arXiv:1810.04805; for images, cut into patches, arXiv:2010.11929).
Parameters before and after the blocks follow from the config's class; tests compare them with transformers' own models.
"""

from __future__ import annotations

from collections.abc import Sequence

from quantkit.model.sizes.architecture import MOST_LAYERS, Architecture, Attention, BlockShapes, Figures, Matrix

TEXT = {"bert": "Bert", "roberta": "Roberta", "xlm-roberta": "XLMRoberta", "electra": "Electra"}
VISION = {"vit": "ViT", "deit": "DeiT"}
# parameters behind the blocks: elements, the matrix of the logits, True if it is the table of tokens
_Ends = tuple[int, Matrix | None, bool]


def text_encoder(figures: Figures, class_name: str, name: str) -> Architecture:
    """Build a BERT, RoBERTa or ELECTRA; class "" is the model without a head. Raises InputError (`config-invalid`)."""
    stem = TEXT[figures.model_type]
    task = class_name.removeprefix(stem)
    hidden, vocabulary = figures.size("hidden_size"), figures.size("vocab_size")
    positions, types = figures.size("max_position_embeddings"), figures.size("type_vocab_size", default=2)
    wide = figures.size("embedding_size", default=hidden) if stem == "Electra" else hidden
    ends, head, tied = _ends(figures, stem, task, hidden, wide, vocabulary)
    base = {"Bert": "bert.", "Electra": "electra."}.get(stem, "roberta.") if task.startswith("For") else ""
    entrance = 2 * wide + (hidden * (wide + 1) if wide != hidden else 0)  # a norm, and a linear to the blocks' width
    roberta = stem in ("Roberta", "XLMRoberta")  # its positions begin behind the padding's
    padding = figures.size("pad_token_id", default=1, least=0) + 1 if roberta else 0
    return Architecture(
        name=name,
        kind="encoder",
        model_type=figures.model_type,
        dtype=figures.dtype("float32"),
        hidden=hidden,
        layers=_blocks(figures, hidden, f"{base}encoder.layer", _BERT),
        embeddings=(vocabulary + positions + types) * wide,
        others=entrance + ends,
        head=head,
        tied=tied,
        vocabulary=vocabulary,
        max_context=positions - padding,
        assumed=tuple(figures.assumed),
        ends=ends,
    )


def vision_encoder(figures: Figures, class_name: str, name: str) -> Architecture:
    """Build a ViT or DeiT: `max_context` is its fixed number of patches and special tokens. Raises `config-invalid`."""
    stem = VISION[figures.model_type]
    task = class_name.removeprefix(stem)
    hidden, channels = figures.size("hidden_size"), figures.size("num_channels", default=3)
    image, patch = figures.size("image_size", default=224), figures.size("patch_size", default=16)
    if patch > image:
        raise figures.wrong("patch_size", f"{patch}, image_size {image}", "an image holds at least one patch")
    special = 2 if stem == "DeiT" else 1  # the class token; DeiT has one for distillation too
    tokens = (image // patch) ** 2 + special
    embeddings = hidden * (channels * patch**2 + 1) + (special + tokens) * hidden
    others, head, labels = 2 * hidden, None, None
    if task in ("ForImageClassification", "ForImageClassificationWithTeacher"):
        labels = _labels(figures)
        teacher = task.endswith("Teacher")
        head = Matrix("cls_classifier" if teacher else "classifier", labels, hidden, bias=True)
        others += head.parameters if teacher else 0
    else:
        _say_unknown(figures, class_name, stem, task)
        others += hidden * (hidden + 1)  # pooler
    base = f"{figures.model_type}." if head else ""
    return Architecture(
        name=name,
        kind="network",
        model_type=figures.model_type,
        dtype=figures.dtype("float32"),
        hidden=hidden,
        layers=_blocks(figures, hidden, f"{base}layers", _VIT, qkv_bias=figures.flag("qkv_bias", True)),
        embeddings=embeddings,
        others=others,
        head=head,
        vocabulary=labels,
        max_context=tokens,
        assumed=tuple(figures.assumed),
    )


# a block's linears in transformers: those of attention (three of them read its input), then the two of the perceptron
_BERT = (
    *("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense"),
    *("intermediate.dense", "output.dense"),
)
_VIT = (*(f"attention.{leaf}" for leaf in ("q_proj", "k_proj", "v_proj", "o_proj")), "mlp.fc1", "mlp.fc2")


def _blocks(
    figures: Figures, hidden: int, prefix: str, names: Sequence[str], *, qkv_bias: bool = True
) -> list[BlockShapes]:
    heads, wide = figures.size("num_attention_heads"), figures.size("intermediate_size")
    if hidden % heads:
        raise figures.wrong("num_attention_heads", f"{heads}, hidden_size {hidden}", "heads divide hidden_size")
    attention = Attention("full", heads, heads, hidden // heads, hidden // heads, causal=False)
    sizes = [*[(hidden, hidden)] * 4, (wide, hidden), (hidden, wide)]
    biases = [*[qkv_bias] * 3, True, True, True]
    layers = []
    for index in range(figures.size("num_hidden_layers", most=MOST_LAYERS)):
        path = f"{prefix}.{index}"
        matrices = [
            Matrix(f"{path}.{leaf}", n, k, bias=bias) for leaf, (n, k), bias in zip(names, sizes, biases, strict=True)
        ]
        layers.append(BlockShapes(path, matrices, attention, others=4 * hidden))
    return layers


def _ends(figures: Figures, stem: str, task: str, hidden: int, wide: int, vocabulary: int) -> _Ends:
    """Return the parameters of a class behind its blocks."""
    pooler = hidden * (hidden + 1) if stem != "Electra" else 0
    dense = hidden * (hidden + 1)
    masked = {"Bert": "cls.predictions.decoder", "Electra": "generator_lm_head"}.get(stem, "lm_head.decoder")
    if task == "ForMaskedLM" or (stem == "Bert" and task == "ForPreTraining"):
        # a linear and a norm, then the table of tokens with a bias of its own
        transform = wide * (hidden + 1) + 2 * wide
        tied = figures.flag("tie_word_embeddings", True)
        more = pooler + 2 * (hidden + 1) if task == "ForPreTraining" else 0
        # untied, BERT stores the bias twice: the decoder's own, and the shared one
        bias = vocabulary if tied or stem != "Electra" else 0
        return transform + more + bias, Matrix(masked, vocabulary, wide, bias=True), tied
    if stem == "Electra" and task == "ForPreTraining":
        return dense + hidden + 1, None, False
    if task == "ForSequenceClassification":
        before = pooler if stem == "Bert" else dense
        return before + _labels(figures) * (hidden + 1), None, False
    if task == "ForTokenClassification":
        return _labels(figures) * (hidden + 1), None, False
    if task == "ForQuestionAnswering":
        return 2 * (hidden + 1), None, False
    _say_unknown(figures, stem + task, stem, task)
    return pooler, None, False


def _say_unknown(figures: Figures, class_name: str, stem: str, task: str) -> None:
    if task not in ("", "Model"):
        figures.assume(f"{class_name} counted as {stem}Model: its parameters after the blocks are unknown")


def _labels(figures: Figures) -> int:
    """Return the number of classes from the config."""
    named = figures.config.get("id2label")
    if named is not None and not isinstance(named, dict):
        raise figures.wrong("id2label", f"{named!r:.60}", "an object: number -> name")
    stated = figures.maybe("num_labels")
    if stated is not None and named is not None and stated != len(named):
        raise figures.wrong("num_labels", f"{stated}, and {len(named)} in id2label", "they agree")
    if stated is None and named is None:
        figures.assume("2 classes: the config names none")
    return stated or (len(named) if named else 2)
