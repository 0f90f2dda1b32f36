"""How a bundle multiplies: its blocks, its head, and where its graph has a second way, many rows; and what each takes.

A head that is stored otherwise than the blocks has a variant of its own. A graph with `prefill: int8` multiplies fewer
than `ROWS` rows by its codes, and more in integers; which of both a batch takes follows from its rows alone.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from quantkit.bundle import Bundle
from quantkit.exporters.onnx.integers.prefill import ROWS
from quantkit.measurement.operators.rows import ALL
from quantkit.measurement.rows import Row
from quantkit.model.sizes.shapes import LinearShapes
from quantkit.report.kit import words

# what `exporters/onnx/integers/products.py` does by token
MANY = "int8.token"
_BLOCK = re.compile(r"\.\d+\.")


@dataclass(frozen=True)
class BundleWays:
    """The variants that the products of a bundle are.

    Args:
        body: of most linears.
        head: (K, N) of the head; None where it is not quantized.
        head_variant: of it.
        many: of all but the head, from `ROWS` rows on; "" where there is one way.
    """

    body: str
    head: tuple[int, int] | None
    head_variant: str
    many: str

    @property
    def variants(self) -> list[str]:
        """Each once."""
        return list(dict.fromkeys(each for each in (self.body, self.head_variant, self.many) if each))

    def at(self, rows: int) -> str:
        """What the blocks' products are for so many rows."""
        return self.many if self.many and rows >= ROWS else self.body

    def said(self, rows: Sequence[Row], shapes: LinearShapes, batches: Sequence[int]) -> list[str]:
        """What all products take at each batch, as the bundle multiplies, and the head's share; nothing where that is
        neither several ways nor a head."""
        if len(self.variants) < 2 and self.head is None:
            return []
        timed = {
            ((row.op.K, row.op.N), row.op.M, row.settings.get("variant")): row
            for row in rows
            if row.name == "latency.op" and row.op is not None and row.op.layer != ALL and row.value is not None
        }
        found = []
        for batch in batches:
            ours = theirs = head = 0.0
            for each in shapes.distinct():
                last = self.head == (each.K, each.N)
                row = timed.get(((each.K, each.N), batch, self.head_variant if last else self.at(batch)))
                if row is None or row.baseline is None:
                    break
                ours += each.count * (row.value or 0.0)
                theirs += each.count * row.baseline.value
                head += (row.value or 0.0) if last else 0.0
            else:
                text = f"batch {batch}, as this bundle multiplies ({self.at(batch)}): {words.moment(ours)} of products"
                text += f" against {words.moment(theirs)}, {words.times(theirs / ours)} the speed"
                if self.head is not None:
                    what = f"{self.head[0]}x{self.head[1]}, {self.head_variant}"
                    text += f"; the head ({what}) takes {words.percent(head / ours, 0)}"
                found.append(text)
        return found


def ways(bundle: Bundle, own: Sequence[tuple[str, str, tuple[int, int]]]) -> BundleWays:
    """How a bundle multiplies.

    Args:
        own: (name, variant, (K, N)) of each quantized linear.
    """
    names = [variant for _, variant, _ in own]
    last = next(((variant, shape) for name, variant, shape in own if not _BLOCK.search(name)), None)
    manifest = bundle.manifest
    asked = any(
        (options or {}).get("prefill") == "int8"
        for step in manifest.recipe.get("export") or []
        for options in step.values()
    )
    second = asked and not any(each.code == "prefill-same" for each in manifest.decisions)
    return BundleWays(
        max(names, key=names.count),
        None if last is None else last[1],
        "" if last is None else last[0],
        MANY if second else "",
    )
