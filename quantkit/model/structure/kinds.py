"""Which class a config means, and what kind of model that is: decoder, encoder or network.

The class is the first of `architectures`; where a config does not say, transformers' own table from `model_type` does.
The kind follows from what the class takes (`input_modalities`, as far as its forward has arguments for it) and gives (a
language-model head or not).
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from quantkit.errors import InputError
from quantkit.kinds import Kind

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# arguments of a forward: text, what a decoder is given beside its encoder, and words in the names of all else
_IDS, _DECODER_IDS = "input_ids", "decoder_input_ids"
_DECODERS = ("ForCausalLM", "LMHeadModel")
_NO_TEXT = ("pixel", "image", "video", "audio", "input_features", "input_values", "bbox", "speech", "spectrogram")


def class_name(config: dict[str, Any], where: str, *, embeds: bool = False) -> str:
    """The name of the class that a config.json means.

    Args:
        embeds: whether vectors are pooled from what the model gives: then it has no language-model head, whatever class
            it was made from (Qwen3-Embedding: `Qwen3ForCausalLM`).

    Raises:
        InputError: `config-invalid` (neither `architectures` nor `model_type` of use), `architecture-unknown`.
    """
    from transformers.models.auto import modeling_auto as auto

    stated, model_type = config.get("architectures"), config.get("model_type")
    if stated is not None and not (isinstance(stated, list) and all(isinstance(name, str) for name in stated)):
        raise InputError(
            "config-invalid", where=where, value=f"architectures {stated!r:.80}", rule="a list of class names"
        )
    if stated:
        name, base = str(stated[0]), auto.MODEL_MAPPING_NAMES.get(model_type)
        return base if embeds and name.endswith(_DECODERS) and isinstance(base, str) else name
    if not isinstance(model_type, str):
        raise InputError(
            "config-invalid",
            where=where,
            value="neither architectures nor model_type",
            rule="one of them says what the model is",
            remedy='add "architectures": ["..."] as in the original config',
        )
    tables = [auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES]
    if model_type not in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES:  # BERT has a causal class too, but is an encoder
        tables.append(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    tables.append(auto.MODEL_MAPPING_NAMES)
    for table in tables:
        if found := table.get(model_type):
            return str(found if isinstance(found, str) else found[0])
    raise _unknown(f"model_type {model_type!r}", model_type, auto.MODEL_MAPPING_NAMES, where)


def native_class(name: str) -> type[PreTrainedModel] | None:
    """transformers' own class of that name, or None."""
    import transformers

    found = getattr(transformers, name, None) if name.isidentifier() else None
    if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
        return found
    return None


def unknown_architecture(name: str, where: str, model_type: Any = None) -> InputError:
    """The error for a class that the installed transformers does not offer: a part of its models, or unknown to it."""
    from transformers.models.auto import modeling_auto as auto

    if _is_part(name, model_type):
        return InputError(
            "architecture-unsupported",
            where=where,
            value=f"{name} is a part of transformers' models, and none of its own",
            rule="a decoder, an encoder or an image model",
            remedy=by_python("part"),
        )
    known = [*auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values(), *auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES.values()]
    return _unknown(name, name, {name: None for name in known if isinstance(name, str)}, where)


def kind_of(model_class: type[PreTrainedModel], config: dict[str, Any], where: str) -> Kind:
    """The kind of a model.

    Raises:
        InputError: `architecture-unsupported`: encoder-decoders, models of several modalities, of sound.
    """
    claimed = model_class.input_modalities
    arguments = inspect.signature(model_class.forward).parameters
    both = config.get("is_encoder_decoder", getattr(model_class.config_class, "is_encoder_decoder", False))
    both = bool(both) and _DECODER_IDS in arguments
    from transformers.models.auto import modeling_auto as auto

    encoder = auto.MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES.get(str(config.get("model_type")))
    into = takes({claimed} if isinstance(claimed, str) else set(claimed), arguments)
    return judge(model_class.__name__, into, both, config, where, encoder if isinstance(encoder, str) else None)


def judge(
    name: str, into: Collection[str], both: bool, config: Mapping[str, Any], where: str, encoder: str | None
) -> Kind:
    """The kind of a class, or why it has none.

    Args:
        into: what it takes: text, image, audio, ...
        both: whether text goes through an encoder and a decoder.
        encoder: the class of its encoder alone, if transformers has one.

    Raises:
        InputError: `architecture-unsupported`.
    """
    if set(into) == {"image"}:
        return "network"
    if name.endswith(_DECODERS) and not {"vision_config", "audio_config"} & set(config):
        return "decoder"  # Gemma3ForCausalLM inherits a claim to images; what it has no tower for, it does not take
    if set(into) == {"text"} and not both:
        return "encoder"
    raise InputError(
        "architecture-unsupported",
        where=where,
        value=f"{name} takes {' and '.join(sorted(into))}{' through an encoder and a decoder' if both else ''}",
        rule="a decoder, an encoder or an image model",
        remedy=_part(encoder if set(into) == {"text"} else None, both),
    )


def model_graph(name: str, where: str) -> InputError:
    """The error for an image model of transformers, whose folder is no graph."""
    return InputError(
        "model-graph",
        where=where,
        value=f"{name}, an image model of transformers",
        rule="image models are compiled as float ONNX graphs",
        remedy=by_python("model"),
    )


def by_python(part: str) -> str:
    """Return how a module is compiled: it goes in through an ONNX graph."""
    return f"in Python: quantkit.compile({part}, 'int8-dynamic', example_inputs=inputs, calibration='./inputs.npz')"


def _part(encoder: str | None, both: bool) -> str:
    """Return how one part of a model is compiled by itself."""
    if encoder is not None:
        parts = f"transformers.{encoder}, transformers.AutoTokenizer"
        saved = f"in Python: for part in ({parts}): part.from_pretrained(folder).save_pretrained('./encoder')"
        return f"{saved}; then quantkit compile ./encoder --recipe int8-weights"
    return by_python("model.get_encoder()" if both else "part")


def _is_part(name: str, model_type: Any) -> bool:
    """Whether transformers has such a class, but opens no model with it."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES, model_type_to_module_name

    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING_NAMES or not name.isidentifier():
        return False
    folder = model_type_to_module_name(model_type)
    try:
        module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    except ImportError:
        return False
    return hasattr(module, name)


def takes(claimed: set[str], arguments: Collection[str]) -> set[str]:
    """Return what goes into a class, by what it claims and its forward's arguments.

    The text part of a model of several modalities inherits a claim to all of them.
    """
    if _IDS in arguments and not any(word in name for name in arguments for word in _NO_TEXT):
        return {"text"}
    return claimed


def _unknown(value: str, word: str, known: dict[str, Any], where: str) -> InputError:
    import transformers

    close = difflib.get_close_matches(word, known, n=1, cutoff=0.7)
    return InputError(
        "architecture-unknown",
        where=where,
        value=value,
        rule=f"transformers {transformers.__version__} does not know it",
        remedy=(f"did you mean {close[0]}? " if close else "") + "a newer transformers may know it",
    )
