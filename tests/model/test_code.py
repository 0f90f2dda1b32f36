"""A model's own code: it runs where the user trusts it, goes along with the model, and is trusted by its content."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from quantkit.errors import InputError
from quantkit.exporters.carried import carry
from quantkit.exporters.checkpoint import reload
from quantkit.model.source import pretrained
from quantkit.model.source.open import open_model, open_written
from quantkit.pipeline import compare as words
from quantkit.runtimes.torch import RUNTIME
from quantkit.runtimes.torch import reloaded as classes

CONFIG = "from transformers import LlamaConfig\nclass OwnConfig(LlamaConfig):\n    model_type = {!r}\n"
MODEL = "class {}(Base):\n    config_class = OwnConfig\n"
BASE = "from transformers import LlamaForCausalLM as Base\n"
WORDS = "from transformers import PreTrainedTokenizerFast\nclass OwnTokenizer(PreTrainedTokenizerFast):\n    pass\n"


def folder_with_code(place: Path, *, single: bool = False, native: bool = False, prefix: str = "") -> Path:
    """As on the hub: a file for the config, one for the model, which imports a third; or all of it in one."""
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(place)
    kind, name = ("llama", "LlamaForCausalLM") if native else ("ownllama", "OwnForCausalLM")
    if single:
        (place / "modeling_own.py").write_text(CONFIG.format(kind) + BASE + MODEL.format(name))
    else:
        (place / "configuration_own.py").write_text(CONFIG.format(kind))
        (place / "base_own.py").write_text(BASE)
        imports = "from .configuration_own import OwnConfig\nfrom .base_own import Base\n"
        (place / "modeling_own.py").write_text(imports + MODEL.format(name))
    where = "modeling_own" if single else "configuration_own"
    stated = json.loads((place / "config.json").read_text())
    own = {"AutoConfig": f"{prefix}{where}.OwnConfig", "AutoModelForCausalLM": f"{prefix}modeling_own.{name}"}
    stated |= {"model_type": kind, "architectures": [name], "auto_map": own}
    (place / "config.json").write_text(json.dumps(stated))
    return place


@pytest.fixture(autouse=True)
def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(tmp_path / "modules")
    for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
        monkeypatch.delitem(sys.modules, name)


def written(source_folder: Path, out: Path, *, trust: bool) -> Path:
    """What a bundle has of a model, weights as they are."""
    source = open_model(str(source_folder), trust_remote_code=trust)
    out.mkdir()
    carry(source, out)
    (out / "model.safetensors").write_bytes((source_folder / "model.safetensors").read_bytes())
    return out


@pytest.mark.parametrize("options", [{}, {"single": True}, {"native": True}, {"prefix": "org/name--"}])
def test_trusted_code_goes_along_and_plain_transformers_runs_it(options: dict[str, object], tmp_path: Path) -> None:
    folder = folder_with_code(tmp_path / "m", **options)  # type: ignore[arg-type]
    out = written(folder, tmp_path / "out", trust=True)
    theirs = AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True, local_files_only=True)
    assert "transformers_modules" in type(theirs).__module__
    # it is trusted by what it is: no one is asked again
    assert reload.class_of(out).__name__ == type(theirs).__name__
    ours, problem = reload.loaded(reload.class_of(out), out, None, [])
    assert not problem and "transformers_modules" in type(ours).__module__
    ids = torch.arange(8)[None]
    with torch.no_grad():
        assert torch.equal(ours(ids).logits, theirs(ids).logits)


@pytest.mark.parametrize("change", ["a file", "one more", "the cache", "the reference"])
def test_other_code_is_not_trusted(change: str, tmp_path: Path) -> None:
    out = written(folder_with_code(tmp_path / "m"), tmp_path / "out", trust=True)
    if change == "a file":
        (out / "modeling_own.py").write_text((out / "modeling_own.py").read_text() + "1 / 0\n")
    elif change == "one more":
        (out / "evil.py").write_text("1 / 0\n")
    elif change == "the cache":
        (tmp_path / "cache" / "trusted").chmod(0o777)
    else:
        stated = json.loads((out / "config.json").read_text())
        stated["auto_map"]["AutoConfig"] = "sub/evil.OwnConfig"
        (out / "config.json").write_text(json.dumps(stated))
    assert not pretrained.is_trusted(out)
    with pytest.raises(InputError, match="remote-code"):
        open_written(out)


def test_code_that_is_not_trusted_stays_behind_with_its_names(tmp_path: Path, byte_tokenizer: object) -> None:
    folder = folder_with_code(tmp_path / "m", native=True)
    byte_tokenizer.save_pretrained(folder)  # type: ignore[attr-defined]
    (folder / "words_own.py").write_text(WORDS)
    place = folder / "tokenizer_config.json"
    named = {"auto_map": {"AutoTokenizer": [None, "words_own.OwnTokenizer"]}}
    place.write_text(json.dumps({**json.loads(place.read_text()), **named}))
    plain = written(folder, tmp_path / "plain", trust=False)
    assert not list(plain.glob("*.py")) and "auto_map" not in (plain / "config.json").read_text()
    assert "auto_map" not in (plain / "tokenizer_config.json").read_text()
    assert type(AutoModelForCausalLM.from_pretrained(plain)) is LlamaForCausalLM
    trusted = written(folder, tmp_path / "trusted", trust=True)
    theirs = AutoTokenizer.from_pretrained(trusted, trust_remote_code=True, local_files_only=True)
    assert type(theirs).__name__ == type(pretrained.tokenizer(trusted)).__name__ == "OwnTokenizer"


def test_code_in_another_repository_is_refused_before_anything_runs(tmp_path: Path) -> None:
    folder = folder_with_code(tmp_path / "m", prefix="org/name--")
    (folder / "modeling_own.py").unlink()
    with pytest.raises(InputError, match=r"put the \.py files of org/name into"):
        open_model(str(folder), trust_remote_code=True)


HOSTILE_CODE = """
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
    zoo.save(folder, byte_tokenizer, "llama")
    (folder / "odd.py").write_text(HOSTILE_CODE.format(ran=str(tmp_path / "ran")), encoding="utf-8")
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
    with pytest.raises(InputError, match=r"\[remote-code\]"):
        opened(hostile)
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
