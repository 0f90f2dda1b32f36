"""Schemes: how the weights of a linear, its inputs, and keys and values are stored.

A format declares its rules in its file in `formats/`; they are checked here. `recipe.py` applies schemes to layers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from quantkit import plugins
from quantkit.content import Closed
from quantkit.errors import did_you_mean


def _known_format(name: str) -> str:
    if plugins.format_rules(name) is None:
        raise ValueError(f"no format is called {name!r}; {did_you_mean(name, plugins.format_names())}")
    return name


FormatName = Annotated[str, AfterValidator(_known_format)]
# how a fixed scale is chosen: see `ActivationScheme`
Range = Literal["minmax", "moving-average", "percentile", "entropy", "mse"]


class WeightScheme(Closed):
    """Storage of the weights of one linear, [N, K].

    The format's file (`quantkit/formats/NAME.py`, `rules`) declares the allowed values and the defaults:
    `{format: nvfp4}` alone is a complete scheme.

    Args:
        format: name from `quantkit list formats`.
        granularity: weights that share a scale: the whole `tensor` (scale [1, 1]), an output `channel` ([N, 1]), a
            `group` of consecutive inputs ([N, K/group]), or a `block` of group x group weights
            ([⌈N/group⌉, ⌈K/group⌉]). `[4096, 4096]` in groups of 128 has scale `[4096, 32]`.
        group: inputs in a group, or side of a block; only with these two.
        symmetric: whether there is no zero point or offset.
        scale: storage type of the scale; `e8m0` is a power of two, `fp8_e4m3` comes with one more factor for the whole
            tensor, `double` are 8-bit codes with a float32 for every 256, `super` are integers of 4 to 8 bits with a
            float16 for every 256 weights. A bfloat16 model stores bfloat16 scales instead of float16 ones, because its
            runtimes read them so.
    """

    format: FormatName
    granularity: Literal["tensor", "channel", "group", "block"] = "channel"
    group: int | None = Field(default=None, gt=0)
    symmetric: bool = True
    scale: Literal["float32", "float16", "bfloat16", "e8m0", "fp8_e4m3", "double", "super"] = "float16"

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_the_format(cls, data: Any) -> Any:
        form = data.get("format") if isinstance(data, dict) else None
        rules = plugins.format_rules(form) if isinstance(form, str) else None
        if rules is None:
            return data
        filled = {"granularity": next(iter(rules.granularities)), "symmetric": rules.symmetric[0]}
        filled |= {"scale": rules.scales[0], **data}
        if filled.get("group") is None and isinstance(filled["granularity"], str):
            filled["group"] = rules.granularities.get(filled["granularity"])
        return filled

    @model_validator(mode="after")
    def _group_with_group(self) -> Self:
        if (self.granularity in ("group", "block")) != (self.group is not None):
            remedy = "" if self.group is None else "; add `group: null`"
            raise ValueError(f"`group` goes with `granularity: group` or `block`, and only with them{remedy}")
        return self

    @model_validator(mode="after")
    def _what_the_format_has(self) -> Self:
        rules, wrong = self._rules, list[str]()
        if self.granularity not in rules.granularities:
            wrong.append(f"has granularity {_either(rules.granularities)}, not {self.granularity}")
        if rules.groups and self.group not in (None, *rules.groups):
            wrong.append(f"has groups of {_either(rules.groups)}, not {self.group}")
        if self.symmetric not in rules.symmetric:
            wrong.append(f"is always {'symmetric: it has no zero points' if rules.symmetric[0] else 'asymmetric'}")
        if self.scale not in rules.scales:
            wrong.append(f"has scales of type {_either(rules.scales)}, not {self.scale}")
        if wrong:
            raise ValueError("; ".join(f"{self.format} {text}" for text in wrong))
        return self

    @property
    def _rules(self) -> plugins.Rules:
        rules = plugins.format_rules(self.format)
        assert rules is not None  # checked by `FormatName`
        return rules

    @property
    def multiple(self) -> int:
        """Divisor of K: the group, or several groups stored together."""
        if self.granularity != "group" or self.group is None:
            return 1
        return self._rules.multiple or self.group

    def padding(self, columns: int) -> int:
        """Count the padding columns of the last group of K = `columns`; blocks are cut off at the edge instead."""
        return -columns % self.multiple

    @property
    def trains_scale(self) -> bool:
        """True if the scale is a float of this matrix alone (of a tensor, linears may share it), without an offset."""
        alone = self.scale in ("float32", "float16", "bfloat16") and self.granularity != "tensor"
        return alone and (self.symmetric or self.format.startswith("int"))

    @property
    def rows_apart(self) -> bool:
        """True if rows share nothing, so that a matrix can be split and joined along N."""
        return self.granularity in ("channel", "group") and self.scale not in ("fp8_e4m3", "double")


def _either(names: Iterable[object]) -> str:
    *others, last = [str(name) for name in names]
    return f"{', '.join(others)} or {last}" if others else last


class ActivationScheme(Closed):
    """Quantization of a linear's input [..., K] before the product: `formats/base/activation.py`.

    Args:
        format: format that can be multiplied: `int8`, `fp8_e4m3`.
        granularity: features that share a scale: a `token` ([..., 1]), a `group` of its features ([..., K/group]), or
            the whole `tensor`. None is by input channel: a product sums over channels, so it cannot be factored out.
        dynamic: whether scales are computed from the values as the model runs; else calibration fixes one scale for the
            whole tensor.
        symmetric: whether there is no zero point.
        group: features in a group; only with `granularity: group`.
        range: method for a fixed scale (`calibrate/statistics/observed.py`): the full range seen in calibration
            (`minmax`), the moving average of the samples' extremes (`moving-average`; the order of more than a
            hundred samples matters), 99.99 % of the values (`percentile`), the least change of the distribution
            (`entropy`), or the least squared error (`mse`). Values beyond the range saturate.
    """

    format: FormatName
    granularity: Literal["tensor", "token", "group"] = "token"
    dynamic: bool = True
    symmetric: bool = True
    group: int | None = Field(default=None, gt=0)
    range: Range = "minmax"

    @field_validator("format")
    @classmethod
    def _computes(cls, value: str) -> str:
        return _bounded(value, "activations")

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if (self.granularity == "group") != (self.group is not None):
            raise ValueError("`group` goes with `granularity: group`, and only with it")
        if not self.dynamic and self.granularity != "tensor":
            rule = f"a fixed scale is one for the whole tensor, not for each {self.granularity}"
            raise ValueError(f"{rule}; use `granularity: tensor`, or `dynamic: true`")
        if self.dynamic and self.range != "minmax":
            raise ValueError("`range` chooses a fixed scale; it goes with `dynamic: false`")
        _check_zero_point(self.format, self.symmetric)
        return self


class CacheScheme(Closed):
    """Storage of keys and values [batch, heads, tokens, features]; keys after the rotary embedding.

    Args:
        format: `fp8_e4m3` or `int8`.
        granularity: values that share a scale: the whole `tensor` of keys or values, a `head` or a `channel` of it, all
            fixed by calibration; or a `token` of a head, whose scale is computed from its values.
        symmetric: whether there is no zero point.
        range: method for a fixed scale, as for activations.
    """

    format: FormatName
    granularity: Literal["tensor", "head", "channel", "token"] = "tensor"
    symmetric: bool = True
    range: Range = "minmax"

    @field_validator("format")
    @classmethod
    def _computes(cls, value: str) -> str:
        return _bounded(value, "a KV cache")

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.granularity in ("token", "channel") and self.range != "minmax":
            raise ValueError(f"`range` chooses the fixed scale of a tensor or head, not of a {self.granularity}")
        _check_zero_point(self.format, self.symmetric)
        return self

    @property
    def dynamic(self) -> bool:
        """True if scales are computed from the values as the model runs."""
        return self.granularity == "token"


def _bounded(name: str, what: str) -> str:
    """Check the format of activations (`Rules.activations`). Raises ValueError."""
    rules = plugins.format_rules(name)
    if rules is None or not rules.activations:
        raise ValueError(f"{what} cannot be in {name}; use {_either(plugins.format_names(activations=True))}")
    return name


def _check_zero_point(name: str, symmetric: bool) -> None:
    if not symmetric and not name.startswith("int"):
        raise ValueError(f"{name} has no zero point; use `symmetric: true`")


# user's name of a GGUF mixture -> format of most of its matrices
MIXTURES = {
    **{"q3_k_m": "q3_k", "q4_0": "q4_0", "iq4_nl": "iq4_nl", "q4_k_m": "q4_k", "q5_k_m": "q5_k", "q8_0": "q8_0"},
    **{"iq4_xs": "iq4_xs", "iq3_s": "iq3_s", "iq3_xxs": "iq3_xxs", "iq2_m": "iq2_s"},
}


class Scheme(Closed):
    """Default scheme of the linears inside blocks.

    Args:
        mixture: GGUF mixture by name, such as `q4_k_m`: every linear gets the type that llama.cpp gives it
            (`model/sizes/storage.py`). `weights` is then the type of most of them, and must not be written.
    """

    mixture: (
        Literal["q3_k_m", "q4_0", "iq4_nl", "q4_k_m", "q5_k_m", "q8_0", "iq4_xs", "iq3_s", "iq3_xxs", "iq2_m"] | None
    ) = None
    weights: WeightScheme | None = None
    activations: ActivationScheme | None = None
    kv_cache: CacheScheme | None = None

    @model_validator(mode="before")
    @classmethod
    def _weights_of_the_mixture(cls, data: Any) -> Any:
        name = data.get("mixture") if isinstance(data, dict) else None
        if not isinstance(name, str) or name not in MIXTURES or data.get("weights") is not None:
            return data
        return {**data, "weights": {"format": MIXTURES[name]}}

    @model_validator(mode="after")
    def _one_or_the_other(self) -> Self:
        if self.mixture is not None and self.weights != WeightScheme(format=MIXTURES[self.mixture]):
            raise ValueError("`mixture` decides how weights are stored; leave out `weights`, or `mixture`")
        return self
