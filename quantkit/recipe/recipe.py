"""A recipe: what to do to a model. One flat YAML, validated whole before torch is imported.

The schema is closed: an unknown key, pass, format or setting is an error that names the known ones. `Recipe.load` also
validates the settings of every pass, because pass modules are torch-free.
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
from quantkit.errors import InputError, did_you_mean
from quantkit.kinds import Kind, Said, today
from quantkit.plugins.outside import CodeFile
from quantkit.recipe.changes import apply_change, demand_changes, steps_of
from quantkit.scheme import ActivationScheme, Scheme, WeightScheme

# between a recipe's name and that of what is laid over it
ADDED = "+"
SchemeKind = TypeVar("SchemeKind", WeightScheme, ActivationScheme)


def assigners() -> list[str]:
    """Return the shipped passes that decide the codes of the weights; a recipe has exactly one that does."""
    return [name for name in plugins.PASSES.shipped() if _assigns(PassStep(name=name))]


def _assigns(step: PassStep) -> bool:
    """Tell whether a pass finds linears without codes and leaves them with; one that improves codes requires them."""
    found = plugins.PASSES.of(step)
    return "codes" in found.ensures and "codes" not in found.requires


class CalibrationChoice(Closed):
    """Which calibration set, and how much of it.

    Args:
        set: a shipped name or a path (folder with `card.yaml`, `.txt`, `.jsonl`, `.parquet`, `datasets` folder).
        samples: sequences.
        generated: share of these that the model writes itself, drawn from its own probabilities: of every kind of text
            that it knows, where a set has one kind. Decoders alone; nothing scores on them.
        tokens: tokens a sequence.
        template: `chat`: the model's chat template writes the texts, or `messages`, that calibrate and that score it.
        images: of a set of images, instead of sequences.
        experts: what becomes of an expert that too few tokens are routed to: `force` calibrates it on all tokens that
            reach its layer, `keep` leaves it in high precision.
        expert_tokens: how many are enough.
    """

    set: str = "prose-en"
    samples: int = Field(default=16, gt=0)
    generated: float = Field(default=0.0, ge=0, le=1)
    tokens: int = Field(default=512, gt=0)
    template: Literal["chat"] | None = None
    images: int = Field(default=128, gt=0)
    experts: Literal["force", "keep"] = "force"
    expert_tokens: int = Field(default=64, ge=0)


class Override(Closed):
    """Another scheme for the layers that a glob matches; it must match something.

    `weights: null` keeps those layers in high precision; a mapping replaces the named fields of the default scheme.
    With another format, fields that it does not have as they are take its defaults.
    `activations` likewise: null leaves the inputs of those layers alone. What is not named stays as it is; an override
    that names neither keeps the layers in high precision.
    `lm_head` matches the language-model head whatever its name in the model; it has to be absent from `keep`.
    """

    match: str
    weights: dict[str, Any] | None = None
    activations: dict[str, Any] | None = None

    def concerns(self, kind: type[WeightScheme | ActivationScheme]) -> bool:
        """Tell whether it says something about weights, or about activations."""
        activations = "activations" in self.model_fields_set
        return activations if kind is ActivationScheme else "weights" in self.model_fields_set or not activations

    def over(self, scheme: SchemeKind | None, kind: type[SchemeKind]) -> SchemeKind | None:
        """Return what it makes of a scheme that it concerns. Raises ValueError where that is none."""
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
        """Null and absent are two things."""
        named = {"match"} | ({"weights"} if self.concerns(WeightScheme) else set())
        named |= {"activations"} if self.concerns(ActivationScheme) else set()
        return {name: value for name, value in handler(self).items() if name in named}


def _carried(fields: dict[str, Any], name: Any) -> dict[str, Any]:
    """Return the fields of a scheme that another format has as well."""
    if name not in plugins.FORMATS:
        return fields  # validation, which follows, says so
    rules = plugins.FORMATS.load(name).rules
    group, granularity = fields.get("group"), fields.get("granularity")
    if granularity not in rules.granularities or group not in (rules.groups or [group]):
        fields = {key: value for key, value in fields.items() if key not in ("granularity", "group")}
    known = {"symmetric": rules.symmetric, "scale": rules.scales}
    return {key: value for key, value in fields.items() if key not in known or value in known[key]}


class PassStep(Closed):
    """One pass with its validated settings; `code`: the user's own file that it stands in."""

    name: str
    settings: Any = None
    code: CodeFile | None = None

    @property
    def reference(self) -> str:
        """As a recipe names it, wherever that lies."""
        return self.name if self.code is None else str(self.code.path)


class ExportStep(Closed):
    """One destination with its options."""

    name: str
    options: dict[str, Any] = Field(default_factory=dict)

    @property
    def settings(self) -> Any:
        """The options as the exporter takes them: its `Options`."""
        return plugins.EXPORTERS.load(self.name).Options(**self.options)


class Gates(Closed):
    """What must hold for the result to be accepted. Names end in `_max` or `_min`.

    Args:
        kl_max: mean KL divergence from the original, nats a token.
        top1_agreement_min: share of positions whose most likely token is the original's.
        perplexity_ratio_max: perplexity over the original's.
        top1_drop_max: how many points of percent of images right a classifier loses against the original.
        agreement_min: share of images that a classifier puts into the original's class.
        recall_drop_max: how many points of percent of pairs an encoder no longer finds first.
        cosine_min: mean cosine between outputs and the original's; of several outputs the least.
        bits_per_weight_max: of the quantized layers, scales and zero points counted.
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


def _checked(what: str, model: type[Document], values: dict[str, Any]) -> Document:
    """`values` as `model`; a ValueError of one line otherwise."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(str(part) for part in problem["loc"])
        known = did_you_mean(key, model.model_fields) if problem["type"] == "extra_forbidden" else ""
        place = f"{what}: {key}" if key else what
        raise ValueError(f"{place}: {problem['msg'].removeprefix('Value error, ')}; {known}".rstrip("; ")) from None


class Recipe(Closed):
    """What to do: an ordered list of passes with settings, what to export, what must hold.

    Args:
        keep: what is left in the source's dtype: globs of layers, or roles. `lm_head` is the one role that could be
            quantized: without it here, a decoder's head is one of the layers, always rounded to nearest.
        on_indivisible: where the group does not divide K: an `error`; `keep` the layer in high precision; `pad` its
            last group with zeros, which `onnx` and `checkpoint: {layout: dense}` hold, and who reads packed weights
            does not take; or `shrink` the group to the largest of 256, 128, 64, 32, 16 up to it that divides K. (Powers
            of two alone: kernels want them, and the weights are the same whatever is exported.)
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
        """Return one of before, `vision`, and its own of today are one."""
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
            checked = _checked(f"pass {reference}", plugins.PASSES.of(step).Settings, settings)
            steps.append(step.model_copy(update={"settings": checked}))
        return steps

    @field_validator("export", mode="before")
    @classmethod
    def _read_export(cls, value: Any) -> list[ExportStep]:
        steps = []
        for name, options in steps_of(value):
            if name not in plugins.EXPORTERS:
                raise ValueError(f"no exporter is called {name!r}; {did_you_mean(name, plugins.EXPORTERS.names())}")
            _checked(f"export {name}", plugins.EXPORTERS.load(name).Options, options)
            steps.append(ExportStep(name=name, options=options))
        twice = [step.name for step in steps if sum(other.name == step.name for other in steps) > 1]
        if twice:
            raise ValueError(f"{twice[0]} is there twice; each destination has one folder")
        return steps

    @model_validator(mode="after")
    def _one_assigner(self) -> Self:
        assigning = [step for step in self.passes if _assigns(step)]
        # one that asks for nothing may also improve the codes of those before it: gptq, then round
        improving = [step for step in assigning[1:] if "unassigned" not in plugins.PASSES.of(step).requires]
        if self.passes and self.scheme.weights is not None and len(assigning) - len(improving) != 1:
            found = ", ".join(step.name for step in assigning) or "none"
            raise ValueError(f"exactly one of {', '.join(assigners())} assigns the codes; found {found}")
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
            raise ValueError(
                "activations are quantized for a product with quantized weights; add `scheme: {weights: …}`"
            )
        return self

    @classmethod
    def load(cls, reference: str | Path, changes: Sequence[str] = (), *, allow_code: bool = False) -> Recipe:
        """Read a shipped recipe by name or a file by path, apply `--set` changes, validate everything.

        Args:
            reference: a bare shipped name, or a path; add-ons may follow, `awq-int4+kv-fp8`. (A `Path` is one file,
                whatever its name.)
            changes: `PATH=YAML`; PATH begins with a top-level key of the recipe, or with a pass or an export in it.
            allow_code: run the files that its passes name (`./my_pass.py`, which begins at the recipe's own folder).

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
        """Validate a mapping as a recipe, whose passes' paths begin at `base`, by default the present folder.

        Raises:
            InputError: `recipe-invalid`, `set-invalid`, and those of code from outside, as `load`.
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
        """Return the recipe of a finished bundle, as its manifest has it: what it is measured on, and held to.

        What made it is left out: it was done, perhaps by code that is not here. Raises InputError `recipe-invalid`.
        """
        left = {key: value for key, value in data.items() if key not in ("passes", "scheme", "overrides", "export")}
        return cls.from_dict(left, name=str(data.get("name", "")), where="the bundle's recipe")

    def outside(self) -> list[dict[str, str]]:
        """What of it does not ship: the files of its passes and what packages offer, with the sha256 of what runs."""
        files = [(step.name, step.code) for step in self.passes if step.code is not None]
        found = [{"kind": "pass", "name": name, "path": code.public, "sha256": code.sha256} for name, code in files]
        named: list[tuple[plugins.Kind[Any], str]] = []
        named += [(plugins.PASSES, step.name) for step in self.passes if step.code is None]
        named += [(plugins.EXPORTERS, step.name) for step in self.export]
        named += [(plugins.FORMATS, name) for name in self._formats()]
        for kind, name in dict.fromkeys(named):
            found += [
                {"kind": kind.singular, "name": name, "sha256": offer.sha256}
                | {"package": offer.package, "version": offer.version}
                for offer in ([] if name in kind.shipped() else kind.offers()[name])
            ]
        return found

    def _formats(self) -> list[str]:
        parts = (self.scheme.weights, self.scheme.activations, self.scheme.kv_cache)
        own = [named for each in self.overrides for named in (each.weights, each.activations) if named]
        return [part.format for part in parts if part] + [each["format"] for each in own if "format" in each]

    @property
    def code(self) -> list[CodeFile]:
        """The user's own files that its passes stand in."""
        return [step.code for step in self.passes if step.code is not None]

    def as_dict(self) -> dict[str, Any]:
        """Return the contract's form, which `from_dict` reads back."""
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
        """Return the weight scheme of a layer by its full name; the last override that matches wins; None keeps it.

        Args:
            role: another name that overrides may call it by: `lm_head`.
            mixed: what a mixture gives it; None is the default of the recipe.

        Raises:
            InputError: `recipe-invalid`, overrides that each make sense, but not one upon the other.
        """
        return self._overridden(mixed or self.scheme.weights, WeightScheme, layer, role)

    def activations_for(self, layer: str) -> ActivationScheme | None:
        """Tell how the input of a layer, by its full name, is quantized; as `weights_for`."""
        return self._overridden(self.scheme.activations, ActivationScheme, layer)

    def _overridden(
        self, scheme: SchemeKind | None, kind: type[SchemeKind], layer: str, role: str | None = None
    ) -> SchemeKind | None:
        for override in self.overrides:
            if override.concerns(kind) and (fnmatchcase(layer, override.match) or role == override.match):
                try:
                    scheme = override.over(scheme, kind)
                except ValueError as error:
                    raise InputError("recipe-invalid", where=layer, value=str(error), rule="overrides add up") from None
        return scheme


def _own(reference: str, *, where: str = "recipe", base: Path = Path(), allowed: bool = False) -> PassStep:
    """Return a pass in the user's own file, run where that is allowed."""
    if not allowed:
        rule = "code of a recipe runs only where that is asked for"
        remedy = "read it, then --allow-code, or allow_code=True in Python"
        raise InputError("code-not-allowed", where, f"the pass {reference} is a file of code", rule, remedy)
    code = plugins.PASSES.run(base / Path(reference).expanduser())
    return PassStep(name=code.path.stem, code=code)


# what a change can begin with; the name is the file's
_KEYS = [field.alias or name for name, field in Recipe.model_fields.items() if name != "name"]


def _read(reference: str | Path) -> tuple[Any, str]:
    """Return a recipe's YAML, and its name."""
    path = content.find("recipes", content.as_reference(reference))
    data = read_yaml(path)
    if isinstance(data, dict) and data.get("name", path.stem) != path.stem:
        rule, remedy = "a recipe's name is its file's stem", "rename the file, or leave `name` out"
        raise InputError("recipe-invalid", f"{reference}: name", data["name"], rule, remedy)
    return data, path.stem


def _laid_over(data: Any, addition: Any, name: str) -> Any:
    """A recipe with an add-on, which has no passes: its scheme and gates are laid over, and the models are those of
    both.
    """
    if not isinstance(data, dict):
        return data  # validation, which follows, says so
    if isinstance(addition, dict) and addition.get("passes"):
        rule, remedy = "what is added to a recipe with + has a scheme and gates alone", "use it by itself"
        raise InputError("recipe-invalid", name, "has passes", rule, remedy)
    Recipe.from_dict(addition, name=name, where=name)  # among others, that it is a mapping
    found = dict(data)
    for key in ("scheme", "gates"):
        found[key] = {**(data.get(key) or {}), **(addition.get(key) or {})}
    default = ["decoder", "encoder"]
    both = [today(kind) for kind in addition.get("models", default)]
    found["models"] = [kind for kind in data.get("models", default) if today(kind) in both]
    return found
