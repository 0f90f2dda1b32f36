"""llama.cpp runs what was written: its logits are those of the values that the codes stand for.

llama.cpp rounds the inputs of its products to 8 bits, so the file of floats says first how near logits can be.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zoo
from exported import export, write_as

from quantkit.errors import InputError, MissingDependency
from quantkit.exporters.gguf.exporter import EXPORT
from quantkit.exporters.values import Values
from quantkit.runtimes import load_runtime
from quantkit.runtimes.llama_cpp import words_of
from quantkit.scheme import WeightScheme

needed = pytest.mark.skipif(
    not __import__("importlib.util").util.find_spec("llama_cpp"), reason="llama-cpp-python compiles for minutes"
)
IDS = np.random.default_rng(0).integers(0, 256, (2, 24))
# of logits, relative to the largest: floats in 32 bits; 8-bit inputs of products, in blocks of 32
FLOATS, ROUNDED = 2e-3, 5e-2


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory, merging_tokenizer: Any) -> dict[str, tuple[Path, Values]]:
    """A bundle's folder of each kind of weights, with what was decided."""
    place = tmp_path_factory.mktemp("gguf")
    zoo.tiny("llama", vocab_size=len(merging_tokenizer), hidden_size=256, intermediate_size=256).save_pretrained(
        place / "m"
    )
    merging_tokenizer.save_pretrained(place / "m")
    found = {}
    for name in ("float32", "float16", "q8_0", "q4_k"):
        how = None if name.startswith("float") else WeightScheme(format=name)
        made = export(place / "m", place / name, how, layout="dense")
        write_as(EXPORT, made.folder, made.source, made.stream, made.results, options(name))
        values = Values.of_results(made.source, made.stream, made.results)
        found[name] = made.folder, EXPORT.held(values, EXPORT.Options(**options(name)))
    return found


def options(name: str) -> dict[str, str]:
    return {"floats": "float16" if name == "float16" else "float32"}


def expected(values: Values) -> Any:
    return values.stream.answers(torch.from_numpy(IDS)).all().float().numpy()


def error(found: Any, wanted: Any) -> float:
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


@needed
@pytest.mark.parametrize(
    ("name", "limit"), [("float32", FLOATS), ("float16", FLOATS), ("q8_0", ROUNDED), ("q4_k", ROUNDED)]
)
def test_logits_are_those_of_the_codes(written: dict[str, tuple[Path, Values]], name: str, limit: float) -> None:
    folder, values = written[name]
    model = load_runtime("llama_cpp").open(folder, 1)
    wanted = expected(values)
    state = model.state(2, 24)
    first = model.run(state, IDS[:, :16])
    steps = [model.run(state, IDS[:, [at]]) for at in range(16, 24)]
    assert error(np.concatenate([first, *steps], axis=1), wanted) < limit
    with pytest.raises(InputError, match="prompt-too-long"):
        model.run(state, IDS[:, :1])


@needed
def test_codes_are_nearer_to_their_own_values_than_to_others(written: dict[str, tuple[Path, Values]]) -> None:
    model = load_runtime("llama_cpp").open(written["q4_k"][0], 1)
    found = model.run(model.state(2, 24), IDS)
    own, floats = (error(found, expected(written[name][1])) for name in ("q4_k", "float32"))
    assert own < floats / 2


@needed
def test_padding_is_skipped_and_steps_repeat(written: dict[str, tuple[Path, Values]]) -> None:
    model = load_runtime("llama_cpp").open(written["float32"][0], 1)
    mask = np.ones((2, 20), np.int64)
    mask[1, :4] = 0
    padded = IDS[:, :20].copy()
    padded[1, 4:] = IDS[1, :16]
    found = model.run(model.state(2, 20), padded, mask)
    wanted = expected(written["float32"][1])
    assert error(found[1, 4:], wanted[1, :16]) < FLOATS and error(found[0], wanted[0, :20]) < FLOATS
    for step in (model.decode(2, 8), model.prefill(1, 8)):
        step()
        step()


@needed
def test_its_tokenizer_is_the_models(written: dict[str, tuple[Path, Values]], merging_tokenizer: Any) -> None:
    from quantkit.runtimes.llama_cpp.library import Vocabulary

    words = Vocabulary(written["float32"][0] / "gguf" / "model.gguf")
    for text in ("Hello, world 12", "Grüße 日本"):
        ids = merging_tokenizer(text)["input_ids"]
        assert words.encode(text) == ids
        assert words.decode(ids) == text
    assert 257 in words.ends
    with pytest.raises(InputError, match="no-chat-template"):
        words.chat("hello")


def test_its_tokenizer_is_the_models_where_llama_cpp_is_not_here(
    written: dict[str, tuple[Path, Values]], merging_tokenizer: Any
) -> None:
    words = words_of(written["float32"][0] / "gguf" / "model.gguf")
    for text in ("Hello, the world 12", "Grüße 日本"):
        assert words.encode(text) == merging_tokenizer(text)["input_ids"]
        assert words.encode(text, special=False) == merging_tokenizer(text, add_special_tokens=False)["input_ids"]
        assert words.decode(words.encode(text)) == text
    assert words.ends == {257}
    with pytest.raises(InputError, match="no-chat-template"):
        words.chat("hello")


@needed
def test_both_tokenizers_are_one(written: dict[str, tuple[Path, Values]]) -> None:
    from quantkit.runtimes.llama_cpp.library import Vocabulary

    path = written["float32"][0] / "gguf" / "model.gguf"
    ours, theirs = words_of(path), Vocabulary(path)
    assert ours.ends == theirs.ends
    for text in ("Hello, the world 12", "Grüße 日本", "a</s>b"):
        assert ours.encode(text) == theirs.encode(text)


@needed
def test_a_damaged_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "gguf").mkdir()
    (tmp_path / "gguf" / "model.gguf").write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(InputError, match="gguf-unreadable"):
        load_runtime("llama_cpp").open(tmp_path)
    with pytest.raises(InputError, match=r"gguf-unreadable.*no such file"):
        load_runtime("llama_cpp").open(tmp_path / "elsewhere")


def test_what_is_missing_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import sys

    from quantkit.runtimes.llama_cpp import library

    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    with pytest.raises(MissingDependency, match=r"-e '\.\[gguf\]'"):
        library.LlamaLibrary()


def test_what_openmp_is_told_is_told_for_the_library_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    from quantkit.runtimes.llama_cpp.library import _waiting_shortly

    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    before = dict(os.environ)
    with _waiting_shortly():
        assert "OMP_WAIT_POLICY" not in os.environ and int(os.environ["GOMP_SPINCOUNT"]) > 0
    assert dict(os.environ) == before
