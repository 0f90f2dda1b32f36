"""What a comparison says: on one screen, with nothing of a model's text that acts on a terminal."""

from __future__ import annotations

import io
from dataclasses import replace

from quantkit.measurement.compared import Compared, DecidedCell, NamedSide, Quantity, WordFlip, WordFlips, decided
from quantkit.report.compared import because, document
from quantkit.report.kit.screen import write
from quantkit.stats.evidence import KNOWN, MeasuredValue, difference

SIDE = NamedSide("./a bundle", "a" * 64, "awq-int4", 170_000_000, 4.3125, "torch")


def cell(
    name: str, effect: float, reach: float, *, what: str = "accuracy", margin: float = 0.01, **shape: int
) -> DecidedCell:
    measured = MeasuredValue(effect, (effect - reach, effect + reach))
    evidence = difference(measured, KNOWN, margin=margin, logarithm=what != "accuracy")
    how = "counted" if what == "size" else "ratio of ratios" if what == "latency" else "paired"
    batch = shape.pop("batch", None)
    one = Quantity(what, name, 0.4, 0.5, "1", how, evidence, n=60, batch=batch, shape=shape)  # type: ignore[arg-type]
    return DecidedCell.of(one, decided([one])[0])


CELLS = [
    cell("accuracy.next_word", 0.03, 0.002),
    cell("accuracy.kl", -0.2, 0.01),
    cell("accuracy.cosine", 0.0, 0.001),
    cell("latency.decode_step", 0.0, 0.2, what="latency", margin=0.05, batch=8, context=1024, new_tokens=1),
    cell("latency.prefill", 0.0, 0.001, what="latency", margin=0.05, batch=1, context=0, new_tokens=256),
    cell("size.bytes", 0.0, 0.0, what="size"),
]
DATA = Compared(
    "a-model",
    "decoder",
    SIDE,
    SIDE,
    "mixed",
    1,
    because(CELLS, "decoder"),
    CELLS,
    data="6,132 positions of prose-en (eval)",
)


def shown(data: Compared) -> str:
    out = io.StringIO()
    write([document(data)], out)
    return out.getvalue()


def test_every_answer_has_its_reason() -> None:
    worse, better, open_, same = because(CELLS, "decoder")
    assert worse == "B is worse in next word right: −3.00 points (−3.20 to −2.80), margin 1.00"
    assert better == "B is better in KL divergence: −0.2000 nats (−0.2100 to −0.1900), margin 0.0100"
    assert open_.startswith("not decided, decode step, batch 8, context 1,024: 1.000 times as long (0.819 to 1.221)")
    assert "would have been seen" in open_
    assert same == "the same within the margin: cosine; prefill, batch 1, 256 tokens; weights"


def test_many_reasons_of_one_kind_are_counted() -> None:
    assert because([CELLS[0]] * 5, "decoder")[3:] == ["and in 2 more"]
    assert because([CELLS[3]] * 5, "decoder")[3:] == ["nor 2 more"]
    assert because([CELLS[5]] * 5, "decoder")[0].endswith("; and 2 more")


def test_times_of_several_devices_are_told_apart() -> None:
    here, there = (replace(CELLS[4], device=name, runtime="onnxruntime") for name in ("A Processor", "Another"))
    assert "A Processor" not in because([here], "decoder")[0]
    (said,) = because([here, there], "decoder")
    assert "prefill, batch 1, 256 tokens, A Processor, onnxruntime; prefill, batch 1, 256 tokens, Another" in said


def test_the_screen_says_how_it_is_known_and_fits() -> None:
    said = shown(DATA)
    for part in ("verdict: mixed", "item by item", "ratio of ratios", "4.31 bits a weight", "40.0 %", "inconclusive"):
        assert part in said, part
    assert "twice" in shown(replace(DATA, cells=[replace(CELLS[0], confirmed=True)]))
    assert "once" in shown(replace(DATA, cells=[replace(CELLS[0], confirmed=False)]))
    assert max(map(len, said.splitlines())) <= 80


def test_text_of_a_model_does_nothing_to_a_terminal() -> None:
    flip = WordFlip(0, 3, "A", 2.0, "\x1b[2Jof the [red]", " war\r", "\x1b]0;x\x07", 0.6, " day", 0.2)
    said = shown(replace(DATA, flips=WordFlips(3, 1, 6132, 0.6, 0.97, [flip])))
    assert "… \\x1b[2Jof the [red] [·war\\r]" in said
    assert not {"\x1b", "\x07", "\r"} & set(said)
    assert "3 next words that A alone has right, 1 that B alone has" in said
