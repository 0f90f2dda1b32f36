"""The configs that ship: figures of `config.json` of well-known models, one YAML each in `shipped_configs/`."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from quantkit.content import Closed, read_yaml, validated
from quantkit.errors import unknown_name

FOLDER = Path(__file__).parent / "shipped_configs"


class Published(Closed):
    """What others say of its size.

    Args:
        parameters: all of them.
        digits: how many of them are significant; None for an exact count.
        source: who says so.
    """

    parameters: int = Field(gt=0)
    digits: int | None = Field(default=None, gt=0)
    source: str


class ShippedModel(Closed):
    """A file of `models/`.

    Args:
        published: its parameters, by others.
        config: of its `config.json`, what sizes follow from.
    """

    schema_: Annotated[Literal[1], Field(alias="schema")]
    summary: str
    source: str
    published: Published
    config: dict[str, Any]


@cache
def names() -> tuple[str, ...]:
    """All that ship."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.yaml")))


def summaries() -> dict[str, str]:
    """Name -> what it is."""
    return {name: read(name).summary for name in names()}


def read(name: str) -> ShippedModel:
    """One of them. Raises InputError (`unknown-model`, with a did-you-mean)."""
    if name not in names():
        raise unknown_name("model", name, names())
    path = FOLDER / f"{name}.yaml"
    return validated(ShippedModel, read_yaml(path), where=str(path), code="model-invalid")
