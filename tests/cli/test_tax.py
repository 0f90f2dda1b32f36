"""`quantkit tax` on the command line; times are planted."""

from pathlib import Path
from typing import Any

import planted_ops
import pytest

from quantkit.measurement.operators import run as ops_rows
from quantkit.measurement.operators import run as ops_run
from quantkit.measurement.rows import read_rows


@pytest.fixture(autouse=True)
def planted_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops_run, "run", lambda job, progress=None: planted_ops.rows_of_a_run(job))


def test_rows_page_and_verdict(quantkit: Any, tmp_path: Path) -> None:
    page, rows = tmp_path / "tax.html", tmp_path / "rows.jsonl"
    ran = quantkit(
        *("tax", "--shape", "256x64", "--format", "int4,nf4", "--batch", "1:4", "--html", page, "--out", rows, "--json")
    )
    assert ran.code == 0, ran.err
    result = ran.envelope["result"]
    (advice,) = result["advice"]
    assert (advice["answer"], advice["format"]) == ("ship_it", "int4.g128.level4")
    assert page.stat().st_size > 1e6
    names = {row.name for row in read_rows(rows)}
    assert {"latency.op", "tax.total", "tax.break_even", "ceiling.read", "ceiling.launch"} <= names
    assert len(read_rows(rows)) == len(result["measurements"])


def test_the_screen_shows_the_advice_for_the_traffic(quantkit: Any) -> None:
    ran = quantkit("tax", "vit-b-16", "--format", "int4", "--traffic", "1:0.8,4:0.2")
    assert ran.code == 0, ran.err
    assert "ship int4.g128.level4" in ran.out
    assert "over the traffic" in ran.out


def test_what_comes_before_the_timing_is_forecast_apart(quantkit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else seconds of ceilings, at a share of nothing, are taken for the pace of what two seconds were asked for."""

    def run(job: Any, progress: Any) -> Any:
        for share, words in (
            (0.0, "ceilings"),
            (0.0, "256x64: preparing"),
            (0.0, "256x64, batch 1"),
            (1.0, "ceilings"),
        ):
            progress(share, words)
        return planted_ops.rows_of_a_run(job)

    monkeypatch.setattr(ops_run, "run", run)
    ran = quantkit("tax", "--shape", "256x64", "--format", "int4", "--batch", "1", "--seconds", "2")
    stages = [line.split()[1] for line in ran.err.splitlines()[1:] if "%" in line]
    assert stages == ["ceilings", "preparing", "timing"], ran.err


def test_noise_that_hides_the_answer_ends_with_three(quantkit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(job: Any, progress: Any = None) -> Any:
        times = {"float32": lambda M: 1e-3, "int4.g128.level4": lambda M: 0.9e-3}
        timed = planted_ops.sweep(times, job.batches, world=planted_ops.World(noise=0.8))
        return [*planted_ops.ceilings(), *ops_rows.rows(timed, planted_ops.SETTING)]

    monkeypatch.setattr(ops_run, "run", run)
    ran = quantkit("tax", "--shape", "1024x4096", "--format", "int4", "--batch", "1", "--json")
    assert ran.code == 3, ran.out
    assert ran.envelope["error"]["code"] == "inconclusive"
    assert "--seconds" in ran.envelope["error"]["remedy"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--shape", "100x64"), "the group must divide K"),
        (("--shape", "4096"), "KxN"),
        (("--shape", "64x64", "--batch", "0"), "numbers from 1 up"),
        (("--shape", "64x64", "--device", "cuda"), "no GPU here"),
        (("--shape", "64x64", "--traffic", "1:2"), "add up to 1"),
        (("--shape", "64x64", "--format", "mxfp4"), "emulating it would not measure it"),
        (("lama-3-8b",), "did you mean 'llama-3-8b'"),
        ((), "--shape"),
        (("--shape", "64x64", "--format", "nf4", "--out", "nowhere/rows.jsonl"), "file-unwritable"),
        (("--shape", "64x64", "--format", "nf4", "--html", "."), "is a folder"),
    ],
)
def test_bad_input_is_one_line(quantkit: Any, arguments: tuple[str, ...], words: str) -> None:
    ran = quantkit("tax", *arguments)
    assert ran.code == 2
    assert words in ran.err
    assert ran.err.count("\n") == 1
