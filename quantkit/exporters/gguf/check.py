"""Check that a GGUF file holds the expected values.

The `gguf` package reads every tensor back, which must equal the expected one to the last bit: values of codes, and
floats as rounded to the file's type. Then transformers reads the file with its own code (names, order of rows, norms,
sizes), and its logits are compared with those of the expected model, whose embedding is looked up by codes. If
llama.cpp is installed, its token ids of a few texts must be those of the model's tokenizer, and its logits those of the
codes, within the rounding of inputs: 8 bits for weights with codes, 16 for bfloat16.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from quantkit import machine
from quantkit.bundle import Check
from quantkit.errors import InputError, reading
from quantkit.exporters.check import counted, judged, prompt, worst
from quantkit.exporters.gguf.architecture import FLOATS, scaled_rope, yarn_factor
from quantkit.exporters.gguf.writer import TABLE, Content
from quantkit.model.source.gguf import demand_lengths, fields, tensors
from quantkit.scheme import WeightScheme

if TYPE_CHECKING:
    from quantkit.exporters.values import Values

# limit for logits of equal numbers, added in any order
LIMIT = 1e-4
# of llama.cpp's own logits: with inputs in 16 bits, and in 8 (of Q4_0 on random ids SmolLM2-135M is at 0.036 of the
# largest logit, Gemma 3 270M at 0.099)
IN_FLOATS, IN_CODES = 3e-2, 0.15
# of a file without expected values
_TOKENS = 8
# transformers 5.23 does not read these fields, but llama.cpp does: `_fields` checks them
_UNREAD = {
    *("attention_bias", "head_dim", "query_pre_attn_scalar", "layer_types"),
    *("attn_logit_softcapping", "final_logit_softcapping", "norm_topk_prob", "moe_intermediate_size"),
    *("mlp_only_layers", "decoder_sparse_step"),
}
TEXTS = (
    "The quick brown fox jumps over 13 lazy dogs, doesn't it?\n\n  Yes: 3.14159!",
    "def add(a, b):\n\treturn a + b  # done\r\n",
    "Grüße, 日本語 и русский — ok 😀",
)


# texts that may get a space in front
_SPACED = (" x", "  two spaces ", "\n the", "")


def check(path: Path, content: Content, blocks: int | None = None) -> list[Check]:
    """Check a file against its expected content."""
    checks = [_tensors(path, content), _fields(path, content)]
    if not all(check.ok for check in checks):
        return checks
    kinds = {tensor.kind for tensor in content.tensors}
    if machine.has("llama_cpp"):
        from quantkit.runtimes.llama_cpp.session import LlamaModel

        checks.append(_tokens(path, content.values, spaced=content.spaced))
        # the expected model is made block by block, and llama.cpp maps its file
        error, where = worst(LlamaModel(path), content.held)
        limit = IN_FLOATS if kinds <= set(FLOATS.values()) else IN_CODES
        checks.append(judged("reload.llama_cpp", error, limit, where))
    if blocks is None or blocks >= len(content.values.stream.block_names):
        error = _logits(path, content.held, content.config)
        checks.append(judged("reload.gguf", error, LIMIT, "transformers' reader"))
    return checks


def check_alone(path: Path) -> list[Check]:
    """Check a file without expected values: the package reads all of it, it is finite, llama.cpp runs it."""
    import gguf

    with reading(_damaged(path)):
        demand_lengths(path)
        dense = ((tensor.name, gguf.quants.dequantize(tensor.data, tensor.tensor_type)) for tensor in tensors(path))
        checks = [counted("gguf.tensors", [name for name, values in dense if not np.isfinite(values).all()])]
    if machine.has("llama_cpp"):
        from quantkit.runtimes.llama_cpp.session import LlamaModel

        model = LlamaModel(path)
        logits = model.run(model.state(1, _TOKENS), np.arange(_TOKENS)[None] % model.vocabulary)
        wrong = [] if np.isfinite(logits).all() else ["llama.cpp's logits are not finite"]
        checks.append(counted("gguf.logits", wrong))
    return checks


def _tensors(path: Path, content: Content) -> Check:
    import gguf

    with reading(_damaged(path)):
        stored = {tensor.name: tensor for tensor in tensors(path)}
        wrong = sorted(stored.keys() ^ {tensor.name for tensor in content.tensors})
        for wanted in [] if wrong else content.tensors:
            own = stored[wanted.name]
            dense = gguf.quants.dequantize(np.array(own.data), own.tensor_type)
            values = torch.from_numpy(np.require(dense, requirements="W")).reshape(wanted.shape).float()
            if own.tensor_type.name != wanted.kind or not torch.equal(values, content.decided(wanted)):
                wrong.append(wanted.name)
    return counted("gguf.tensors", wrong)


def _fields(path: Path, content: Content) -> Check:
    """Check the file's fields against the config, for those that transformers does not read from the file."""
    import gguf

    config, keys, rope = content.config, gguf.Keys, scaled_rope(content.config)
    wanted = {
        keys.Attention.KEY_LENGTH: config.get("head_dim"),
        keys.Attention.VALUE_LENGTH: config.get("head_dim"),
        keys.LLM.ATTN_LOGIT_SOFTCAPPING: config.get("attn_logit_softcapping"),
        keys.LLM.FINAL_LOGIT_SOFTCAPPING: config.get("final_logit_softcapping"),
        keys.LLM.EXPERT_FEED_FORWARD_LENGTH: config.get("moe_intermediate_size"),
    }
    kind, context = rope.get("rope_type"), config["max_position_embeddings"]
    if rope:
        local = config["rope_parameters"].get("sliding_attention", {})
        wanted |= {keys.Rope.FREQ_BASE: rope["rope_theta"], keys.Rope.FREQ_BASE_SWA: local.get("rope_theta")}
        # Llama 3's divisors are a tensor
        wanted[keys.Rope.SCALING_TYPE] = None if kind == "llama3" else kind
        wanted[keys.Rope.SCALING_FACTOR] = None if kind == "llama3" else rope["factor"]
    if kind == "yarn":
        wanted[keys.Rope.SCALING_ORIG_CTX_LEN] = rope.get("original_max_position_embeddings") or context
        wanted[keys.Rope.SCALING_YARN_BETA_FAST] = rope.get("beta_fast")
        wanted[keys.Rope.SCALING_YARN_BETA_SLOW] = rope.get("beta_slow")
        wanted[keys.Rope.SCALING_ATTN_FACTOR] = yarn_factor(rope)
    with reading(_damaged(path)):
        stated = fields(path)
    wrong = []
    for key, value in wanted.items():
        name = key.format(arch=content.architecture.name)
        if stated.get(name) != (np.float32(value) if isinstance(value, float) else value):
            wrong.append(f"{name} {stated.get(name)}, not {value}")
    return counted("gguf.fields", wrong)


def _tokens(path: Path, values: Values, *, spaced: bool) -> Check:
    """Compare ids of texts, with special tokens in them, and of the chat template; and decode them.

    Args:
        spaced: whether llama.cpp adds a space where the tokenizer adds none (`tokenizer.spaced`): texts that begin with
            a space, and those after a special token, are then left out.
    """
    from quantkit.runtimes.llama_cpp.library import Vocabulary

    tokenizer, vocabulary, wrong = values.source.tokenizer(), Vocabulary(path), []
    texts, special = list(TEXTS), tokenizer.eos_token
    if not spaced:
        texts += _SPACED
        texts += [f"a{special}b the{special} fox", f"{special}{special}x"] if special else []
        if tokenizer.chat_template:
            message = [{"role": "user", "content": "Hello there, 12 foxes?"}]
            texts.append(tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True))
    for text in texts:
        wanted = tokenizer(text)["input_ids"]
        back = tokenizer.decode(wanted, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        # llama.cpp keeps the added space
        if vocabulary.encode(text) != wanted or vocabulary.decode(wanted).lstrip(" ") != back.lstrip(" "):
            wrong.append(repr(text))
    return counted("gguf.tokens", wrong)


def _logits(path: Path, values: Values, own: Mapping[str, Any]) -> float:
    """Return the largest relative difference between transformers' reading of the file and the expected model."""
    from quantkit.model.source import pretrained
    from quantkit.model.source.places import quiet_loading

    ids = prompt(values)
    unread = {key: own[key] for key in _UNREAD & own.keys()}
    unread |= {"rope_parameters": own["rope_parameters"]} if scaled_rope(own) else {}
    with reading(_damaged(path)), quiet_loading(), torch.no_grad():
        model = pretrained.of_gguf(path, unread).eval()
        logits = model(ids).logits
    expected = values.stream.answers(ids).all().float()
    return float((logits - expected).abs().max() / expected.abs().max())


def _damaged(path: Path) -> Any:
    def refused(problem: str) -> InputError:
        return InputError("gguf-damaged", where=path.name, value=problem, rule="the gguf package reads the file")

    return refused


def read_options(path: Path) -> Mapping[str, Any]:
    """Read the exporter's options from a file. Raises InputError `gguf-damaged`."""
    with reading(_damaged(path)):
        kinds = {tensor.name: (tensor.tensor_type.name, len(tensor.shape)) for tensor in tensors(path)}
    floats = {theirs: ours for ours, theirs in FLOATS.items()}
    table = kinds.get(TABLE, ("F32", 2))[0]
    norms = ("_norm.weight", ".bias", "ffn_gate_inp.weight")
    high = next((k for name, (k, n) in kinds.items() if n > 1 and k in floats and not name.endswith(norms)), "F16")
    return {"floats": floats[high], "embedding": None if table in floats else WeightScheme(format=table.lower())}
