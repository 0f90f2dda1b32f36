"""Measure again: what was asked for is what scores, or it is said."""

import json
from pathlib import Path
from typing import Any

import pytest
import zoo

from quantkit.calibrate.tokens.ids import ids_sha256

TOKENS = 32


def ids_file(path: Path, count: int, seed: int) -> Path:
    rows = zoo.ids(count, TOKENS, seed=seed).tolist()
    path.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
    return path


@pytest.fixture
def tiny(tmp_path: Path, byte_tokenizer: Any) -> Path:
    folder = tmp_path / "tiny.model"
    return zoo.save(folder, byte_tokenizer, "llama", vocab_size=len(byte_tokenizer), num_hidden_layers=1)


def test_measure_scores_on_what_was_asked_for_or_says_what_instead(
    quantkit: Any, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quantkit.pipeline.blocks.tokens.SCORED", 300)
    recipe, own, out = tmp_path / "small.yaml", ids_file(tmp_path / "own.jsonl", 12, 1), tmp_path / "out"
    recipe.write_text(
        f"schema: 1\nsummary: small\ncalibration: {{set: {own}, samples: 4, tokens: {TOKENS}}}\n"
        "scheme: {weights: {format: int4, granularity: group, group: 32, symmetric: false}}\n"
        "passes: [gptq]\nexport: [{checkpoint: {layout: pack-quantized}}]\n"
    )
    assert quantkit("compile", tiny, "--recipe", recipe, "--out", out, "--no-speed").code == 0
    again = ("measure", out, "--baseline", tiny, "--runtime", "torch")

    def scored(ran: Any) -> set[tuple[str, str]]:
        assert ran.code == 0, ran.err
        rows = ran.envelope["result"]["measurements"]
        return {(row["data"]["set"], row["data"]["sha256"]) for row in rows if row["name"] == "accuracy.kl"}

    # token ids of one's own: these, and nothing was done otherwise
    other = ids_file(tmp_path / "other.jsonl", 10, 2)
    ran = quantkit(*again, "--calibration", other, "--json")
    assert scored(ran) == {("other.jsonl", ids_sha256(zoo.ids(10, TOKENS, seed=2).numpy()))}
    assert {each["code"] for each in ran.envelope["decisions"]} == {"note"}  # ids have no splits, and are used as given
    assert ran.envelope["warnings"] == []
    # the bundle's own file is not in it: other text, in the envelope and on screen
    ran = quantkit(*again, "--json")
    assert {name for name, _ in scored(ran)} == {"prose-en"}
    (taken,) = ran.envelope["decisions"]
    assert (taken["code"], taken["from"], taken["to"]) == ("scored-elsewhere", "path:own.jsonl", "prose-en")
    assert ran.envelope["warnings"] == [
        "path:own.jsonl: path:own.jsonl → prose-en; a bundle does not hold the file that it was calibrated on"
    ]
    assert "path:own.jsonl → prose-en" in " ".join(quantkit(*again).out.split())
    # what calibrated does not score, and too little is not made up for
    for path, problem in ((own, "was calibrated on it"), (ids_file(tmp_path / "few.jsonl", 3, 3), "too short")):
        refused = quantkit(*again, "--calibration", path).err.splitlines()[-1]
        assert refused.startswith(f"error: [nothing-to-score-on] {path}: ") and problem in refused
