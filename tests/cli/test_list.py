"""List: every kind, every summary."""

from typing import Any

import pytest

from quantkit import plugins
from quantkit.report import catalog


def test_list_shows_every_kind_with_its_summaries(quantkit: Any) -> None:
    ran = quantkit("list")
    assert all(kind in ran.out for kind in catalog.KINDS)
    found = quantkit("list", "--json").envelope["result"]
    assert list(found) == list(catalog.KINDS)
    assert found["passes"] == plugins.PASSES.summaries()
    assert all(summary for names in found.values() for summary in names.values())
    assert list(quantkit("list", "formats", "--json").envelope["result"]) == ["formats"]


def test_the_matrix_is_a_kind_of_its_own(quantkit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = quantkit("list", "matrix", "--target", "l4", "--format", "fp8_e4m3", "--json").envelope["result"]["matrix"]
    assert {(each["runtime"], each["part"], each["state"]) for each in found} >= {
        ("vllm", "inputs", "native"),
        ("torch", "weights", "emulated"),
        ("llama_cpp", "weights", "absent"),
    }
    assert all(each["source"] for each in found)
    shown = quantkit("list", "matrix", "--target", "l4", "--format", "fp8_e4m3").out
    assert "no such block format" in shown
    monkeypatch.setenv("COLUMNS", "80")
    whole = quantkit("list", "matrix").out.splitlines()
    assert len(whole) <= 60
    assert max(map(len, whole)) <= 80
    assert "…" not in "".join(whole)
    # a target is named below each runtime that runs something there, or among `all others`
    vllm = whole[whole.index("vllm") + 1 : whole.index("llama_cpp")]
    (line,) = [text for text in vllm if text.startswith("cpu-arm")]
    result = quantkit("list", "matrix", "--target", "cpu-arm", "--runtime", "vllm", "--json").envelope["result"]
    native = {(each["format"], each["part"]) for each in result["matrix"] if each["state"] == "native"}
    assert native == {*((name, "weights") for name in ("float32", "float16", "bfloat16", "int8")), ("int8", "inputs")}
    assert line.split()[1:] == ["W", "W", "W", "WI"]
    assert quantkit("list", "matrix", "--target", "l4").out.count("\n") <= 60
    for asked, code in ((["matrx"], "unknown-kind"), (["targets", "--target", "l4"], "option-unused")):
        ran = quantkit("list", *asked, "--json")
        assert (ran.code, ran.envelope["error"]["code"]) == (2, code)
