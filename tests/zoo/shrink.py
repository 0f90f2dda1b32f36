"""A tiny random model of any architecture that transformers knows, and what plain transformers makes of it.

The shrinking is generic: a config class says which sizes it has, and each is set by its name. Lists with an entry a
layer are cut to the fewest layers that show every kind of entry. What a class demands besides stands in `exceptions`,
as data. Weights are random with a spread at which every part of a block changes its output visibly: default
initializations make a block nearly the identity, and errors in it invisible.
"""

import copy
import dataclasses
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import pytorch_utils
from transformers.models.auto import modeling_auto as auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from quantkit.model.streaming.sounds import sounds
from quantkit.model.structure.kinds import hears
from zoo.exceptions import BASES, EXCEPTIONS, HEADS, VARIANTS

VOCABULARY = 160
TOKENS = 32
LAYERS = 4

# field -> value, for fields that are whole numbers; the first pattern that matches the whole name counts
_SIZES: list[tuple[str, int]] = [
    (r"vocab_size|vocab_size_per_layer_input|unpadded_vocab_size|decoder_vocab_size|entity_vocab_size", VOCABULARY),
    (r"hidden_size|d_model|n_embd|model_dim|emb_dim|dim|hidden_dim_size|d_latents|embedding_dim", 64),
    (r"embedding_size|input_embedding_size|output_embedding_size|entity_emb_size|word_embed_proj_dim", 32),
    (r"intermediate_size|ffn_dim|(en|de)coder_ffn_dim|d_ff|dff|dim_ff|n_inner|d_inner|ffn_hidden_size|hidden_dim", 96),
    (r"intermediate_size_mlp|dense_intermediate_size|feed_forward_size|prefix_dense_intermediate_size", 96),
    (r"(shared_)?(moe_|expert_)?(shared_)?(expert_|experts_)?(intermediate|ffn_hidden)_size", 32),
    (r"shared_intermediate_size|moe_latent_size", 32),
    (r"num_hidden_layers|n_layers?|num_layers|(en|de)coder_layers|num_(en|de)coder_layers", LAYERS),
    (r"num_attention_heads|n_heads?|num_heads|(en|de)coder_attention_heads|attention_heads|swa_num_attention_heads", 4),
    (r"num_(en|de)coder_attention_heads|num_(self|cross)_attention_heads|linear_num_heads|index(er)?_n_heads", 4),
    (r"(swa_)?num_key_value_heads|num_kv_heads|num_global_key_value_heads|linear_num_key_heads|indexer_kv_heads", 2),
    (r"linear_num_value_heads", 4),
    (r"(swa_)?head_dim|kv_channels|attention_head_dim|dim_head|d_head|attention_head_size|v_head_dim", 16),
    (r"linear_(key_|value_)?head_dim|index(er)?_head_dim|mamba_(d_head|head_dim)", 16),
    (r"global_head_dim", 32),
    (r"qk_rope_head_dim|qk_nope_head_dim|rotary_dim|d_rel", 8),
    (r"kv_lora_rank|q_lora_rank|o_lora_rank|adapter_rank|laurel_rank|hc_lowrank|gated_norm_rank|embedding_rank", 32),
    (r"hidden_size_per_layer_input|router_hidden_size|pronunciation_embed_dim|shape_embed_dim", 32),
    (r"(moe_)?num_(local_)?experts|n_routed_experts", 8),
    (r"num_experts_per_tok|moe_k|moe_topk|top_k_experts", 2),
    (r"n_group|topk_group", 2),
    (r"(moe_)?num_shared_experts|n_shared_experts", 1),
    (r"first_k_dense_replace|num_dense_layers", 1),
    (r"max_position_embeddings|n_positions|n_ctx|max_seq_len|context_length|original_max_position_embeddings", 128),
    (r"max_(source|target)_positions|entity_max_position_embeddings|max_2d_position_embeddings", 128),
    (r"sliding_window(_size)?|attention_window_size|window_size|local_attention|attention_chunk_size", 8),
    (r"local_attention_window_len|index_topk|keep_window_size", 8),
    (r"mamba_chunk_size|chunk_size|block_size|index_block_size", 8),
    (r"state_size|ssm_state_size|mamba_d_state", 16),
    (r"mamba_n_heads|mamba_num_heads|n_mamba_heads", 8),
    (r"pronunciation_vocab_size|shape_vocab_size", VOCABULARY),
    (r"type_vocab_size|task_type_vocab_size", 2),
    (r"num_(mtp|nextn_predict)_layers", 0),
    (r"image_size", 32),
    (r"patch_size", 8),
]
# fields whose default is none, which then means a size that is too large or hides something
_UNSET = r"num_key_value_heads|num_kv_heads|head_dim|num_experts_per_tok"
_START = 1
_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": _START}


@dataclass(frozen=True)
class Architecture:
    """One class that an auto class makes of a model type; `variant`: under settings of `VARIANTS`."""

    table: str
    model_type: str
    cls: str
    variant: str = ""

    @property
    def name(self) -> str:
        """What stands in a list."""
        return f"{self.cls} ({self.variant})" if self.variant else self.cls


def architectures() -> list[Architecture]:
    """Decoders, masked language models, text encoders, heads of some classes and image models, each class once."""
    found: dict[str, Architecture] = {}
    for table, model_type, name in entries():
        if name not in found and (each := _architecture(table, model_type, name)):
            found[name] = each
    for name, variant in VARIANTS:
        found[f"{name} ({variant})"] = dataclasses.replace(found[name], variant=variant)
    return list(found.values())


def named(name: str) -> Architecture:
    """The architecture of that name; only its own class is imported, where all take ten seconds."""
    cls, _, variant = name.removesuffix(")").partition(" (")
    found = (_architecture(*entry) for entry in entries() if entry[2] == cls)
    return dataclasses.replace(next(each for each in found if each), variant=variant)


def entries() -> Iterator[tuple[str, str, str]]:
    """Auto class, model type and class, of all tables; nothing is imported."""
    tables: list[tuple[str, dict[str, Any]]] = [
        ("AutoModelForCausalLM", auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
        ("AutoModelForMaskedLM", auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES),
        ("AutoModelForTextEncoding", auto.MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES),
        ("AutoModelForSeq2SeqLM", auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES),
        ("AutoModelForSpeechSeq2Seq", auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES),
        ("AutoModel", auto.MODEL_MAPPING_NAMES),
        *HEADS,
    ]
    for table, names in tables:
        for model_type, entry in names.items():
            for name in [entry] if isinstance(entry, str) else entry:
                yield table, model_type, name


def _architecture(table: str, model_type: str, name: str) -> Architecture | None:
    if table == "AutoModel" and not _encodes(model_type, name):
        return None
    own = getattr(getattr(transformers, name, None), "config_class", None)
    return Architecture(table, own.model_type if own else model_type, name)


def _encodes(model_type: str, name: str) -> bool:
    """Whether a class of `AutoModel` encodes token ids alone; what is below a decoder's head is no case of its own."""
    model_class = getattr(transformers, name, None)
    if not (isinstance(model_class, type) and issubclass(model_class, transformers.PreTrainedModel)):
        return False  # a stand-in for what wants another library
    decoders, encoders = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    if model_type in decoders and model_type not in encoders and name not in BASES:
        return False
    takes = model_class.input_modalities
    parameters = inspect.signature(model_class.forward).parameters
    return (
        ({takes} if isinstance(takes, str) else set(takes)) == {"text"}
        and "input_ids" in parameters
        and not {"decoder_input_ids", "pixel_values", "bbox"} & set(parameters)
    )


def shrunk(config_class: Any, model_type: str) -> dict[str, Any]:
    """Settings at which a config class describes a tiny model."""
    settings: dict[str, Any] = {}
    fields = {each.name: each.default for each in dataclasses.fields(config_class)}
    for name, default in fields.items():
        small = next((value for pattern, value in _SIZES if re.fullmatch(pattern, name)), None)
        if small is None:
            continue
        if (isinstance(default, int) and not isinstance(default, bool) and default > 0) or (
            default is None and re.fullmatch(_UNSET, name)
        ):
            settings[name] = small
    if "kv_lora_rank" in fields and "num_key_value_heads" in settings:
        settings["num_key_value_heads"] = settings["num_attention_heads"]  # latent attention has one per head
    for name, default in fields.items():
        if name in _IDS:
            settings[name] = _IDS[name]
        elif name.endswith(("_token_id", "_token_index")) and isinstance(default, int):
            settings[name] = VOCABULARY - 1
    for name, part in (getattr(config_class, "sub_configs_defaults", None) or {}).items():
        part_class = part.config_class if part.model_type is None else CONFIG_MAPPING[part.model_type]
        settings[name] = {**(part.init_kwargs or {}), **shrunk(part_class, part_class.model_type)}
        if part.model_type is not None:
            settings[name]["model_type"] = part.model_type
    for name, value in {**_layers(config_class, fields), **EXCEPTIONS.get(model_type, {})}.items():
        settings[name] = {**settings[name], **value} if isinstance(settings.get(name), dict) else value
    return settings


def _layers(config_class: Any, fields: dict[str, Any]) -> dict[str, Any]:
    """Lists with an entry a layer, cut to few layers of every kind that the default has, in its order."""
    try:
        whole = config_class()
    except (ValueError, StrictDataclassError):  # classes that refuse their own defaults: gemma4_assistant, nougat
        return {}
    count = whole.__dict__.get("num_hidden_layers")
    if not isinstance(count, int) or count < 2:
        return {}
    lists = {
        name: list(value)
        for name in [*fields, "layer_types"]
        if isinstance(value := whole.__dict__.get(name), list | tuple) and len(value) == count
    }
    if not lists:
        return {}
    kinds = [repr([value[index] for value in lists.values()]) for index in range(count)]
    chosen = {kinds.index(kind) for kind in dict.fromkeys(kinds)}
    for index in range(count):
        if len(chosen) < LAYERS:
            chosen.add(index)
    picked = sorted(chosen)[: 2 * LAYERS]
    cut = {name: [value[index] for index in picked] for name, value in lists.items()}
    return {**cut, "num_hidden_layers": len(picked)}


def config_of(architecture: Architecture, **changes: Any) -> Any:
    """The tiny config of a class."""
    config_class = getattr(transformers, architecture.cls).config_class
    settings = shrunk(config_class, config_class.model_type)
    if "is_decoder" in {each.name for each in dataclasses.fields(config_class)}:
        settings["is_decoder"] = architecture.table == "AutoModelForCausalLM"
    special = {**EXCEPTIONS.get(architecture.cls, {}), **VARIANTS.get((architecture.cls, architecture.variant), {})}
    # a copy, because configs write into what they are given
    config = config_class(**copy.deepcopy({**settings, **special, **changes}))
    if getattr(config, "is_encoder_decoder", False):
        config.decoder_start_token_id = _START
    return config


def tiny(
    architecture: Architecture | str,
    folder: Path | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **changes: Any,
) -> nn.Module:
    """A tiny random model of a class, in `folder` if one is given, stored there in a dtype."""
    if isinstance(architecture, str):
        architecture = named(architecture)
    config = config_of(architecture, **changes)
    torch.manual_seed(seed)
    model: nn.Module = getattr(transformers, architecture.cls)(config).eval().float()
    spread(model, seed)
    if folder is not None:
        model.to(dtype).save_pretrained(folder)
    return model


@torch.no_grad()
def spread(model: nn.Module, seed: int) -> None:
    """Weights at which every part is seen: linears keep their input's size, norms and biases are of many values."""
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        for value in module.parameters(recurse=False):
            noise = torch.randn(value.shape, generator=generator)
            plain = value.dim() > 1 and (not value.isfinite().all() or value.mean().abs() <= 0.3 * value.std())
            if isinstance(module, nn.Embedding):
                value.copy_(0.2 * noise)
            elif plain:
                value.copy_(noise / _reads(module, value) ** 0.5)
            else:
                value.add_((0.2 if value.dim() == 1 else 0.1) * noise)


def _reads(module: nn.Module, weight: Tensor) -> int:
    """How many inputs an output of a weight is a sum over."""
    if isinstance(module, pytorch_utils.Conv1D):  # GPT-2's linear, [K, N]
        return weight.shape[0]
    return weight[0].numel() if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d) else weight.shape[-1]


def ids(samples: int = 5, tokens: int = TOKENS, seed: int = 0) -> Tensor:
    """Random token ids [samples, tokens], of no special token."""
    return torch.randint(5, VOCABULARY - 8, (samples, tokens), generator=torch.Generator().manual_seed(seed))


def loaded(folder: Path) -> nn.Module:
    """A folder's model as anyone loads it, float32; what transformers leaves in 16 bits of a packed checkpoint too."""
    config = transformers.AutoConfig.from_pretrained(folder)
    model: nn.Module = getattr(transformers, config.architectures[0]).from_pretrained(folder, dtype=torch.float32)
    return model.eval().float()


@torch.no_grad()
def truth(folder: Path, tokens: Tensor, kind: str = "decoder") -> Tensor:
    """What plain transformers makes of ids [samples, tokens]: a decoder's logits, an encoder's last hidden states."""
    return (answer if kind == "decoder" else states)(loaded(folder), tokens)


@torch.no_grad()
def answer(model: nn.Module, tokens: Tensor) -> Tensor:
    """Logits or last hidden states of a model, without a cache."""
    for each in model.modules():
        if isinstance(config := getattr(each, "config", None), transformers.PretrainedConfig):
            config.use_cache = False
    torch.manual_seed(0)
    more = {}
    if "decoder_input_ids" in inspect.signature(model.forward).parameters:  # the same text, behind its start
        more["decoder_input_ids"] = torch.cat([torch.full_like(tokens[:, :1], _START), tokens[:, 1:]], dim=1)
    heard = sounds(model, tokens, {}) if hears(model) else {"input_ids": tokens}
    output = model(**heard, **more)
    found: Tensor = output.logits if hasattr(output, "logits") else output[0]
    return found


@torch.no_grad()
def states(model: nn.Module, tokens: Tensor) -> Tensor:
    """Last hidden states [samples, tokens, width] of a model's base, as anyone gets them."""
    base = model.base_model
    assert isinstance(base, nn.Module)
    found: Tensor = base(input_ids=tokens)[0]
    return found


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    """One token a printable character, within the zoo's vocabulary; 0 to 2 are what `_IDS` says."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors

    letters = ["<pad>", "<s>", "</s>", "<unk>", *map(chr, range(32, 127))]
    made = Tokenizer(models.WordLevel({letter: number for number, letter in enumerate(letters)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    made.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
    named = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, **named)


def tokenizer_of_bytes(around: str, merges: tuple[tuple[str, str], ...] = ()) -> transformers.PreTrainedTokenizerFast:
    """One token a byte, 0 to 255, then `<s>` 256, `</s>` 257 and what merges make; `around` as `<s> $A`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    vocabulary = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocabulary |= {"<s>": 256, "</s>": 257}
    vocabulary |= {left + right: 258 + number for number, (left, right) in enumerate(merges)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=around, special_tokens=[("<s>", 256), ("</s>", 257)]
    )
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
