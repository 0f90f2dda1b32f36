"""Class and kind of a model (decoder, encoder or network) from its config, and the length of its sequences.

The class is the first of `architectures`, or transformers' default for the `model_type`. The kind follows from the
class's inputs (`input_modalities`, if its forward has arguments for them) and outputs (a language-model head or not).
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import re
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from quantkit.errors import InputError
from quantkit.kinds import Kind
from quantkit.lazy import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# the package index's is built for CUDA, and does not load beside a torch for processors alone
TORCHVISION = "pip install torchvision --index-url https://download.pytorch.org/whl/cpu"
# arguments of a forward: text, text for a decoder beside an encoder; words in the names of other inputs
_IDS, _DECODER_IDS = "input_ids", "decoder_input_ids"
# arguments of a forward for features of a recording, or its samples
_SOUND = ("input_features", "input_values")
_DECODERS = ("ForCausalLM", "LMHeadModel")
# endings of vision-language classes, and what they may read
_SEEING, _SEEN = ("ForConditionalGeneration", "ForImageTextToText"), {"text", "image", "video"}
_NO_TEXT = ("pixel", "image", "video", "audio", "input_features", "input_values", "bbox", "speech", "spectrogram")
_POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx", "max_target_positions", "seq_length")
_KINDS = "a decoder, an encoder or an image model"
# classes of heads that draft tokens, as SGLang and vLLM name them; Eagle 2.5 is a vision-language model
_DRAFTS = re.compile(r"(?!.*ForConditionalGeneration$).*(Eagle|Medusa|NextN|MTP|DFlash|Speculator)", re.IGNORECASE)


def class_name(config: dict[str, Any], where: str, *, embeds: bool = False) -> str:
    """Return the class of a config.json.

    `embeds` means that the model's outputs are pooled into vectors: it then has no language-model head, whatever class
    it was
    made from (Qwen3-Embedding: `Qwen3ForCausalLM`). Raises InputError (`config-invalid` without usable `architectures`
    or
    `model_type`; `architecture-unknown`).
    """
    from transformers.models.auto import modeling_auto as auto

    stated, model_type = config.get("architectures"), config.get("model_type")
    if stated is not None and not (isinstance(stated, list) and all(isinstance(name, str) for name in stated)):
        raise InputError("config-invalid", where, f"architectures {stated!r:.80}", "a list of class names")
    if stated:
        name, base = str(stated[0]), auto.MODEL_MAPPING_NAMES.get(model_type)
        return base if embeds and name.endswith(_DECODERS) and isinstance(base, str) else name
    if not isinstance(model_type, str):
        rule, remedy = "one of them names the model", 'add "architectures": ["..."] as in the original config'
        raise InputError("config-invalid", where, "neither architectures nor model_type", rule, remedy)
    tables = [auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES]
    if model_type not in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES:  # BERT has a causal class too, but is an encoder
        tables.append(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    for table in [*tables, auto.MODEL_MAPPING_NAMES]:
        if entry := table.get(model_type):
            return str(entry if isinstance(entry, str) else entry[0])
    raise _unknown(f"model_type {model_type!r}", model_type, auto.MODEL_MAPPING_NAMES, where)


def native_class(name: str) -> type[PreTrainedModel] | None:
    """Return transformers' own class of that name, or None. Raises as `demand_torchvision`."""
    import transformers

    try:
        member = getattr(transformers, name, None) if name.isidentifier() else None
    except ModuleNotFoundError:
        demand_torchvision("architecture-unsupported")
        raise
    return member if isinstance(member, type) and issubclass(member, transformers.PreTrainedModel) else None


def demand_torchvision(code: str) -> None:
    """Refuse a torchvision for another torch: classes and processors import it. Raises InputError."""
    if importlib.util.find_spec("torchvision") is not None:
        try:
            importlib.import_module("torchvision")
        except Exception as unfit:
            reason, rule = " ".join(str(unfit).split())[:200], f"torchvision is built for torch {torch.__version__}"
            raise InputError(
                code, "torchvision", reason, rule, f"pip uninstall torchvision, then {TORCHVISION}"
            ) from None


def unknown_architecture(name: str, where: str, model_type: Any = None) -> InputError:
    """Make the error for a class that transformers does not offer: an internal part, or unknown."""
    from transformers.models.auto import modeling_auto as auto

    if _is_part(name, model_type):
        value = f"{name} is a part of transformers' models, not a model of its own"
        return InputError("architecture-unsupported", where, value, _KINDS, by_python("part"))
    demand_no_head(name, where)
    known = [*auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values(), *auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES.values()]
    return _unknown(name, name, {name: None for name in known if isinstance(name, str)}, where)


def demand_no_head(name: str, where: str) -> None:
    """Refuse a class of heads that draft tokens. Raises InputError `architecture-unsupported`."""
    if _DRAFTS.match(name):
        rule = "a head that drafts tokens reads the hidden states of its target, and is no model of its own"
        remedy = "compile the target, and serve the head beside it as it is (in vLLM: speculative_config)"
        raise InputError("architecture-unsupported", where, f"{name} is a draft head", rule, remedy)


def kind_of(model_class: type[PreTrainedModel], config: dict[str, Any], where: str) -> Kind:
    """Return a model's kind. Raises `architecture-unsupported` for several modalities, sound, and encoder-decoders that
    generate no text.
    """
    from transformers.models.auto import modeling_auto as auto

    claimed = model_class.input_modalities
    arguments, both, writes = inspect.signature(model_class.forward).parameters, has_both(model_class, config), False
    if both:
        writes = model_class.can_generate()
    encoder = auto.MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES.get(str(config.get("model_type")))
    into = takes({claimed} if isinstance(claimed, str) else set(claimed), arguments)
    return judge(model_class.__name__, into, both, config, where, encoder if isinstance(encoder, str) else None, writes)


def has_both(model_class: type[PreTrainedModel], config: Mapping[str, Any]) -> bool:
    """Tell whether a class has an encoder and a decoder."""
    both = config.get("is_encoder_decoder", getattr(model_class.config_class, "is_encoder_decoder", False))
    return bool(both) and _DECODER_IDS in inspect.signature(model_class.forward).parameters


def is_pair(model: torch.nn.Module) -> bool:
    """Tell whether a model has an encoder and a decoder with text of its own."""
    both = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    return bool(both) and _DECODER_IDS in inspect.signature(model.forward).parameters


def sound_of(arguments: Collection[str]) -> str | None:
    """Return the argument for sound of a forward that takes no ids beside it; None for another model."""
    return None if _IDS in arguments else next((name for name in _SOUND if name in arguments), None)


def hears(model: torch.nn.Module) -> bool:
    """Tell whether a model has an encoder of speech and a decoder that writes what it hears."""
    return is_pair(model) and sound_of(inspect.signature(model.forward).parameters) is not None


def judge(
    name: str,
    into: Collection[str],
    both: bool,
    config: Mapping[str, Any],
    where: str,
    encoder: str | None,
    writes: bool = False,
) -> Kind:
    """Return the kind of a class. Raises InputError (`architecture-unsupported`).

    Args:
        into: its inputs: text, image, audio, ...
        both: True if text goes through an encoder and a decoder.
        encoder: class of its encoder alone, if transformers has one.
        writes: True if it generates text.
    """
    if set(into) == {"image"}:
        return "network"
    if name.endswith(_DECODERS) and not {"vision_config", "audio_config"} & set(config):
        return "decoder"  # Gemma3ForCausalLM inherits images as an input, but has no vision tower
    if set(into) == {"text"} and (writes or not both):
        return "decoder" if both else "encoder"
    if set(into) == {"audio"} and both and writes:
        return "decoder"
    if {"text", "image"} <= set(into) <= _SEEN and not both and reads_images(name, config):
        return "decoder"
    value = f"{name} takes {' and '.join(sorted(into))}{' through an encoder and a decoder' if both else ''}"
    remedy = by_python("model.get_encoder()" if both else "part")
    if encoder is not None and set(into) == {"text"}:
        parts = f"transformers.{encoder}, transformers.AutoTokenizer"
        saved = f"in Python: for part in ({parts}): part.from_pretrained(folder).save_pretrained('./encoder')"
        remedy = f"{saved}; then quantkit compile ./encoder --recipe int8-weights"
    raise InputError("architecture-unsupported", where, value, _KINDS, remedy)


def reads_images(name: str, config: Mapping[str, Any]) -> bool:
    """Tell whether a decoder's class has a tower of images too: a vision-language model."""
    return name.endswith(_SEEING) and "vision_config" in config


def model_graph(name: str, where: str) -> InputError:
    """Make the error for an image model of transformers in a folder."""
    value, rule = f"{name}, an image model of transformers", "image models are compiled as float ONNX graphs"
    return InputError("model-graph", where, value, rule, by_python("model"))


def by_python(part: str) -> str:
    """Return the Python call for compiling a module through an ONNX graph."""
    return f"in Python: quantkit.compile({part}, 'int8-dynamic', example_inputs=inputs, calibration='./inputs.npz')"


def takes(claimed: set[str], arguments: Collection[str]) -> set[str]:
    """Return the inputs of a class, from its declaration and its forward's arguments.

    The text part of a model of several modalities inherits the declaration of all of them. A decoder beside an
    encoder of speech reads its own text alone.
    """
    if _DECODER_IDS in arguments and sound_of(arguments):
        return {"audio"}
    text_alone = _IDS in arguments and not any(word in name for name in arguments for word in _NO_TEXT)
    return {"text"} if text_alone else claimed


def positions(config: Mapping[str, Any]) -> int | None:
    """Return the longest sequence in tokens; None if the config.json does not say.

    RoBERTa and relatives count positions from behind the padding's index, so that a table of 514 rows with padding 1
    has 512
    positions. The table is read from a model of one block without weights; for a class outside of transformers, the
    config's
    number is used.
    """
    text = config.get("text_config")
    inner: Mapping[str, Any] = {**config, **text} if isinstance(text, Mapping) else config
    model_class = native_class(class_name(dict(config), "config.json")) if config.get("architectures") else None
    stated = next((inner[name] for name in _POSITIONS if type(inner.get(name)) is int and inner[name] > 0), None)
    if model_class is None or (stated is not None and inner.get("pad_token_id") is None and text is None):
        return stated
    try:
        loaded = model_class.config_class.from_dict({k: v for k, v in config.items() if k != "quantization_config"})
        # XLNet has -1, for no limit
        sizes = (getattr(loaded.get_text_config(), name, None) for name in _POSITIONS)
        stated = next((size for size in sizes if type(size) is int and size > 0), stated)
        cut_config(loaded, 1)
        with torch.device("meta"):
            modules = dict(model_class._from_config(loaded).named_modules())
    except Exception:  # opening the model reports an error of its config
        return stated
    behind = [
        module.padding_idx + 1
        for name, module in modules.items()
        if "position" in name.rpartition(".")[2]
        and isinstance(getattr(module, "padding_idx", None), int)
        and isinstance(getattr(module, "weight", None), torch.Tensor)
        and module.weight.shape[0] == stated
    ]
    return stated - max(behind) if stated is not None and behind else stated


def cut_config(config: Any, blocks: int) -> None:
    """Limit a config to the first blocks, in place."""
    inner = config.get_text_config()
    count = inner.num_hidden_layers
    for key, value in list(vars(inner).items()):
        # lists with one entry per layer, such as layer_types
        if isinstance(value, list) and len(value) == count:
            setattr(inner, key, value[:blocks])
    inner.num_hidden_layers = min(blocks, count)


def _is_part(name: str, model_type: Any) -> bool:
    """Tell whether transformers has such a class only as an internal part."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES, model_type_to_module_name

    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING_NAMES or not name.isidentifier():
        return False
    folder = model_type_to_module_name(model_type)
    try:
        return hasattr(importlib.import_module(f"transformers.models.{folder}.modeling_{folder}"), name)
    except ImportError:
        return False


def _unknown(value: str, word: str, known: dict[str, Any], where: str) -> InputError:
    import transformers

    close = difflib.get_close_matches(word, known, n=1, cutoff=0.7)
    rule = f"transformers {transformers.__version__} does not know it"
    remedy = (f"did you mean {close[0]}? " if close else "") + "a newer transformers may know it"
    return InputError("architecture-unknown", where, value, rule, remedy)
