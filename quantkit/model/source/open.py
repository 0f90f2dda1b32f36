"""Opening a model: from a reference to a `Source`, with every check that needs no computation.

    ./folder, /folder      a Hugging Face folder: config.json, safetensors, tokenizer files
    ./model.gguf           a GGUF file of an architecture that `gguf/` supports, converted once into the user's cache
    hf:org/name[@revision] the same from the hub, downloaded once into the hub's own cache
    smollm2-135m           an alias, see alias.py

A bare word is an alias and never a folder. No pickle is ever read. A model's own code (`auto_map`) runs only with
`trust_remote_code`; if transformers has the class itself, its class is used instead of the folder's code.
"""

from __future__ import annotations

import copy
import functools
import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit import limits
from quantkit.content import is_path
from quantkit.errors import InputError, MissingDependency
from quantkit.kinds import Kind
from quantkit.lazy import torch
from quantkit.model.sight import demand_no_adapter, no_config
from quantkit.model.sizes.quantized import KEY, grid_of, refused
from quantkit.model.source import converted, pretrained
from quantkit.model.source.adapter import Adapter
from quantkit.model.source.alias import ALIASES, demand_no_graph, made_once, materialize, unknown_model
from quantkit.model.source.alias import converted as converted_once
from quantkit.model.source.files import (
    files_of,
    identity,
    pools,
    remember,
    remembered,
    source_changed,
)
from quantkit.model.source.gguf import GGUF, PROVENANCE, convert_gguf, note_on
from quantkit.model.source.places import (
    TOKENIZERS,
    first_line,
    from_hub,
    from_path,
    saved_in_memory,
)
from quantkit.model.source.quantized import Quantization, opened
from quantkit.model.source.weights import (
    INDEX,
    SINGLE,
    Weights,
    checked_file,
    strict_json,
    write_json,
    write_safetensors,
)
from quantkit.model.structure.kinds import (
    class_name,
    cut_config,
    has_both,
    kind_of,
    native_class,
    reads_images,
    sound_of,
    unknown_architecture,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


OWN_CLASS = "the folder offers code of its own (auto_map); transformers' own class is used instead"
_NUMBER = re.compile(r"(?:^|\.)(\d+)\.")
_FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True)
class Source:
    """An opened model; none of its weights are in memory.

    Args:
        ref: `alias:smollm2-135m`, `hf:org/name` or `path:<folder name>`; without a path of this machine.
        path: its folder.
        name: name for a bundle.
        kind: kind of the model.
        config: contents of config.json.
        dtype: stored dtype of most bytes of the weights.
        was: original format before a conversion (`gguf Q4_1`); shown with its figures.
        notes: sentences for the reader of its figures.
        hashing: function that returns `sha256`.
        weights: tensors of its files.
        trust_remote_code: True if its own code may run.
        architecture: name of its class.
        untied: True if head and embedding are two tensors, whatever the config states; see `untied`.
        adapters: adapters that are merged into the weights, in their order.
        base: model before the adapters; None without any.
        quantization: quantization of its files, which `weights` opens; None for floats. `config` is without it.
    """

    ref: str
    path: Path
    name: str
    kind: Kind
    config: dict[str, Any]
    dtype: str
    was: str | None
    notes: list[str]
    hashing: Callable[[], str]
    weights: Weights
    trust_remote_code: bool = False
    architecture: str = ""
    untied: bool = False
    adapters: tuple[Adapter, ...] = ()
    base: Source | None = None
    quantization: Quantization | None = None

    @property
    def bytes(self) -> int:
        """Bytes of its tensors in the files."""
        return (self.weights if self.quantization is None else self.quantization.weights).total_bytes()

    @property
    def sees(self) -> bool:
        """True for a vision-language model: a decoder that takes images too."""
        return self.kind == "decoder" and reads_images(self.architecture, self.config)

    @property
    def sha256(self) -> str:
        """Hash over (file name, sha256) of config, weights and tokenizer files, sorted; "" if the model is unhashed."""
        return self.hashing()

    @property
    def has_encoder(self) -> bool:
        """True for a decoder beside an encoder."""
        return self.kind == "decoder" and has_both(self.model_class(), self.config)

    @property
    def hears(self) -> bool:
        """True for a decoder beside an encoder of speech."""
        return self.has_encoder and sound_of(signature(self.model_class().forward).parameters) is not None

    def demand_unchanged(self) -> None:
        """Raise InputError `source-changed` if a file has changed since the model was opened."""
        base = self.base or self
        try:
            same = not base.sha256 or identity(self.path, self.weights, self.trust_remote_code) == base.sha256
            same = same and all(adapter.identity() == adapter.sha256 for adapter in self.adapters)
        except OSError:
            same = False
        if not same:
            raise source_changed(self.ref)

    def files(self) -> list[Path]:
        """List the files of its hash: config, weights and tokenizer files, enough to open it elsewhere."""
        return [self.path / name for name in files_of(self.path, self.weights, self.trust_remote_code)]

    def in_files(self) -> Source:
        """Return the same model as files that another program reads: itself; with adapters a copy in the cache.

        The copy is written tensor by tensor at the first use. Raises as `disk_errors`.
        """
        if not self.adapters:
            return self
        return replace(self, path=made_once(f"{self.name}-{self.sha256[:16]}-merged", self._write))

    def _write(self, folder: Path) -> dict[str, str]:
        """Write all files with the merged weights into an empty folder, and return the hashes of the shards."""
        weights, hashes = converted.joined(self.weights), dict[str, str]()
        names: dict[str, str] = {}
        for shard in weights.shards:
            inside = [entry for entry in weights.entries.values() if entry.shard == shard]
            names |= {entry.name: shard for entry in inside}
            headers = [(entry.name, entry.dtype, entry.shape) for entry in inside]
            hashes[shard] = write_safetensors(folder / shard, headers, weights.read)
        for file in self.files():
            place = folder / file.relative_to(self.path)
            if file.name == "config.json" and place.parent == folder:
                write_json(place, self.config)
            elif file.name == INDEX and place.parent == folder:
                write_json(place, {"metadata": {"total_size": weights.total_bytes()}, "weight_map": names})
            elif file.name not in weights.shards or place.parent != folder:
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, place)
        return hashes

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Load the folder's tokenizer. Raises `tokenizer-missing`, `tokenizer-damaged`."""
        if not any((self.path / name).is_file() for name in TOKENIZERS):
            value, rule = "no tokenizer file in the folder", f"one of {', '.join(TOKENIZERS)}"
            remedy = "copy the original's tokenizer files (of a model in memory, compile(model, tokenizer=...))"
            raise InputError("tokenizer-missing", self.ref, value, rule, remedy)
        try:
            return pretrained.tokenizer(self.path, trust=self.trust_remote_code)
        except InputError:
            raise
        except Exception as problem:  # the library may raise anything on a damaged file
            raise InputError("tokenizer-damaged", self.ref, first_line(problem)) from problem

    def model_class(self) -> type[PreTrainedModel]:
        """Return the class to build: transformers' own, or the folder's if the user trusts it."""
        return model_class_of(self.config, self.path, self.ref, self.trust_remote_code)

    def _loaded_config(self) -> Any:
        config = _load_config(self.path, self.ref, self.trust_remote_code)
        if self.quantization is not None and hasattr(config, KEY):
            delattr(config, KEY)
        return config

    def load(self, blocks: int | None = None, placed: Mapping[str, object] | None = None) -> PreTrainedModel:
        """Load the model as plain `from_pretrained` does, float32, eval mode, without any code of ours.

        A quantized source has its opened weights: few of its libraries run without a GPU.

        Args:
            blocks: number of the first blocks that are loaded; None for all.
            placed: options that leave blocks on disk, see `own_forward.on_disk`.
        """
        model_class, config = self.model_class(), self._loaded_config()
        if blocks is not None:
            cut_config(config, blocks)
        options = {"config": config, "dtype": torch.float32, **(placed or {})}
        folder: Path | None = self.path
        if (weights := self._loadable()) is not None:
            config.tie_word_embeddings = config.tie_word_embeddings and not self.untied
            if placed is None:
                folder, options["state_dict"] = None, weights.unread()
            else:
                folder = _written(weights, Path(str(placed["offload_folder"])) / "opened")
        model: PreTrainedModel = pretrained.network(
            model_class, folder, trust=self.trust_remote_code, first=blocks, **options
        )
        return in_float32(model, getattr(torch, self.dtype)).eval().requires_grad_(False)

    def _loadable(self) -> Weights | None:
        """Return tensors for transformers to load in place of its files; None for the files themselves."""
        if self.adapters:
            return converted.joined(self.weights)
        return None if self.quantization is None else self.quantization.floats

    def can_be_cut(self, blocks: int) -> bool:
        """Tell whether its class can build the model of the first blocks alone.

        Some configs name later blocks, and in some a block or a table depends on their number.
        """
        model_class, config = self.model_class(), self._loaded_config()
        with torch.device("meta"):
            whole = dict(model_class._from_config(copy.deepcopy(config)).named_parameters())
            try:
                cut_config(config, blocks)
                cut = dict(model_class._from_config(config).named_parameters())
            except Exception:  # a class may raise anything on an inconsistent config
                return False
        numbers = ((name, _NUMBER.search(name)) for name in whole)
        first = {name for name, at in numbers if at is None or int(at[1]) < blocks}
        alike = all(name in whole and value.shape == whole[name].shape for name, value in cut.items())
        return alike and first <= cut.keys()

    def skeleton(self) -> PreTrainedModel:
        """Build the model without weights: parameters and persistent buffers on the meta device, float32, eval mode.

        Values that no file stores (rotary tables, masks, position numbers) are computed, as transformers does after a
        load.
        Merged experts are split (`structure.experts`). Attention is `sdpa` if the class supports it, else `eager`.
        Raises
        InputError (`config-invalid` if the class rejects the config).
        """
        from transformers import initialization

        from quantkit.model.structure import experts
        from quantkit.model.structure.names import merging_rules

        config, model_class = self._loaded_config(), self.model_class()
        if self.untied:
            config.tie_word_embeddings = False
        options = {"dtype": torch.float32, "attn_implementation": "sdpa" if model_class._supports_sdpa else "eager"}
        try:
            with torch.device("meta"), initialization.meta_device_safe_creation_ops():
                model: PreTrainedModel = model_class._from_config(config, **options)
        except Exception as problem:
            raise _invalid_config(self.ref, problem) from problem
        for name, buffer in list(model.named_non_persistent_buffers()):
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, torch.empty_like(buffer, device="cpu"))
        for name in model._keys_to_ignore_on_save or ():  # computed too: Marian's table of positions
            owner, _, leaf = name.rpartition(".")
            value = torch.empty_like(model.get_parameter(name), device="cpu")
            setattr(model.get_submodule(owner), leaf, torch.nn.Parameter(value, requires_grad=False))
        model.initialize_weights()  # fills these; on meta parameters it does nothing
        experts.split(model, merging_rules(model))
        return model.eval().requires_grad_(False)


def open_model(ref: str, *, trust_remote_code: bool | None = False, hashed: bool = True) -> Source:
    """Open a model by path, hub id or alias; the cache remembers the place of a hashed one, for `open_again`.

    Args:
        trust_remote_code: True to let the folder's own code run; None for code that was trusted before.
        hashed: False to skip hashing its files, which reads all of them; `sha256` is then empty.

    Raises:
        InputError: `unknown-model`, `alias-missing`, `model-graph`, `file-missing`, `not-a-folder`, `hub-unreachable`,
            `hub-missing`, `adapter-unmerged`, `config-missing`, `config-invalid`, `architecture-unknown`,
            `architecture-unsupported`, `remote-code`, `already-quantized`, and those of `Weights.open`.
        MissingDependency: without transformers.
    """
    demand_no_graph(ref)
    with MissingDependency.unless_found("transformers", extra="compile", purpose="opening a model"):
        import transformers  # noqa: F401
    was: str | None = None
    notes: list[str] = []
    place: Path | None = None
    if ref.startswith("hf:"):
        path, full = from_hub(ref, trust_remote_code is not False), ref
        name = ref[3:].split("@", maxsplit=1)[0].rpartition("/")[2]
    elif is_path(ref):
        place = path = from_path(ref)
        full, name = f"path:{path.name}", path.name
        if path.suffix.lower() == GGUF:
            name = path.stem
            path = converted_once(name, path, convert_gguf)
            was = strict_json(limits.read(path / PROVENANCE), ref, "gguf-damaged", "gguf-damaged")["was"]
            notes = [note_on(name, was)]
    elif ref in ALIASES:
        alias = ALIASES[ref]
        path, full, name, was = materialize(alias), f"alias:{ref}", ref, alias.was
        notes = [alias.note] if alias.note else []
    else:
        raise unknown_model(ref)
    trusted = pretrained.is_trusted(path) if trust_remote_code is None else trust_remote_code
    if trust_remote_code:
        pretrained.trust(path)
    source = _open_folder(path, full, name, trusted, was=was, notes=notes, hashed=hashed)
    source.hashing()
    if place is not None and hashed:
        remember(source.sha256, place)
    return source


def open_again(sha256: str) -> Source | None:
    """Open the model of this hash at the first known place that still holds it, or where `save_in_memory` kept it.

    Returns:
        The source; None where it is gone, or has changed.
    """
    for place in (*remembered(sha256), saved_in_memory(sha256)):
        with suppress(InputError):
            if place is not None and (source := open_model(str(place), trust_remote_code=None)).sha256 == sha256:
                return source
    return None


def open_written(folder: Path) -> Source:
    """Open a bundle's checkpoint, quantized or not; its `dtype` is the config's, its hash is computed when asked for.

    Raises as `open_model`, without `already-quantized`.
    """
    return _open_folder(folder, f"path:{folder.name}", folder.name, pretrained.is_trusted(folder), written=True)


def _open_folder(
    path: Path,
    ref: str,
    name: str,
    trust: bool,
    *,
    was: str | None = None,
    notes: list[str] | None = None,
    written: bool = False,
    hashed: bool = True,
) -> Source:
    where, notes = f"{ref}: config.json", notes or []
    if not written:
        demand_no_adapter(path, ref)
    if not (path / "config.json").exists():
        raise no_config(path, ref)
    config = strict_json(limits.read(checked_file(path, "config.json")), where, "config-invalid", "config-invalid")
    pretrained.demand_layers(config, where)
    if not written:
        grid_of(config, ref)
    model_class = model_class_of(config, path, ref, trust)
    loaded = _load_config(path, ref, trust)
    # by name: transformers runs a folder's code once per file, which creates a new class each time
    takes = model_class.config_class.__name__
    if takes not in [base.__name__ for base in type(loaded).__mro__]:
        value = f"model_type {config.get('model_type')!r} with {model_class.__name__}"
        raise InputError("config-invalid", where, value, f"that class takes a {takes}")
    if config.get("auto_map") and not trust:
        notes = [*notes, OWN_CLASS]
    kind = kind_of(model_class, config, ref)
    weights = unopened = Weights.open(path)
    quantization = None
    if not written:
        weights, quantization = opened(weights, config, ref)
        if quantization is not None:
            notes, was = [*notes, quantization.note(name)], quantization.grid.words if quantization.grid.format else was
            config = {key: value for key, value in config.items() if key != KEY}
    stated = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    source = Source(
        ref=ref,
        path=path,
        name=name,
        kind=kind,
        config=config,
        dtype=stated if written else _stored_dtype(weights, ref),
        was=was,
        notes=notes,
        hashing=functools.cache(partial(identity, path, unopened, trust, opening=True)) if hashed else str,
        weights=weights,
        trust_remote_code=trust,
        architecture=model_class.__name__,
        quantization=quantization,
    )
    if kind != "network" and (converted.may_apply(model_class, loaded) or converted.may_cut(loaded)):
        skeleton = source.skeleton()
        seen = converted.converted(weights, skeleton)
        notes = notes if seen is weights else [*notes, converted.NOTE]
        return replace(source, weights=converted.cut(seen, skeleton), notes=notes)
    return source


def in_float32(model: PreTrainedModel, stored: torch.dtype | None = None) -> PreTrainedModel:
    """Widen a model's 16-bit floats to float32; packed weights are expanded before.

    `stored` is the checkpoint's dtype, if the model was loaded in float32: transformers then has widened the scales of
    some layouts, and the products have more bits than `from_pretrained(dtype="auto")` gives them.
    """
    if hasattr(model, "ct_decompress_hook"):  # expand now, before the scales change, not at the first forward
        packed = [module for module in model.modules() if hasattr(module, "weight_scale")]
        model.hf_quantizer.compressor.decompress_model(model)
        for module in packed:
            module.weight.data = module.weight.data.to(stored or module.weight.dtype)
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.dtype in (torch.float16, torch.bfloat16):
            tensor.data = tensor.data.float()
    return model


def untied(source: Source, files: Mapping[str, str]) -> Source:
    """Give parameters with a shared tensor separate ones of the same values; the first in `files` keeps it."""
    entries = dict(source.weights.entries)
    owners: dict[str, str] = {}
    sharing = [name for name, file in files.items() if owners.setdefault(file, name) != name]
    if not sharing:
        return source
    for name in sharing:
        entries.setdefault(name, replace(entries[files[name]], name=name))  # or it is in the files twice
    config = {**source.config, "tie_word_embeddings": False}
    return replace(source, weights=replace(source.weights, entries=entries), config=config, untied=True)


def _written(weights: Weights, folder: Path) -> Path:
    """Write weights into a new folder, one tensor in memory at a time."""
    folder.mkdir()
    headers = [(name, entry.dtype, entry.shape) for name, entry in weights.entries.items()]
    write_safetensors(folder / SINGLE, headers, weights.read, hashed=False)
    write_json(folder / "generation_config.json", {})  # which transformers demands of a folder
    return folder


def model_class_of(config: dict[str, Any], path: Path, ref: str, trust: bool) -> type[PreTrainedModel]:
    """Return the class to build: transformers' own, or the folder's if the user trusts it."""
    name = class_name(config, ref, embeds=pools(path))
    auto_map = config.get("auto_map") or {}
    offered = [value for value in auto_map.values() if isinstance(value, str) and value.rpartition(".")[2] == name]
    if trust and offered:
        own: type[PreTrainedModel] = pretrained.load_code(offered[0].rpartition("--")[2], path)
        return own
    if (native := native_class(name)) is not None:
        return native
    if auto_map:
        raise pretrained.remote_code(ref, f"{name} is code in the model's folder")
    raise unknown_architecture(name, ref, config.get("model_type"))


def _load_config(path: Path, ref: str, trust: bool) -> Any:
    try:
        return pretrained.config(path, trust=trust)
    except InputError:
        raise
    except Exception as problem:  # the config's own validation raises many types
        raise _invalid_config(ref, problem) from problem


def _invalid_config(ref: str, problem: Exception) -> InputError:
    rule, remedy = "transformers can build a model from it", "compare it with the original's"
    return InputError("config-invalid", f"{ref}: config.json", first_line(problem), rule, remedy)


def _stored_dtype(weights: Weights, ref: str) -> str:
    sizes: dict[str, int] = {}
    for entry in weights.entries.values():
        sizes[entry.dtype] = sizes.get(entry.dtype, 0) + entry.bytes
    most = max(sizes, key=lambda dtype: sizes[dtype], default="nothing")
    if most in _FLOATS:
        return _FLOATS[most]
    if most in ("F64", "nothing"):
        raise InputError("weights-dtype", ref, f"most is stored in {most}", f"one of {', '.join(_FLOATS.values())}")
    raise refused(ref, f"most of it is stored in {most}")
