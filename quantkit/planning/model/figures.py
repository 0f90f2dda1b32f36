"""The figures of a `config.json`, checked one by one as they are asked for: a number, a switch, the kinds of layers.

What is not there is an error, or the default of the model's own config class in transformers, which is then said.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quantkit.errors import InputError

# no config of a real model has larger numbers, and sums over them stay readable
LARGEST, MOST_LAYERS = 10_000_000, 10_000
_TYPES = {"float32": 32, "float16": 16, "bfloat16": 16}


class Figures:
    """One config, read figure by figure.

    Args:
        where: the file or name, for errors.
        defaults: key -> what transformers' config class takes where the key is absent.

    Attributes:
        assumed: what was taken for what the config leaves open, in words.
    """

    def __init__(self, config: Mapping[str, Any], where: str, defaults: Mapping[str, Any] | None = None) -> None:
        self.config, self.where = config, where
        self._defaults = defaults or {}
        self.assumed: list[str] = []

    def size(self, *keys: str, default: int | None = None, least: int = 1, most: int = LARGEST) -> int:
        """A whole number; `keys` are names of one figure, of which several may be there if they agree.

        Args:
            keys: the first is the one to complain about.
            default: where none is there and transformers has no default of its own; nothing is said about it.
            least, most: bounds.

        Raises:
            InputError: `config-invalid`.
        """
        value = self.maybe(*keys, least=least, most=most)
        if value is None:
            value = default
        if value is None:
            raise self.wrong(keys[0], "missing", f"a model of type {self.model_type!r} has it")
        return value

    def maybe(self, *keys: str, least: int = 1, most: int = LARGEST) -> int | None:
        """The same, where null and absent mean that there is none."""
        there = {key: self.config[key] for key in keys if self.config.get(key) is not None}
        for key, value in there.items():
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
                raise self.wrong(key, f"{value!r:.60}", f"a whole number from {least} to {most}")
        if len(set(there.values())) > 1:
            raise self.wrong(keys[0], ", ".join(f"{k} {v}" for k, v in there.items()), "names of one figure agree")
        if there:
            return int(next(iter(there.values())))
        if any(key in self.config for key in keys):
            return None  # null, which is said
        return self._default(keys[0])

    def flag(self, key: str, default: bool = False) -> bool:
        """A switch. Raises InputError `config-invalid`."""
        value = self.config.get(key)
        if value is None:
            return bool(self._defaults.get(key, default))
        if not isinstance(value, bool):
            raise self.wrong(key, f"{value!r:.60}", "true or false")
        return value

    def numbers(self, key: str) -> list[int]:
        """A list of whole numbers, empty where there is none. Raises InputError `config-invalid`."""
        value = self.config.get(key)
        if value is None:
            return []
        if not isinstance(value, list) or any(isinstance(x, bool) or not isinstance(x, int) for x in value):
            raise self.wrong(key, f"{value!r:.60}", "a list of whole numbers")
        return value

    @property
    def model_type(self) -> str:
        """As transformers calls it."""
        return str(self.config.get("model_type", ""))

    def dtype(self, name: str = "float32") -> str:
        """What the source stores; `name` where the config does not say, which is then said."""
        stated = self.config.get("dtype", self.config.get("torch_dtype"))
        if stated is None:
            self.assume(f"stored in {name}: the config has no dtype")
            return name
        plain = str(stated).removeprefix("torch.")
        if plain not in _TYPES:
            raise self.wrong("dtype", f"{stated!r:.60}", f"one of {', '.join(_TYPES)}")
        return plain

    def assume(self, what: str) -> None:
        """Say what was taken, once."""
        if what not in self.assumed:
            self.assumed.append(what)

    def wrong(self, key: str, value: str, rule: str, remedy: str = "check config.json") -> InputError:
        """The error for a figure."""
        return InputError("config-invalid", where=f"{self.where}: {key}", value=value, rule=rule, remedy=remedy)

    def _default(self, key: str) -> int | None:
        value = self._defaults.get(key)
        if value is not None:
            self.assume(f"{key} {value}, as transformers takes it for {self.model_type} where it is absent")
        return value
