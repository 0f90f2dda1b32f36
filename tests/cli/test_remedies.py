"""An error's remedy is carried out as it is printed, and leads on."""

import functools
import re
import shlex
import shutil
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
import zoo

import quantkit as package
from quantkit import machine
from quantkit.measurement import doctor

Command = Callable[..., Any]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, byte_tokenizer: Any) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    return zoo.save(folder, byte_tokenizer, "llama", vocab_size=len(byte_tokenizer))


def refused(quantkit: Command, *arguments: object, code: str) -> str:
    """The remedy of a command that is refused."""
    error = quantkit(*arguments, "--json").envelope["error"]
    assert error is not None and error["code"] == code, error
    return str(error["remedy"])


def options(remedy: str) -> list[str]:
    """The options that a remedy begins with: up to what it says of them, or to what may be done instead."""
    return shlex.split(re.split(r",? or\b|;| \(|, ", remedy, maxsplit=1)[0])


def test_a_recipe_for_other_kinds_names_one_that_fits(quantkit: Command, tiny: Path) -> None:
    asked = ["compile", tiny, "--dry-run"]
    remedy = refused(quantkit, *asked, "--recipe", "int8-network", code="model-kind")
    fitting = options(remedy)
    assert fitting[0] == "--recipe"
    # its groups do not divide so small a model, and what that says leads on too
    remedy = refused(quantkit, *asked, *fitting, code="group-indivisible")
    assert quantkit(*asked, *fitting, *options(remedy)).code == 0
    assert quantkit(*asked, *fitting, *shlex.split(remedy.partition(", or ")[2])).code == 0
    # what is known by its name is not even opened
    assert "recipe int8-network is for network" in quantkit("compile", "--recipe", "int8-network").err.splitlines()[-1]


def test_a_width_of_176_is_led_to_groups_and_an_export_that_fit(
    quantkit: Command, tmp_path: Path, byte_tokenizer: Any
) -> None:
    sizes = {"hidden_size": 176, "intermediate_size": 352, "num_attention_heads": 4, "num_key_value_heads": 4}
    zoo.save(tmp_path, byte_tokenizer, "llama", vocab_size=len(byte_tokenizer), **sizes)
    asked = ["compile", tmp_path, "--recipe", "awq-int4", "--dry-run"]
    remedy = refused(quantkit, *asked, code="group-indivisible")
    assert "on_indivisible=keep" not in remedy, "it would keep every layer"
    asked += options(remedy)
    # a head of 44 features is none of ONNX Runtime's: its export is left out
    decisions = quantkit(*asked, "--json").envelope["decisions"]
    assert [taken["where"] for taken in decisions if taken["code"] == "export-left-out"] == ["onnx"]


@pytest.mark.parametrize(
    ("recipe", "code"),
    [("int4-cpu", "attention-unsupported"), ("gguf-q4_0", "layout-unsupported")],
)
def test_a_model_that_no_graph_and_no_file_holds_is_led_to_a_checkpoint_before_work(
    recipe: str, code: str, quantkit: Command, tmp_path: Path, byte_tokenizer: Any
) -> None:
    """BLOOM writes its attention out in place: tracing it would fail, after the work."""
    sizes = {"hidden_size": 128, "n_layer": 1, "n_head": 4, "vocab_size": len(byte_tokenizer)}
    transformers.BloomForCausalLM(transformers.BloomConfig(**sizes)).bfloat16().save_pretrained(tmp_path)
    byte_tokenizer.save_pretrained(tmp_path)
    asked = ["compile", tmp_path, "--dry-run"]
    remedy = refused(quantkit, *asked, "--recipe", recipe, code=code)
    instead = shlex.split(remedy.partition(": ")[2])
    assert quantkit(*asked, *([] if "--recipe" in instead else ["--recipe", recipe]), *instead).code == 0


@pytest.mark.parametrize("out", ["/proc/x", "/proc/x/y", "/dev/null/x"])
def test_a_place_that_holds_no_folders_is_not_called_full(quantkit: Command, tiny: Path, out: str) -> None:
    asked = ["compile", tiny, "--recipe", "float"]
    assert refused(quantkit, *asked, "--out", out, code="out-not-writable") == "choose another --out"


def test_an_add_on_of_the_readme_compiles_where_one_export_cannot_have_it(quantkit: Command, tiny: Path) -> None:
    change = ["--set", "scheme.weights.group=16"]
    ran = quantkit("compile", tiny, "--recipe", "awq-int4+kv-fp8", *change, "--dry-run", "--json")
    assert ran.code == 0, ran.err
    assert [next(iter(step)) for step in ran.envelope["result"]["export"]] == ["checkpoint"]
    assert [each["where"] for each in ran.envelope["decisions"] if "no runtime of" in each["reason"]] == ["onnx"]
    # an export that a change names is not left out in silence; what leaves it out is said as it is typed
    cache = "scheme.kv_cache={format: fp8_e4m3}"
    asked = ["compile", tiny, "--recipe", "awq-int4", *change, "--set", cache, "--dry-run"]
    remedy = refused(quantkit, *asked, code="target-cannot-run")
    assert quantkit(*asked, *shlex.split(remedy.partition(";")[0].partition(": ")[2])).code == 0


def test_a_model_of_which_sizes_alone_are_known(quantkit: Command) -> None:
    remedy = refused(quantkit, "compile", "llama-3-8b", "--dry-run", code="model-sizes")
    (plan,) = re.findall(r"`quantkit ([^`]*)`", remedy)
    assert quantkit(*shlex.split(plan), "--target", "h100").code == 0
    assert "hf:meta-llama/Meta-Llama-3-8B" in remedy


@pytest.mark.parametrize(
    "asked",
    [
        ["scheme.weights.group=100"],
        ["scheme.weights.group=7"],
        ["export=[checkpoint]", "scheme.weights.group=100"],
        ["export=[checkpoint]", "scheme.activations={format: int8}"],
    ],
)
def test_the_first_remedy_for_a_scheme_is_the_last_that_is_needed(
    quantkit: Command, tmp_path: Path, byte_tokenizer: Any, asked: list[str]
) -> None:
    """The model stores bfloat16, and 128 does not divide its K, as in SmolLM2."""
    tiny, sizes = tmp_path / "tiny", {"hidden_size": 64, "intermediate_size": 192}
    zoo.tiny("llama", vocab_size=len(byte_tokenizer), **sizes).to(torch.bfloat16).save_pretrained(tiny)
    byte_tokenizer.save_pretrained(tiny)
    changes = [word for change in asked for word in ("--set", change)]
    failed = quantkit("compile", tiny, "--recipe", "awq-int4", "--dry-run", *changes)
    assert failed.code == 2
    first = failed.err.splitlines()[-1].partition("--set ")[2].partition("; or")[0].partition(", or")[0]
    (mended,) = shlex.split(first)
    again = quantkit("compile", tiny, "--recipe", "awq-int4", "--dry-run", *changes, "--set", mended)
    assert again.code == 0, again.err


def test_a_word_that_is_no_target_is_not_guessed_at(quantkit: Command) -> None:
    remedy = refused(quantkit, "compile", "--target", "cuda", code="unknown-target")
    assert "did you mean" not in remedy
    (listing,) = re.findall(r"`quantkit ([^`]*)`", remedy)
    assert "NVIDIA H100" in quantkit(*shlex.split(listing)).out


def test_a_plan_before_the_doctor_says_what_is_missing_and_has_no_empty_table(
    quantkit: Command, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ["plan", tiny, "--recipe", "float"]
    shown = quantkit(*asked).out
    assert "How long it takes" not in shown and not re.search(r"^ *\d+ *$", shown, re.MULTILINE)
    assert f"quantkit measure ./{tiny.name}--float --batch 1,2,4,8,16,32,64\n" in shown
    (command,) = set(re.findall(r"quantkit (doctor --write --target [\w-]+)", " ".join(shown.split())))
    measured = doctor.ceilings.measured
    monkeypatch.setattr(machine, "last_level_cache", lambda: 1 << 20)
    monkeypatch.setattr(doctor.ceilings, "measured", lambda *asked, **_: measured(*asked, runs=1, size=64))
    assert quantkit(*shlex.split(command)).code == 0
    assert "How long it takes" in quantkit(*asked).out


def test_a_folder_of_a_gguf_file_names_it(quantkit: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.gguf").write_bytes(b"GGUF")
    monkeypatch.chdir(tmp_path)
    remedy = refused(quantkit, "compile", "./model", "--dry-run", code="config-missing")
    # it is opened: what it says of these four bytes is that they are no whole file
    path = remedy.rpartition(" ")[2]
    refused(quantkit, "compile", path, "--dry-run", code="gguf-damaged")
    (instead,) = re.findall(r"`quantkit ([^`]*)`", refused(quantkit, "plan", path, code="config-missing"))
    refused(quantkit, *shlex.split(instead), code="gguf-damaged")


def test_whisper_s_encoder_goes_in_as_the_error_says(
    quantkit: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None
) -> None:
    sizes = {"d_model": 32, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_source_positions": 20}
    layers = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    config = transformers.WhisperConfig(vocab_size=60, num_mel_bins=8, pad_token_id=0, **sizes, **layers)
    model = transformers.WhisperModel(config).eval()
    model.save_pretrained(tmp_path / "whisper")
    model.get_encoder().save_pretrained(tmp_path / "encoder")
    monkeypatch.chdir(tmp_path)
    remedy = refused(quantkit, "compile", "./whisper", code="architecture-unsupported")
    inputs = np.random.default_rng(0).standard_normal((40, 8, 40)).astype(np.float32)
    np.savez("inputs.npz", input_features=inputs)
    # as it stands, but that nothing is timed
    names = {"quantkit": types.SimpleNamespace(compile=functools.partial(package.compile, speed=False))}
    bundle = eval(remedy.removeprefix("in Python: "), {**names, "model": model, "inputs": torch.from_numpy(inputs[:2])})
    assert bundle.manifest.state == "complete" and len(bundle.manifest.layers) >= 6
    # transformers has the class of its encoder, which opens no model
    assert "part" in refused(quantkit, "compile", "./encoder", code="architecture-unsupported")


@pytest.mark.parametrize("name", ["T5Model", "T5ForQuestionAnswering"])
def test_the_encoder_of_a_model_of_two_parts_is_written_as_the_error_says(
    name: str, quantkit: Command, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"vocab_size": 300, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    folder = tmp_path / "t5"
    getattr(transformers, name)(transformers.T5Config(**sizes)).save_pretrained(folder)
    monkeypatch.chdir(tmp_path)
    remedy = refused(quantkit, "compile", "./t5", code="architecture-unsupported")
    for file in tiny.glob("tokenizer*"):
        shutil.copy(file, folder)
    written, _, command = remedy.removeprefix("in Python: ").partition("; then quantkit ")
    exec(written, {"transformers": transformers, "folder": folder})
    ran = quantkit(*shlex.split(command), "--no-speed")
    assert ran.code == 0, ran.err


def test_a_folder_of_models_lists_them(quantkit: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("models/a", "models/b", "hub/models--org--c/snapshots/0123", "models/empty"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("models/a", "models/b", "hub/models--org--c/snapshots/0123"):
        (tmp_path / name / "config.json").write_text("{}")
    remedy = refused(quantkit, "compile", "./models", "--recipe", "awq-int4", code="config-missing")
    assert remedy == "give one of them: ./models/a, ./models/b"
    remedy = refused(quantkit, "compile", "./hub", "--recipe", "awq-int4", code="config-missing")
    assert remedy == "give one of them: ./hub/models--org--c/snapshots/0123"
    remedy = refused(quantkit, "compile", "./models/empty", "--recipe", "awq-int4", code="config-missing")
    assert "save_pretrained" in remedy


@pytest.mark.parametrize(
    "arguments",
    [
        ("compile", "./no", "--recipe", "awq-int4"),
        ("compile", "./no.gguf", "--recipe", "awq-int4"),
        ("compile", "--recipe", "./no.yaml"),
        ("compile", "--recipe", "rtn-int4", "--calibration", "./no.txt"),
        ("plan", "./no"),
        ("plan", "llama-3-8b", "--prices", "./no.yaml"),
        ("plan", "llama-3-8b", "--measured", "./no.jsonl"),
        ("imatrix", "./no"),
        ("nightly", "run", "./no.yaml"),
        ("show", "./no.yaml"),
    ],
    ids=" ".join,
)
def test_what_is_not_there_is_worded_one_way(arguments: tuple[str, ...], quantkit: Command) -> None:
    error = quantkit(*arguments, "--json").envelope["error"]
    assert (error["code"], error["value"], error["remedy"]) == (
        *("file-missing", "no such file or folder", "check the path"),
    )


def test_an_exporter_that_only_a_compile_runs_is_refused_with_those_that_add(quantkit: Command, bundle: Path) -> None:
    remedy = refused(quantkit, "export", bundle, "--to", "checkpoint", code="export-unsupported")
    assert remedy.startswith("one of gguf, onnx") or remedy.startswith("one of onnx"), remedy
    assert "checkpoint" not in remedy.partition(";")[0] and "export=[{checkpoint: {}}]" in remedy
