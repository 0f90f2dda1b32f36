"""The tables against other toolkits say what the records say, and the score behind them is a plain KL."""

import importlib.util
import json
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from scipy import stats

PEERS = Path(__file__).parent.parent / "benchmarks" / "peers"


def module(name: str) -> ModuleType:
    """A file of the benchmarks, which are no package."""
    spec = importlib.util.spec_from_file_location(f"peers_{name}", PEERS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = loaded
    spec.loader.exec_module(loaded)
    return loaded


table, side = module("table"), module("side")


def planted(who: str, method: str, kl: list[float], samples: int = 8, **more: Any) -> Any:
    values = torch.tensor(kl, dtype=torch.float64)
    figures = {
        "sequences": len(kl),
        "kl": float(values.mean()),
        "kl_se": float(values.std() / math.sqrt(len(kl))),
        "kl_by_sequence": kl,
        "top1": 0.9,
    }
    found = {"scheme": "int4-g64", "side": who, "method": method, "texts": {"eval": figures}, "calibrated": True}
    found |= {"cpu_seconds": 10.0, "reader": "transformers", "how": "its defaults", "versions": {"torch": "2"}, **more}
    return table.Row("smollm2-135m", "2026-11-22", "abc", "a processor", samples, found)


def test_rows_of_more_text_stand_apart() -> None:
    rows = [planted("quantkit", "more text", [0.01, 0.011], samples=104), planted("quantkit", "ours", [0.05, 0.051])]
    rows.append(planted("peer", "theirs", [0.09, 0.091]))
    summary, page = table.summary(rows), table.page(rows, "smollm2-135m")
    assert "more text" not in summary
    assert page.index("`ours`") < page.index("104 sequences") < page.index("`more text`")


def test_the_documents_say_what_the_records_say() -> None:
    rows = table.records()
    assert len({(row.model, row.found["scheme"]) for row in rows}) >= 7
    made = table.blocks(rows)
    page = table.PAGE.read_text(encoding="utf-8")
    assert "<!-- comparisons" in page
    assert table.rendered(page, made) == page, "run python benchmarks/peers/table.py"
    for row in rows:
        told = row.failed or f"{row.kl()['kl']:.3f}"
        assert told in page, "what is recorded is told, whoever it flatters"


def test_a_record_holds_what_its_row_needs() -> None:
    for path in table.RECORDS.glob("*.json"):
        content = json.loads(path.read_text())
        (row,) = content["rows"]
        assert content["command"]
        assert content["settings"]["calibration"]
        if "failed" not in row:
            assert {"reader", "how", "versions", "cpu_seconds", "calibrated"} <= set(row), path.name


def test_a_peer_that_is_better_is_said_to_be() -> None:
    ours = planted("quantkit", "int4-best", [0.20, 0.30, 0.25, 0.31])
    theirs = planted("a-peer", "gptq", [0.10, 0.21, 0.16, 0.22])
    third = planted("b-peer", "awq", [0.40, 0.41, 0.46, 0.45])
    row = table.summary([ours, theirs, third]).splitlines()[-1]
    half = stats.sem([0.10, 0.21, 0.16, 0.22]) * stats.t.ppf(0.975, 3)
    assert f"a-peer gptq **0.172** ± {half:.3f}" in row
    assert "**0.265**" not in row
    assert row.endswith("| b-peer awq 0.430 |")
    assert "nobody" in table.summary([ours, theirs])


def test_a_difference_that_its_sequences_do_not_show_is_not_bold() -> None:
    ours = planted("quantkit", "int4-best", [0.20, 0.30, 0.25, 0.31])
    near = planted("a-peer", "gptq", [0.30, 0.20, 0.33, 0.25])
    assert "**" not in table.summary([ours, near]).splitlines()[-1]
    # intervals that overlap widely, but every sequence a little better
    shifted = planted("a-peer", "gptq", [value + 0.01 for value in (0.20, 0.30, 0.25, 0.31)])
    assert "`int4-best` **0.265**" in table.summary([ours, shifted])


def test_what_failed_is_listed_with_its_reason() -> None:
    failed = planted("a-peer", "gptq", [0.1, 0.2])
    failed.found["failed"] = "needs an accelerator"
    page = table.page([planted("quantkit", "int4-best", [0.2, 0.3]), failed], "smollm2-135m")
    assert "- a-peer gptq, int4-g64: needs an accelerator" in page


def test_what_a_side_offers_and_no_record_holds_is_listed() -> None:
    rows = [planted("hqq", "hqq", [0.1, 0.2]), planted("llm-compressor", "gptq", [0.1, 0.2])]
    missing = table.pending(rows, "smollm2-135m")
    assert "llm-compressor awq" in missing["int4-g64"]
    assert not {"hqq", "llm-compressor gptq"} & set(missing["int4-g64"])
    assert "hqq" in missing["int3-g64"]
    assert set(table.pending(rows, "gemma-3-270m")) == {"int4-g64", "int4-g64-symmetric"}


def test_bits_are_those_on_disk(tmp_path: Path) -> None:
    for name, tensors in {
        "float": {"model.layers.0.up.weight": torch.zeros(8, 64), "model.embed.weight": torch.zeros(10, 8)},
        "packed": {
            "model.layers.0.up.weight_packed": torch.zeros(8, 8, dtype=torch.int32),
            "model.layers.0.up.weight_scale": torch.zeros(8, 1, dtype=torch.float16),
            "model.layers.0.up.bias": torch.zeros(8),
            "model.embed.weight": torch.zeros(10, 8),
        },
    }.items():
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / "model.safetensors")
    assert side.bits_per_weight(tmp_path / "packed", tmp_path / "float") == 4 + 16 / 64
    (tmp_path / "none").mkdir()
    assert side.bits_per_weight(tmp_path / "none", tmp_path / "float") is None


def test_the_score_is_the_divergence_from_the_original() -> None:
    generator = torch.Generator().manual_seed(0)
    known, other = (torch.randn(3, 5, 11, generator=generator) for _ in range(2))
    rows = torch.randint(11, (3, 6), generator=generator)
    logits = iter(other)

    class Candidate:
        def __call__(self, ids: torch.Tensor) -> Any:
            # the last position predicts what is not there
            return type("Out", (), {"logits": torch.cat([next(logits), torch.zeros(1, 11)])[None]})

    found = side.score(known.numpy(), Candidate(), rows.tolist())
    expected = torch.nn.functional.kl_div(
        other.double().log_softmax(-1), known.double().log_softmax(-1), log_target=True, reduction="none"
    ).sum(-1)
    assert found["kl"] == pytest.approx(float(expected.mean()), rel=1e-5)
    assert found["kl_se"] == pytest.approx(float(stats.sem(expected.mean(-1).numpy())), rel=1e-4)
    assert found["perplexity"] == pytest.approx(
        math.exp(torch.nn.functional.cross_entropy(other.reshape(15, 11), rows[:, 1:].reshape(15))), rel=1e-5
    )
