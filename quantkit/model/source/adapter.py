"""Read an adapter of PEFT from its folder, and merge its matrices into a weight.

An adapter changes a weight W [N, K] by a product of two small matrices, A [r, K] and B [N, r]:

    LoRA      W' = W + s B A                              s = alpha / r           Hu et al. 2021, arXiv 2106.09685
    rsLoRA    W' = W + s B A                              s = alpha / sqrt(r)     Kalajdzievski 2023, arXiv 2312.03732
    DoRA      W' = diag(m / |V|) V ,  V = W + s B A       |V|: norm of each row   Liu et al. 2024, arXiv 2402.09353

A weight that is stored as [K, N] (GPT-2's Conv1D, an embedding) is merged by its transpose. A convolution [N, C, k] has
A [r, C, k] and B [N, r, 1], and is merged as [N, C k]. Merged experts [E, N, K] (`target_parameters`) have one
A [E r, K] and one B [N, r E]: expert e has the r rows of A from e r on, and every E-th column of B from e on. Other
tensors (`modules_to_save`, trained biases) replace the model's.

    adapter_config.json          {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "use_dora": false, ...}
    adapter_model.safetensors    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight, ...lora_B.weight, ...

The names and shapes of the tensors decide what is merged where; of the config, only the factor s and the variant count.
The arithmetic is float32, and the result is rounded once to the dtype of W, as PEFT does with an adapter in float32.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit import limits
from quantkit.content import is_path, near
from quantkit.errors import InputError, absent
from quantkit.model.sight import ADAPTER, by_peft, is_prompt
from quantkit.model.sizes.architecture import Architecture
from quantkit.model.sizes.configs import cached, is_known
from quantkit.model.source.files import file_sha256, remember
from quantkit.model.source.weights import Weights, checked_file, read_header, strict_json

if TYPE_CHECKING:
    from torch import Tensor

WEIGHTS = "adapter_model.safetensors"
_BEFORE = "base_model.model."
_LORA = re.compile(
    r"(?P<module>.+)\.(?P<part>lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)"
    r"(?:\.default)?(?:\.(?P<leaf>weight|bias))?"
)
_WRAPPED = re.compile(r"\.(?:base_layer|modules_to_save(?:\.default)?)(?=\.\w+$)")
_LONG = {"lora_embedding_A": "lora_A", "lora_embedding_B": "lora_B"}
# keys of the config that change the product or the place where it is added, without a rule here
_OTHER_MATH = (
    *("layer_replication", "use_qalora", "use_bdlora", "alora_invocation_tokens", "arrow_config", "kasa_config"),
    *("monteclora_config", "trainable_token_indices", "velora_config", "megatron_config"),
)
# initial values of A and B that leave the model's own weights alone
_PLAIN_START = (True, False, None, "gaussian", "eva", "orthogonal")
# keys that are read here, or that the tensors' names and shapes already tell
_READ = (
    *("peft_type", "r", "lora_alpha", "use_rslora", "use_dora", "alpha_pattern", "rank_pattern", "init_lora_weights"),
    "target_parameters",
)
_TOLD = (
    *("target_modules", "exclude_modules", "modules_to_save", "fan_in_fan_out", "bias", "lora_bias"),
    *("layers_to_transform", "layers_pattern", "ensure_weight_tying"),
)
_AGAIN = "save it again with PEFT: model.save_pretrained(folder)"
# names of a table of tokens
_TABLES = ("embed_tokens", "wte", "word_embeddings", "embed_in", "tok_embeddings")
# keys for training alone, and for the reader
_IDLE = (
    *("task_type", "base_model_name_or_path", "revision", "auto_mapping", "inference_mode", "lora_dropout"),
    *("peft_version", "runtime_config", "loftq_config", "eva_config", "corda_config", "lora_ga_config"),
    *("megatron_core", "qalora_group_size", "model_type", "library_name"),
)


@dataclass(frozen=True)
class LowRank:
    """The matrices of one module, by their tensors' names; None for a part that it has not.

    Args:
        a, b: A and B.
        magnitude: DoRA's m.
        bias: change of the module's bias, to be multiplied by s.
    """

    a: str | None = None
    b: str | None = None
    magnitude: str | None = None
    bias: str | None = None


@dataclass(frozen=True)
class Adapter:
    """An adapter on disk; none of its tensors are in memory.

    Args:
        ref: `path:<folder name>` or `hf:org/name`, without a path of this machine.
        folder: its folder.
        config: contents of `adapter_config.json`.
        weights: tensors of its file.
    """

    ref: str
    folder: Path
    config: Mapping[str, Any]
    weights: Weights = field(repr=False)

    @classmethod
    def at(cls, ref: str, model: str = "") -> Adapter:
        """Open an adapter by its path as typed. Raises InputError: as `open`."""
        return cls.open(_folder(ref), model=model)

    @classmethod
    def open(cls, folder: Path, ref: str = "", model: str = "") -> Adapter:
        """Open and check an adapter; its place is kept in the cache under its hash.

        `model` is the base model as the user named it, for remedies.

        Raises InputError: `adapter-invalid`, `adapter-kind`, those of `checked_file` and `read_header`.
        """
        ref = ref or f"path:{folder.name}"
        config = _config(folder, ref, model)
        if not (folder / WEIGHTS).is_file():
            raise _without_weights(folder, ref)
        entries = {entry.name: entry for entry in read_header(checked_file(folder, WEIGHTS), WEIGHTS)}
        adapter = cls(ref, folder, config, Weights(entries, folder, [WEIGHTS]))
        if not adapter.parts and not adapter.replaced:
            rule = "it holds A and B of a weight"
            raise InputError("adapter-invalid", f"{ref}: {WEIGHTS}", "holds no tensor", rule, _AGAIN)
        remember(adapter.sha256, folder)
        return adapter

    @property
    def name(self) -> str:
        """Last part of its reference, for the name of a bundle."""
        return self.ref.partition(":")[2].partition("@")[0].rpartition("/")[2]

    @cached_property
    def sha256(self) -> str:
        """Hash over (file name, sha256) of both files, as of a model's."""
        return self.identity()

    def identity(self) -> str:
        """Hash the files as they are now."""
        lines = (f"{name} {file_sha256(self.folder / name)}\n" for name in (ADAPTER, WEIGHTS))
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    @property
    def kind(self) -> str:
        """Name of the variant: `LoRA`, `rsLoRA` or `DoRA`."""
        return "DoRA" if self.config.get("use_dora") else "rsLoRA" if self.config.get("use_rslora") else "LoRA"

    @property
    def ranks(self) -> list[int]:
        """Ranks of its products, ascending."""
        return sorted({self.rank(module) for module in self.parts})

    @cached_property
    def parts(self) -> dict[str, LowRank]:
        """Module of the base model -> its matrices. Raises InputError `adapter-invalid`."""
        modules: dict[str, dict[str, str]] = {}
        for name in self.weights.entries:
            if match := _LORA.fullmatch(name):
                part = _LONG.get(match["part"], match["part"])
                key = {"lora_A": "a", "lora_B": "b", "lora_magnitude_vector": "magnitude"}[part]
                key = "bias" if match["leaf"] == "bias" else key
                modules.setdefault(match["module"].removeprefix(_BEFORE), {})[key] = name
        for module, matrices in modules.items():
            if not {"a", "b"} <= set(matrices) or (self.kind == "DoRA") != ("magnitude" in matrices):
                value, rule = f"has {', '.join(sorted(matrices))}", "a module has A and B, and of DoRA its magnitudes"
                raise InputError("adapter-invalid", f"{self.ref}: {module}", value, rule, "save the adapter again")
            for name in matrices.values():
                shape = self.weights.entries[name].shape
                if 0 in shape or (len(shape) < 2 and name in (matrices["a"], matrices["b"])):
                    raise InputError("adapter-invalid", f"{self.ref}: {name}", f"shape {list(shape)}", "a matrix")
        return {module: LowRank(**matrices) for module, matrices in modules.items()}

    @cached_property
    def replaced(self) -> dict[str, str]:
        """Parameter of the base model -> tensor that takes its place."""
        own = (name for name in self.weights.entries if not _LORA.fullmatch(name))
        return {_WRAPPED.sub("", name.removeprefix(_BEFORE)): name for name in own}

    def rank(self, module: str, key: str = "") -> int:
        """Return the rank r of a module's product: the rows of A; of merged experts, the rows of one of them.

        Args:
            key: name that the config's patterns match; "" for the module's.
        """
        low = self.parts[module]
        assert low.a is not None
        rows = self.weights.entries[low.a].shape[0]
        stated = self._own("rank_pattern", key or module, "r", rows)
        merged = self.config.get("target_parameters") and isinstance(stated, int) and 0 < stated < rows
        return stated if merged and rows % stated == 0 else rows

    def factor(self, module: str, key: str = "") -> float:
        """Return the factor s of a module's product; `key` as of `rank`."""
        rank, alpha = self.rank(module, key), float(self._own("alpha_pattern", key or module, "lora_alpha", 8))
        return alpha / math.sqrt(rank) if self.config.get("use_rslora") else alpha / rank

    def _own(self, patterns: str, key: str, plain: str, default: int) -> Any:
        """Return a figure of the config: the first whose pattern matches a key, else the plain one."""
        stated = (self.config.get(patterns) or {}).items()
        own = (value for pattern, value in stated if re.match(rf"(.*\.)?({pattern})$", key))
        return next(own, self.config.get(plain, default))

    def of_expert(self, module: str, number: int, experts: int, *, turned: bool) -> Tensor:
        """Return the product B A of one of the merged experts, float32, without s; transposed if `turned`."""
        low = self.parts[module]
        assert low.a is not None and low.b is not None
        a, b = self.weights.part(low.a, number, experts).float(), self.weights.read(low.b).float()
        product = b[:, number::experts] @ a.flatten(0, -2)
        return product.T if turned else product

    def merged(self, weight: Tensor, module: str, *, transposed: bool) -> Tensor:
        """Return a module's weight with the change added, in its dtype; `transposed` if it is stored as [K, N]."""
        low = self.parts[module]
        assert low.a is not None and low.b is not None
        a, b = self.weights.read(low.a).float(), self.weights.read(low.b).float()
        magnitude = self.weights.read(low.magnitude).float() if low.magnitude else None
        return merged(weight, a, b, self.factor(module), magnitude, transposed=transposed)

    def about(self) -> dict[str, Any]:
        """Return its record for a manifest."""
        return {
            "ref": self.ref,
            "sha256": self.sha256,
            "kind": self.kind,
            "ranks": self.ranks,
            "alpha": self.config.get("lora_alpha"),
            "weights": len(self.parts),
            "replaced": len(self.replaced),
        }


def planned(architecture: Architecture, refs: Sequence[str]) -> tuple[Architecture, list[str]]:
    """Return a model's sizes with adapters merged, and a sentence on each; of their files the headers alone are read.

    Raises InputError: `adapter-misfit` for one that names no part of the model; those of `Adapter.open` on a config.
    """
    head, notes = architecture.head, []
    names = [matrix.name.replace("*", "0") for matrix in architecture.inside() if not matrix.router]
    for ref in refs:
        hub = ref.startswith("hf:")
        folder = cached(ref, ADAPTER).parent if hub else _folder(ref)
        name = ref.partition("@")[0].rpartition("/")[2] if hub else folder.name
        config = _config(folder, ref if hub else f"path:{name}")
        fits = not hub and (folder / WEIGHTS).is_file()
        if fits:
            _demand_fitting(Adapter.at(ref), architecture)
        stated, saved = config.get("target_modules") or [], config.get("modules_to_save") or []
        aimed = [one for one in names if _aims(stated, one)]
        ends = [one for one in (*_TABLES, head.name if head else "") if one and (_aims(stated, one) or one in saved)]
        known = aimed or ends or saved or config.get("target_parameters")
        if not known and is_known({"model_type": architecture.model_type}):
            base = str(config.get("base_model_name_or_path") or "")
            rule, remedy = (
                "an adapter fits its base model",
                f"this adapter was trained on {base!r:.120}" if base else "",
            )
            value = f"{architecture.name} has no module {', '.join(map(str, stated))!r:.80}"
            raise InputError("adapter-misfit", f"{ref}: target_modules", value, rule, remedy)
        parted = architecture.tied and bool(ends)
        architecture = replace(architecture, tied=architecture.tied and not parted)
        size = "; head and embedding no longer share a tensor" if parted else "; it changes no size"
        size += "" if fits else "; its weights are not here, so nothing tells whether they fit"
        notes.append(f"the adapter {name} is merged first, into {len(aimed)} of {len(names)} linears{size}")
    return architecture, notes


def _demand_fitting(adapter: Adapter, architecture: Architecture) -> None:
    """Refuse matrices of another size than a linear of the same name. Raises InputError `adapter-misfit`."""
    shapes = {matrix.name: [matrix.N, matrix.K] for matrix in architecture.inside() if matrix.count == 1}
    for module, low in adapter.parts.items():
        if module not in shapes and re.sub(r"\.\d+\.", ".0.", module) in shapes:
            raise misfit(adapter, module, f"{architecture.name} has {len(architecture.layers)} blocks")
        a, b = (adapter.weights.entries[str(name)].shape for name in (low.a, low.b))
        if module in shapes and len(a) == 2 and sorted((b[0], a[1])) != sorted(shapes[module]):
            value = f"made for {[b[0], a[1]]}, and {architecture.name} has {shapes[module]}"
            raise misfit(adapter, module, value)


def misfit(adapter: Adapter, where: str, value: str) -> InputError:
    """Make the error `adapter-misfit`."""
    named = str(adapter.config.get("base_model_name_or_path") or "")
    remedy = f"this adapter was trained on {named!r:.120}" if named else "give the model that it was trained on"
    return InputError("adapter-misfit", f"{adapter.ref}: {where}", value, "an adapter fits its base model", remedy)


def _aims(stated: Any, name: str) -> bool:
    """Tell whether `target_modules` selects a module, as PEFT does."""
    if isinstance(stated, str):
        return (stated == "all-linear" and name not in _TABLES) or re.fullmatch(stated, name) is not None
    return any(name == one or name.endswith(f".{one}") for one in stated)


def merged(
    weight: Tensor, a: Tensor, b: Tensor, factor: float, magnitude: Tensor | None = None, *, transposed: bool = False
) -> Tensor:
    """Return W' of a weight: see the module.

    Args:
        weight: [N, K], [K, N] if `transposed`, or [N, C, ...] of a convolution.
        a, b: [r, K] and [N, r], float32; of a convolution [r, C, ...] and [N, r, 1, ...].
        factor: s.
        magnitude: m of DoRA, N values in any shape; None for LoRA.
    """
    import torch

    change = b.flatten(1) @ a.flatten(1)
    value = weight.float().T if transposed else weight.float().flatten(1)
    value = value + change * factor
    if magnitude is not None:
        value = (magnitude.flatten() / torch.linalg.norm(value, dim=1))[:, None] * value
    return (value.T if transposed else value.reshape(weight.shape)).contiguous().to(weight.dtype)


def _folder(ref: str) -> Path:
    """Return the folder of an adapter by its path as typed. Raises InputError: `adapter-invalid`, `file-missing`."""
    if not is_path(ref):
        rule = "an adapter is a folder (./folder) or hf:org/name"
        raise InputError("adapter-invalid", "--adapter", ref, rule, f"./{ref}")
    folder = Path(ref)
    with suppress(RuntimeError):  # ~nobody
        folder = folder.expanduser()
    if not folder.exists():
        raise absent(ref)
    return folder.resolve()


def _config(folder: Path, ref: str, model: str = "") -> dict[str, Any]:
    """Read and check an adapter's config. Raises InputError: `adapter-invalid`, `adapter-kind`."""
    if not (folder / ADAPTER).is_file():
        remedy = "give the folder that PEFT wrote: model.save_pretrained(folder)"
        raise InputError("adapter-invalid", ref, f"no {ADAPTER} in it", "an adapter is a folder of PEFT", remedy)
    raw, where = limits.read(checked_file(folder, ADAPTER)), f"{ref}: {ADAPTER}"
    config: dict[str, Any] = strict_json(raw, where, "adapter-invalid", "adapter-invalid")
    _demand_kind(config, where, by_peft(near(folder), config, model=model))
    _demand_numbers(config, where)
    return config


def _demand_kind(config: Mapping[str, Any], where: str, merging: str) -> None:
    """Refuse a kind, or a variant of LoRA, that is not merged here; `merging` is the code that merges it."""
    kind, start = str(config.get("peft_type") or "of no known kind"), config.get("init_lora_weights", True)
    if is_prompt(kind):
        rule = "an adapter that adds tokens or keys changes no weight"
        remedy = "compile the base model alone, and add the adapter where it is served"
        raise InputError("adapter-kind", where, kind, rule, remedy)
    if kind != "LORA":
        raise InputError("adapter-kind", where, kind, "LoRA, rsLoRA and DoRA are merged", merging)
    other = [key for key in _OTHER_MATH if config.get(key)]
    if start not in _PLAIN_START:
        rule = "this start of the training also changed the weights of the base model"
        remedy = "save it as plain LoRA: peft_model.save_pretrained(folder, path_initial_model_for_weight_conversion=…)"
        raise InputError("adapter-kind", where, f"init_lora_weights {start!r}", rule, remedy)
    known = {*_READ, *_TOLD, *_IDLE, *_OTHER_MATH}
    strange = other or [key for key, value in config.items() if value and key not in known]
    if strange:
        rule = "it may change how the adapter is merged" if not other else "this variant has no rule here"
        raise InputError("adapter-kind", where, f"{strange[0]}: {config[strange[0]]!r:.60}", rule, merging)


def _demand_numbers(config: Mapping[str, Any], where: str) -> None:
    alphas = config.get("alpha_pattern") or {}
    values = [config.get("lora_alpha", 8), *(alphas.values() if isinstance(alphas, dict) else [None])]
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise InputError("adapter-invalid", f"{where}: lora_alpha", f"{value!r:.60}", "alpha is a number")
    for key in ("alpha_pattern", "rank_pattern"):
        for pattern in config.get(key) or {}:
            try:
                re.compile(pattern)
            except re.error as problem:
                value = f"{pattern!r:.60}: {problem}"
                raise InputError("adapter-invalid", f"{where}: {key}", value, "a regular expression") from None


def _without_weights(folder: Path, ref: str) -> InputError:
    pickled = next((path.name for path in sorted(folder.glob("adapter_model.*")) if path.suffix != ".safetensors"), "")
    if not pickled:
        return InputError("adapter-invalid", ref, f"no {WEIGHTS} in it", "an adapter's weights are safetensors", _AGAIN)
    rule = "quantkit never unpickles: a pickle can run any code"
    remedy = "convert it where you trust it, in Python: import torch, safetensors.torch as st; st.save_file("
    remedy += f"torch.load({near(folder / pickled)!r}, weights_only=True), {near(folder / WEIGHTS)!r})"
    return InputError("weights-pickle", ref, f"only pickled weights ({pickled})", rule, remedy)
