"""Nothing in a folder runs by being opened, whatever is answered on standard input."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zoo

from quantkit.errors import InputError
from quantkit.exporters.checkpoint import reload
from quantkit.model.source import pretrained
from quantkit.pipeline import compare as words
from quantkit.runtimes.torch import classes
from quantkit.runtimes.torch.runtime import RUNTIME

CODE = """
from pathlib import Path
from transformers import LlamaConfig, PreTrainedTokenizerFast
Path({ran!r}).touch()
class OddConfig(LlamaConfig):
    model_type = "odd-llama"
class OddTokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture
def hostile(tmp_path: Path, byte_tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder `model/` of a bundle whose config and tokenizer are code; whoever is asked says yes."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("builtins.input", lambda *said: "y")
    folder = tmp_path / "bundle" / "model"
    zoo.tiny("llama").save_pretrained(folder)
    byte_tokenizer.save_pretrained(folder)
    (folder / "odd.py").write_text(CODE.format(ran=str(tmp_path / "ran")), encoding="utf-8")
    for name, changed in (
        ("config.json", {"model_type": "odd-llama", "auto_map": {"AutoConfig": "odd.OddConfig"}}),
        (
            "tokenizer_config.json",
            {"tokenizer_class": "OddTokenizer", "auto_map": {"AutoTokenizer": [None, "odd.OddTokenizer"]}},
        ),
    ):
        path = folder / name
        path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | changed), encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    "opened",
    [
        pretrained.config,
        pretrained.tokenizer,
        classes.described,
        words._loaded,
        lambda folder: reload.config_of(folder, None),
        lambda folder: RUNTIME.load(_Bundle(folder)),
    ],
    ids=["config", "tokenizer", "runtime", "compare", "check", "load"],
)
def test_code_in_the_folder_is_refused_and_does_not_run(hostile: Path, opened: Callable[[Path], Any]) -> None:
    with pytest.raises(InputError) as caught:
        opened(hostile)
    assert caught.value.code == "remote-code"
    assert not (hostile.parent.parent / "ran").exists()


def test_the_same_folder_does_run_where_it_is_trusted(hostile: Path) -> None:
    assert type(pretrained.config(hostile, trust=True)).__name__ == "OddConfig"
    assert (hostile.parent.parent / "ran").exists()


def test_attention_is_not_fetched_from_the_hub(tmp_path: Path) -> None:
    zoo.tiny("llama").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    data = json.loads(path.read_text(encoding="utf-8")) | {"attn_implementation": "somebody/attention"}
    path.write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(InputError) as caught:
        pretrained.config(tmp_path)
    assert caught.value.code == "remote-code" and "somebody/attention" in caught.value.value


class _Bundle:
    def __init__(self, folder: Path) -> None:
        self.path, self.model_folder = folder.parent, folder

    def demand_intact(self, under: str) -> None:
        """As if the manifest listed all of it."""


@pytest.mark.parametrize("key", ["vocab", "merges", "vocab_file", "source_spm"])
def test_a_tokenizer_names_no_files(key: str, tmp_path: Path) -> None:
    (tmp_path / "secret.json").write_text('{"secret": 0}', encoding="utf-8")
    config = {"tokenizer_class": "Qwen2Tokenizer", key: str(tmp_path / "secret.json")}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(InputError, match="tokenizer-damaged"):
        pretrained.tokenizer(tmp_path)


def test_attention_is_torch_s_own(tmp_path: Path) -> None:
    zoo.tiny("llama").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    honest = json.loads(path.read_text(encoding="utf-8"))
    for name, allowed in (("flash_attention_2", False), ("sdpa", True), ("eager", True)):
        path.write_text(json.dumps(honest | {"attn_implementation": name}), encoding="utf-8")
        if allowed:
            pretrained.config(tmp_path)
        else:
            with pytest.raises(InputError, match="remote-code"):
                pretrained.network(type(zoo.tiny("llama")), tmp_path)
