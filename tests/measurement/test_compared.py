"""The verdict on two versions: a pure function of what was decided."""

from dataclasses import replace

import pytest

from quantkit.bundle import LayerEntry
from quantkit.measurement.compared import DecidedCell, Quantity, decided, exit_code, layer_pairs, verdict
from quantkit.stats.evidence import KNOWN, MeasuredValue, difference

SWAPPED = {"A better": "B better", "B better": "A better"}
# (effect, reach of the interval) against a margin of 1: what B is
WORSE, BETTER, SAME, OPEN = (5.0, 0.5), (-5.0, 0.5), (0.0, 0.5), (0.0, 5.0)
AT_WORST_SAME, AT_BEST_SAME = (-1.5, 2.0), (1.5, 2.0)


def asked(effect: float, reach: float, how: str = "apart") -> Quantity:
    evidence = difference(MeasuredValue(effect, (effect - reach, effect + reach)), KNOWN, margin=1.0, alarm=0.0)
    return Quantity("accuracy", "accuracy.kl", None, None, "nat", how, evidence)  # type: ignore[arg-type]


def cells(*effects: tuple[float, float]) -> list[DecidedCell]:
    found = [asked(*each) for each in effects]
    return [DecidedCell.of(each, decision) for each, decision in zip(found, decided(found), strict=True)]


@pytest.mark.parametrize(
    ("effects", "answer", "code"),
    [
        ([SAME, SAME], "same", 0),
        ([WORSE, SAME], "A better", 1),
        ([BETTER, SAME], "B better", 0),
        ([WORSE, BETTER], "mixed", 1),
        ([WORSE, BETTER, OPEN], "mixed", 1),
        ([SAME, OPEN], "inconclusive", 3),
        ([WORSE, OPEN], "inconclusive", 1),
        ([BETTER, OPEN], "inconclusive", 3),
        ([BETTER, AT_WORST_SAME], "B better", 0),
        ([SAME, AT_WORST_SAME], "inconclusive", 0),
        ([WORSE, AT_BEST_SAME], "A better", 1),
        ([], "inconclusive", 3),
    ],
)
def test_the_verdict_and_the_same_with_the_sides_exchanged(
    effects: list[tuple[float, float]], answer: str, code: int
) -> None:
    found = cells(*effects)
    assert (verdict(found), exit_code(found)) == (answer, code)
    assert verdict(cells(*((-effect, reach) for effect, reach in effects))) == SWAPPED.get(answer, answer)


def test_what_was_counted_is_no_part_of_the_family() -> None:
    one = asked(1.2, 1.0)
    counted = [asked(0.0, 0.0, "counted")] * 50
    alone, *_ = decided([one])
    among, *others = decided([one, *counted])
    assert (among, {each.answer for each in others}) == (alone, {"same"})
    crowd, *_ = decided([one] * 50)
    assert crowd.p_worse > alone.p_worse


def test_layers_are_paired_by_name() -> None:
    layer = LayerEntry(name="a", shape=[2, 2], scheme={"format": "int4"}, bits_per_weight=4.0, error=0.1)
    other = layer.model_copy(update={"error": 0.2})
    pairs = layer_pairs(
        [layer, layer.model_copy(update={"name": "b"})], [other, other.model_copy(update={"name": "c"})]
    )
    assert [(pair.name, pair.errors, pair.differs) for pair in pairs] == [
        ("a", (0.1, 0.2), False),
        ("b", (0.1, 0.0), True),
        ("c", (0.0, 0.2), True),
    ]
    assert pairs[1].as_dict()["b"] is None
    assert replace(pairs[0], b=layer.model_copy(update={"error": None})).errors is None
