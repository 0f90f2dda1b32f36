"""Which class a config means, and what kind of model that is: decoder, encoder or network.

The class is the first of `architectures`; where a config does not say, transformers' own table from `model_type` does.
The kind follows from what the class takes (`input_modalities`, as far as its forward has arguments for it) and gives (a
language-model head or not).
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from typing import TYPE_CHECKING, Any

from quantkit.errors import InputError
from quantkit.kinds import Kind

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# arguments of a forward: text, what a decoder is given beside its encoder, and words in the names of all else
_IDS, _DECODER_IDS = "input_ids", "decoder_input_ids"
_DECODERS = ("ForCausalLM", "LMHeadModel")
_NO_TEXT = ("pixel", "image", "video", "audio", "input_features", "input_values", "bbox", "speech", "spectrogram")

# what becomes of a part: a module goes in through an ONNX graph
_BY_PYTHON = "in Python: quantkit.compile({}, 'int8-dynamic', example_inputs=inputs, calibration='./inputs.npz')"


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
            remedy=_BY_PYTHON.format("part"),
        )
    known = [*auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values(), *auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES.values()]
    return _unknown(name, name, {name: None for name in known if isinstance(name, str)}, where)


def kind_of(model_class: type[PreTrainedModel], config: dict[str, Any], where: str) -> Kind:
    """The kind of a model.

    Raises:
        InputError: `architecture-unsupported`: encoder-decoders, models of several modalities, of sound.
    """
    name = model_class.__name__
    takes = _takes(model_class)
    both = config.get("is_encoder_decoder", getattr(model_class.config_class, "is_encoder_decoder", False))
    both = both and _DECODER_IDS in inspect.signature(model_class.forward).parameters
    if takes == {"image"}:
        return "network"
    if name.endswith(_DECODERS) and not {"vision_config", "audio_config"} & set(config):
        return "decoder"  # Gemma3ForCausalLM inherits a claim to images; what it has no tower for, it does not take
    if takes == {"text"} and not both:
        return "encoder"
    raise InputError(
        "architecture-unsupported",
        where=where,
        value=f"{name} takes {' and '.join(sorted(takes))}{' through an encoder and a decoder' if both else ''}",
        rule="a decoder, an encoder or an image model",
        remedy=_part(config, takes, both),
    )


def _part(config: dict[str, Any], takes: set[str], both: bool) -> str:
    """How one part of a model is compiled by itself."""
    from transformers.models.auto import modeling_auto as auto

    encoder = auto.MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES.get(str(config.get("model_type")))
    if takes == {"text"} and isinstance(encoder, str):
        saved = f"transformers.{encoder}.from_pretrained(folder).save_pretrained('./encoder')"
        return f"{saved} writes its encoder; quantkit compile ./encoder --recipe int8-encoder"
    return _BY_PYTHON.format("model.get_encoder()" if both else "part")


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


def _takes(model_class: type[PreTrainedModel]) -> set[str]:
    """What goes into a class. The text part of a model of several modalities inherits a claim to all of them."""
    claimed = model_class.input_modalities
    claimed = {claimed} if isinstance(claimed, str) else set(claimed)
    given = inspect.signature(model_class.forward).parameters
    if _IDS in given and not any(word in name for name in given for word in _NO_TEXT):
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
