"""`Recipe`: what to do to a model. One flat YAML file, validated whole before torch is imported.

The schema is closed: an unknown key, pass, format or setting is an error that names the known ones. `Recipe.load` also
validates the settings of every pass, because modules of passes do not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)

from quantkit import content, given, plugins
from quantkit.content import Closed, Document, read_yaml, validated
from quantkit.errors import InputError, Inside, did_you_mean
from quantkit.kinds import Kind, Said, today
from quantkit.plugins.outside import CodeFile
from quantkit.recipe.changes import apply_change, demand_changes, steps_of
from quantkit.scheme import ActivationScheme, Scheme, WeightScheme

# between a recipe and an add-on
ADDED = "+"
SchemeKind = TypeVar("SchemeKind", WeightScheme, ActivationScheme)


def assigners() -> list[str]:
    """List the shipped passes for assigning codes to weights; a recipe has exactly one of them."""
    return [name for name in plugins.PASSES.shipped() if _assigns(PassStep(name=name))]


def _assigns(step: PassStep) -> bool:
    """Tell whether a pass assigns codes to linears without any; a pass that improves codes requires them."""
    declared = plugins.PASSES.of(step)
    return "codes" in declared.ensures and "codes" not in declared.requires


class CalibrationChoice(Closed):
    """Choice of a calibration set, and how much of it is used.

    Args:
        set: shipped name or path (folder with `card.yaml`, `.txt`, `.jsonl`, `.csv`, `.parquet`, `datasets` folder);
            `PATH:COLUMN` names a table's column.
        samples: number of sequences.
        generated: share of the sequences that the model writes itself, sampled from its own probabilities, to cover
            more kinds of text than the set. For decoders only; scores never use them.
        tokens: tokens in a sequence.
        template: `chat` applies the model's chat template to the texts, or `messages`, of calibration and scores.
        images: number of images, for a set of images; for a vision-language model, name or path of a set of images:
            every second sequence then begins with one.
        experts: treatment of an expert with too few tokens: `force` calibrates it on all tokens of its layer, `keep`
            leaves it in high precision.
        expert_tokens: tokens that an expert needs.
    """

    set: str = "prose-en"
    samples: int = Field(default=16, gt=0)
    generated: float = Field(default=0.0, ge=0, le=1)
    tokens: int = Field(default=512, gt=0)
    template: Literal["chat"] | None = None
    images: Annotated[int, Field(gt=0)] | str = 128
    experts: Literal["force", "keep"] = "force"
    expert_tokens: int = Field(default=64, ge=0)

    @property
    def pictures(self) -> str | None:
        """Set of images for a vision-language model; None for text alone."""
        return self.images if isinstance(self.images, str) else None


class Override(Closed):
    """Another scheme for the layers that a glob matches; the glob must match at least one.

    `weights: null` keeps those layers in high precision. A mapping replaces the named fields of the default scheme; if
    it changes the format, fields that the new format does not allow take its defaults. `activations: null` leaves the
    inputs of those layers in floating point. A part that is not named stays unchanged; an override that names neither
    keeps the layers in high precision. `lm_head` matches the language-model head whatever its name in the model; it
    must not be in `keep`.
    """

    match: str
    weights: dict[str, Any] | None = None
    activations: dict[str, Any] | None = None

    def concerns(self, kind: type[WeightScheme | ActivationScheme]) -> bool:
        """Tell whether the override changes weights, or activations."""
        activations = "activations" in self.model_fields_set
        return activations if kind is ActivationScheme else "weights" in self.model_fields_set or not activations

    def over(self, scheme: SchemeKind | None, kind: type[SchemeKind]) -> SchemeKind | None:
        """Apply the override to a scheme. Raises ValueError if the result is no valid scheme."""
        named = self.weights if kind is WeightScheme else self.activations
        if named is None:
            return None
        base = scheme.model_dump() if scheme is not None else {}
        if named.get("granularity", base.get("granularity")) != base.get("granularity"):
            base.pop("group", None)
        if kind is WeightScheme and named.get("format", base.get("format")) != base.get("format"):
            base = _carried(base, named["format"])
        return _checked(f"override {self.match}", kind, {**base, **named})

    @model_serializer(mode="wrap")
    def _as_given(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Write null and absent differently."""
        named = {"match"} | ({"weights"} if self.concerns(WeightScheme) else set())
        named |= {"activations"} if self.concerns(ActivationScheme) else set()
        return {name: value for name, value in handler(self).items() if name in named}


def _carried(fields: dict[str, Any], name: Any) -> dict[str, Any]:
    """Return the fields of a scheme that are valid for another format too."""
    if name not in plugins.FORMATS:
        return fields  # the validation that follows reports it
    rules = plugins.FORMATS.load(name).rules
    group, granularity = fields.get("group"), fields.get("granularity")
    if granularity not in rules.granularities or group not in (rules.groups or [group]):
        fields = {key: value for key, value in fields.items() if key not in ("granularity", "group")}
    known = {"symmetric": rules.symmetric, "scale": rules.scales}
    return {key: value for key, value in fields.items() if key not in known or value in known[key]}


class PassStep(Closed):
    """One pass with its validated settings; `code` is the user's file that defines it, if any."""

    name: str
    settings: Any = None
    code: CodeFile | None = None

    @property
    def reference(self) -> str:
        """Pass as the recipe names it: its name, or the path of its file."""
        return self.name if self.code is None else str(self.code.path)


class ExportStep(Closed):
    """One export with its options."""

    name: str
    options: dict[str, Any] = Field(default_factory=dict)

    @property
    def settings(self) -> Any:
        """Options parsed by the exporter: its `Options`."""
        return plugins.EXPORTERS.load(self.name).Options(**self.options)


class Gates(Closed):
    """Conditions for accepting the result. Names end in `_max` or `_min`.

    Args:
        kl_max: mean KL divergence from the original, nats a token.
        top1_agreement_min: share of positions with the same most likely token as the original.
        perplexity_ratio_max: perplexity divided by the original's.
        top1_drop_max: loss of a classifier's accuracy against the original, in percentage points.
        agreement_min: share of images that a classifier puts into the original's class.
        recall_drop_max: loss of an encoder's recall at 1 on pairs, in percentage points.
        cosine_min: mean cosine similarity with the original's output; the smallest over several outputs.
        bits_per_weight_max: bits a weight of the quantized layers, including scales and zero points.
        recovery_min: task (`piqa`, or `hellaswag acc_norm`) -> the lower bound of its score over the original's.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    kl_max: float | None = None
    top1_agreement_min: float | None = None
    perplexity_ratio_max: float | None = None
    top1_drop_max: float | None = None
    agreement_min: float | None = None
    recall_drop_max: float | None = None
    cosine_min: float | None = None
    bits_per_weight_max: float | None = None
    recovery_min: dict[str, float] | None = None


def _checked(name: str, model: type[Document], values: dict[str, Any]) -> Document:
    """Validate the values of a named entry as a document; raises Inside."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        problem = error.errors()[0]
        keys = tuple(str(part) for part in problem["loc"])
        known = did_you_mean(".".join(keys), model.model_fields) if problem["type"] == "extra_forbidden" else ""
        rule = f"{problem['msg'].removeprefix('Value error, ')}; {known}".rstrip("; ")
        raise Inside(rule, (name, *keys), problem["input"]) from None


class Recipe(Closed):
    """Instructions of a compile: an ordered list of passes with settings, exports, and gates.

    Args:
        keep: layers that stay in the source's dtype: globs or roles. `lm_head` is the only role that could be
            quantized: without it here, a decoder's head is quantized too, always by rounding to nearest.
        on_indivisible: what to do if the group does not divide K: `error`; `keep` the layer in high precision; `pad`
            the last group with zeros, which `onnx` and `checkpoint: {layout: dense}` can hold and packed layouts
            cannot; or `shrink` the group to the largest of 256, 128, 64, 32, 16 that divides K. (Only powers of two:
            kernels need them, and the weights do not depend on the export.)
    """

    schema_: Annotated[Literal[1], Field(alias="schema")] = 1
    name: str = ""
    summary: str
    models: list[Said] = Field(default=["decoder", "encoder"], min_length=1)
    seed: int = Field(default=0, ge=0)
    calibration: CalibrationChoice = CalibrationChoice()
    scheme: Scheme = Scheme()
    keep: list[str] = Field(default=["embeddings", "lm_head"])
    overrides: list[Override] = Field(default=[])
    on_indivisible: Literal["error", "keep", "pad", "shrink"] = "error"
    passes: list[PassStep] = Field(default=[])
    export: list[ExportStep] = Field(default=[ExportStep(name="checkpoint")], min_length=1)
    gates: Gates = Gates()

    @field_validator("models", mode="after")
    @classmethod
    def _each_once(cls, value: list[Kind]) -> list[Kind]:
        """Drop duplicates: `vision` of an older recipe and today's word are one kind."""
        return list(dict.fromkeys(value))

    @field_validator("passes", mode="before")
    @classmethod
    def _read_passes(cls, value: Any, info: ValidationInfo) -> list[PassStep]:
        steps = []
        for reference, settings in steps_of(value):
            step = PassStep(name=reference)
            if content.is_path(reference):
                step = _own(reference, **(info.context or {}))
            elif reference not in plugins.PASSES:
                raise ValueError(f"no pass is called {reference!r}; {did_you_mean(reference, plugins.PASSES.names())}")
            checked = _checked(reference, plugins.PASSES.of(step).Settings, settings)
            steps.append(step.model_copy(update={"settings": checked}))
        return steps

    @field_validator("export", mode="before")
    @classmethod
    def _read_export(cls, value: Any) -> list[ExportStep]:
        steps = []
        for name, options in steps_of(value):
            if name not in plugins.EXPORTERS:
                raise ValueError(f"no exporter is called {name!r}; {did_you_mean(name, plugins.EXPORTERS.names())}")
            _checked(name, plugins.EXPORTERS.load(name).Options, options)
            steps.append(ExportStep(name=name, options=options))
        twice = [step.name for step in steps if sum(other.name == step.name for other in steps) > 1]
        if twice:
            raise ValueError(f"{twice[0]} is listed twice; an exporter has one folder")
        return steps

    @model_validator(mode="after")
    def _one_assigner(self) -> Self:
        assigning = [step for step in self.passes if _assigns(step)]
        # a later pass may improve the codes of an earlier one: gptq, then round
        improving = [step for step in assigning[1:] if "unassigned" not in plugins.PASSES.of(step).requires]
        if self.passes and self.scheme.weights is not None and len(assigning) - len(improving) != 1:
            names = ", ".join(step.name for step in assigning) or "none"
            raise ValueError(f"exactly one of {', '.join(assigners())} assigns the codes; found {names}")
        if assigning and self.scheme.weights is None:
            raise ValueError(
                f"{assigning[0].name} assigns codes, but there is no weight scheme; "
                "add `scheme: {weights: {format: int8}}`, or weights={'format': 'int8'} of a Pipeline"
            )
        if self.scheme.weights is not None and not self.passes:
            raise ValueError("a weight scheme needs a pass that assigns the codes; add `rtn: {}`")
        return self

    @model_validator(mode="after")
    def _schemes_go_together(self) -> Self:
        for override in self.overrides:
            override.over(self.scheme.weights, WeightScheme)
            override.over(self.scheme.activations, ActivationScheme)
        if self.scheme.activations is not None and self.scheme.weights is None:
            raise ValueError("quantized activations need quantized weights; add `scheme: {weights: {format: int8}}`")
        return self

    @classmethod
    def load(cls, reference: str | Path, changes: Sequence[str] = (), *, allow_code: bool = False) -> Recipe:
        """Read a shipped recipe by name or a file by path, apply `--set` changes, and validate everything.

        Args:
            reference: shipped name or path, optionally with add-ons: `awq-int4+kv-fp8`. (A `Path` is always one file.)
            changes: texts `PATH=YAML`; PATH begins with a top-level key of the recipe, or with a pass or an export.
            allow_code: whether to run the files that its passes name (`./my_pass.py`, relative to the recipe's folder).

        Raises:
            InputError: one line, with a did-you-mean; `code-not-allowed`, `plugin-broken`, `plugin-clash`.
        """
        given.demand("recipe", reference, (str, Path), "a name or a path")
        first, *others = [reference] if isinstance(reference, Path) else reference.split(ADDED)
        data, name = _read(first)
        for other in others:
            addition, suffix = _read(other)
            data, name = _laid_over(data, addition, str(other)), f"{name}+{suffix}"
        file = content.as_reference(first)
        base = Path(file).parent if content.is_path(file) else Path()
        return cls.from_dict(data, name=name, where=str(reference), changes=changes, base=base, allow_code=allow_code)

    @classmethod
    def from_dict(
        cls,
        data: Any,
        *,
        name: str,
        where: str = "recipe",
        changes: Sequence[str] = (),
        base: Path | None = None,
        allow_code: bool = False,
    ) -> Recipe:
        """Validate a mapping as a recipe; paths of passes are relative to `base`, by default the current folder.

        Raises:
            InputError: `recipe-invalid`, `set-invalid`, and the errors of code from outside that `load` raises.
        """
        if isinstance(data, dict):
            for change in demand_changes(changes):
                data = apply_change(data, change, keys=_KEYS)
            data = {**data, "name": name}
        context = {"where": where, "base": base or Path(), "allowed": allow_code}
        rule = "a recipe is a YAML mapping"
        return validated(cls, data, where=where, code="recipe-invalid", rule=rule, context=context)

    @classmethod
    def done(cls, data: Mapping[str, Any]) -> Recipe:
        """Read the recipe of a finished bundle from its manifest: calibration set and gates.

        Passes, scheme and exports are left out: they have run, perhaps with code that is not here. Raises InputError
        `recipe-invalid`.
        """
        left = {key: value for key, value in data.items() if key not in ("passes", "scheme", "overrides", "export")}
        return cls.from_dict(left, name=str(data.get("name", "")), where="the bundle's recipe")

    def outside(self) -> list[dict[str, str]]:
        """List the plug-ins from outside: files of passes and packages, with the sha256 of the code that runs."""
        files = [(step.name, step.code) for step in self.passes if step.code is not None]
        plug_ins = [{"kind": "pass", "name": name, "path": code.public, "sha256": code.sha256} for name, code in files]
        named: list[tuple[plugins.Kind[Any], str]] = []
        named += [(plugins.PASSES, step.name) for step in self.passes if step.code is None]
        named += [(plugins.EXPORTERS, step.name) for step in self.export]
        named += [(plugins.FORMATS, name) for name in self._formats()]
        for kind, name in dict.fromkeys(named):
            plug_ins += [
                {"kind": kind.singular, "name": name, "sha256": offer.sha256}
                | {"package": offer.package, "version": offer.version}
                for offer in ([] if name in kind.shipped() else kind.offers()[name])
            ]
        return plug_ins

    def _formats(self) -> list[str]:
        parts = (self.scheme.weights, self.scheme.activations, self.scheme.kv_cache)
        changed = [named for override in self.overrides for named in (override.weights, override.activations) if named]
        return [part.format for part in parts if part] + [named["format"] for named in changed if "format" in named]

    @property
    def code(self) -> list[CodeFile]:
        """User's files with passes of the recipe."""
        return [step.code for step in self.passes if step.code is not None]

    def as_dict(self) -> dict[str, Any]:
        """Return the form in the manifest, which `from_dict` reads."""
        data = self.model_dump(mode="json", by_alias=True, exclude={"passes", "export", "schema_"})
        return {
            "schema": 1,
            **data,
            "passes": [{step.reference: step.settings.model_dump(mode="json")} for step in self.passes],
            "export": [{step.name: step.options} for step in self.export],
        }

    def weights_for(
        self, layer: str, role: str | None = None, mixed: WeightScheme | None = None
    ) -> WeightScheme | None:
        """Return the weight scheme of a layer by its full name; the last matching override wins; None keeps the layer.

        Args:
            role: second name that overrides may use: `lm_head`.
            mixed: scheme from a mixture; None is the recipe's default.

        Raises:
            InputError: `recipe-invalid`, overrides that are valid alone but not together.
        """
        return self._overridden(mixed or self.scheme.weights, WeightScheme, layer, role)

    def activations_for(self, layer: str) -> ActivationScheme | None:
        """Return the scheme of a layer's input by the layer's full name; overrides apply as in `weights_for`."""
        return self._overridden(self.scheme.activations, ActivationScheme, layer)

    def _overridden(
        self, scheme: SchemeKind | None, kind: type[SchemeKind], layer: str, role: str | None = None
    ) -> SchemeKind | None:
        for override in self.overrides:
            if override.concerns(kind) and (fnmatchcase(layer, override.match) or role == override.match):
                try:
                    scheme = override.over(scheme, kind)
                except ValueError as error:
                    raise InputError("recipe-invalid", layer, str(error), "overrides make one valid scheme") from None
        return scheme


def _own(reference: str, *, where: str = "recipe", base: Path = Path(), allowed: bool = False) -> PassStep:
    """Run the user's file of a pass, if that is allowed."""
    if not allowed:
        rule = "code that a recipe names runs only if you allow it"
        remedy = "read the file, then add --allow-code, or allow_code=True in Python"
        raise InputError("code-not-allowed", where, f"the pass {reference} is a file of code", rule, remedy)
    code = plugins.PASSES.run(base / Path(reference).expanduser())
    return PassStep(name=code.path.stem, code=code)


# first keys of a change; the recipe's name comes from its file
_KEYS = [field.alias or name for name, field in Recipe.model_fields.items() if name != "name"]


def _read(reference: str | Path) -> tuple[Any, str]:
    """Return the YAML and the name of a recipe."""
    path = content.find("recipes", content.as_reference(reference))
    data = read_yaml(path)
    if isinstance(data, dict) and data.get("name", path.stem) != path.stem:
        rule, remedy = "a recipe's name is its file's stem", "rename the file, or leave `name` out"
        raise InputError("recipe-invalid", f"{reference}: name", data["name"], rule, remedy)
    return data, path.stem


def _laid_over(data: Any, addition: Any, name: str) -> Any:
    """Add an add-on's scheme and gates to a recipe; the result is for models that both allow."""
    if not isinstance(data, dict):
        return data  # the validation that follows reports it
    if isinstance(addition, dict) and addition.get("passes"):
        rule, remedy = "an add-on after + has only a scheme and gates", "use it by itself"
        raise InputError("recipe-invalid", name, "has passes", rule, remedy)
    Recipe.from_dict(addition, name=name, where=name)  # also checks that it is a mapping
    combined = dict(data)
    for key in ("scheme", "gates"):
        combined[key] = {**(data.get(key) or {}), **(addition.get(key) or {})}
    default = ["decoder", "encoder"]
    both = [today(kind) for kind in addition.get("models", default)]
    combined["models"] = [kind for kind in data.get("models", default) if today(kind) in both]
    return combined
