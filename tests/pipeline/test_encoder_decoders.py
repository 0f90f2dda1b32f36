"""Models with an encoder and a decoder, from a compile to a reload: T5, BART, Marian."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import zoo
from thorough import beside

from quantkit import cli
from quantkit.bundle import Bundle
from quantkit.errors import InputError
from quantkit.model.source.open import open_model
from quantkit.model.streaming.calls import first_token, texts
from quantkit.model.streaming.stream import StreamedModel
from quantkit.pipeline import Request, compile_model
from quantkit.pipeline.drafts import judge_draft
from quantkit.pipeline.measure import measure_bundle
from quantkit.pipeline.reload import reload
from quantkit.runtimes import load_runtime

pytestmark = pytest.mark.usefixtures("own_cache")

_SPECIAL = {"pad_token_id": 255, "eos_token_id": 257, "decoder_start_token_id": 256, "vocab_size": 258}
_BART = {
    **{"d_model": 32, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 2},
    **{"decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 96},
    "forced_eos_token_id": None,
}
_T5 = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_decoder_layers": 1, "num_heads": 2}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "t5": ("T5", "T5ForConditionalGeneration", {**_T5, "tie_word_embeddings": False}),
    "t5-gated": ("T5", "T5ForConditionalGeneration", {**_T5, "feed_forward_proj": "gated-gelu"}),
    "bart": ("Bart", "BartForConditionalGeneration", {**_BART, "bos_token_id": 256}),
    "marian": ("Marian", "MarianMTModel", _BART),
}
FEW = ["calibration.samples=2", "calibration.tokens=96", "scheme.weights.group=16", "gates={}"]
CHECKPOINT = "export=[{checkpoint: {}}]"


@pytest.fixture(autouse=True)
def fewer_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quantkit.pipeline.blocks.tokens.SCORED", 300)


def saved(name: str, folder: Path, tokenizer: Any) -> Path:
    family, model_class, sizes = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**{**_SPECIAL, **sizes})
    zoo.filled(getattr(transformers, model_class), config).save_pretrained(folder)  # type: ignore[operator]
    tokenizer.save_pretrained(folder)
    return folder


def compiled(folder: Path, out: Path, recipe: str = "rtn-int4", **asked: Any) -> Any:
    changes = [*FEW, CHECKPOINT, *asked.pop("changes", [])]
    return compile_model(Request.of(str(folder), recipe=recipe, out=out, changes=changes, speed=False, **asked))


@pytest.mark.parametrize("name", MODELS)
def test_both_stacks_are_quantized_and_transformers_loads_them(
    name: str, tmp_path: Path, byte_tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = saved(name, tmp_path / name, byte_tokenizer)
    done = compiled(folder, tmp_path / "out", "awq-int4" if name == "bart" else "gptq-int4")
    source = open_model(str(folder))
    inside = [path for path, module in source.skeleton().named_modules() if isinstance(module, torch.nn.Linear)]
    wanted = {path for path in inside if ".layers." in path or ".block." in path}
    assert {layer.name for layer in done.bundle.manifest.layers} == wanted
    assert any("encoder_attn.k_proj" in path or "EncDecAttention.k" in path for path in wanted)
    checks = {check.name: check for check in done.bundle.manifest.checks}
    assert all(checks[name].ok for name in ("stream.own_forward", "reload.transformers", "score.kl"))
    rows = {row.name: row.value for row in done.rows}
    assert 0 < rows["accuracy.kl"] < 5
    # the text that the command line writes is transformers' own
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(done.bundle.model_folder)
    ids = byte_tokenizer("a text", return_tensors="pt")["input_ids"]
    own = model.generate(input_ids=ids, max_new_tokens=8, do_sample=False)[0, 1:]
    written = load_runtime("torch").generate(done.bundle, "a text", new_tokens=8)
    assert written["text"] == byte_tokenizer.decode(own, skip_special_tokens=True)
    # its prompt is no beginning of it
    asked = ["generate", str(done.bundle.path), "--prompt", "a text", "--new-tokens", "8"]
    capsys.readouterr()
    assert cli.run(asked) == 0 and "a text" not in capsys.readouterr().out


def test_an_encoder_that_runs_before_the_model_is_expanded(tmp_path: Path, byte_tokenizer: Any) -> None:
    """compressed-tensors expands at the model's first forward; `generate` asks the encoder alone before."""
    changes = ["scheme.weights.group=null", "export=[{checkpoint: {layout: int-quantized}}]"]
    folder = saved("t5", tmp_path / "t5", byte_tokenizer)
    done = compiled(folder, tmp_path / "out", "int8-dynamic", changes=changes)
    checks = {check.name: check for check in done.bundle.manifest.checks}
    assert checks["reload.transformers"].ok
    assert isinstance(load_runtime("torch").generate(done.bundle, "a text", new_tokens=3)["text"], str)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory, byte_tokenizer: Any) -> Callable[[str], tuple[Path, Any]]:
    """Return what compiles a model to a checkpoint and to two graphs, once."""
    home = tmp_path_factory.mktemp("both")

    @functools.cache
    def made(name: str) -> tuple[Path, Any]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("quantkit.pipeline.blocks.tokens.SCORED", 300)
            patch.setenv("QUANTKIT_CACHE", str(home / "cache"))
            folder = saved(name, home / name, byte_tokenizer)
            changes = ["export=[{checkpoint: {}}, {onnx: {accuracy_level: 0}}]"]
            return folder, compiled(folder, home / f"{name}-out", changes=changes)

    return made


@pytest.mark.parametrize("name", beside(["t5", "bart"], MODELS))
def test_two_graphs_answer_as_torch_does(name: str, both: Callable[[str], tuple[Path, Any]]) -> None:
    _, done = both(name)
    checks = {check.name: check for check in done.bundle.manifest.checks}
    assert checks["reload.onnxruntime"].ok and checks["reload.onnxruntime"].value < 1e-4
    names = [check.name for check in done.bundle.manifest.checks]
    assert len(names) == len(set(names)) and {"onnx.valid", "onnx.valid.encoder"} <= {*names}
    rows: dict[str, dict[str, Any]] = {"torch": {}, "onnxruntime": {}}
    for row in done.rows:
        if row.name == "accuracy.kl":
            rows[row.runtime][row.name] = row.value
    assert rows["torch"]["accuracy.kl"] == pytest.approx(rows["onnxruntime"]["accuracy.kl"], rel=0.5)
    texts_ = [load_runtime(runtime).generate(done.bundle, "a text", new_tokens=8)["text"] for runtime in rows]
    assert texts_[0] == texts_[1]
    model = load_runtime("onnxruntime").load(done.bundle)
    for step in (model.decode(2, 8), model.prefill(2, 8)):
        step()


def test_the_first_token_is_that_of_generation_config(tmp_path: Path, byte_tokenizer: Any) -> None:
    folder = saved("t5", tmp_path / "t5", byte_tokenizer)
    config = json.loads((folder / "config.json").read_text())
    config.pop("decoder_start_token_id", None)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"decoder_start_token_id": 7}))
    assert first_token(StreamedModel(open_model(str(folder))).skeleton) == 7
    assert first_token(transformers.T5ForConditionalGeneration.from_pretrained(folder)) == 7


def test_a_stream_is_the_models_own_forward_on_pairs_of_texts(tmp_path: Path, byte_tokenizer: Any) -> None:
    folder = saved("marian", tmp_path / "marian", byte_tokenizer)
    model = transformers.MarianMTModel.from_pretrained(folder).eval()
    ids = zoo.ids(3, 16)
    inputs = texts(model, ids)
    assert inputs["decoder_input_ids"][:, 0].eq(256).all() and inputs["decoder_input_ids"][:, 1:].equal(ids[:, 1:])
    with torch.no_grad():
        own = model(**inputs).logits
    assert torch.allclose(StreamedModel(open_model(str(folder))).answers(ids).all(), own, atol=1e-5)


def test_the_decoders_keys_are_solved_by_what_the_encoder_puts_out(tmp_path: Path, byte_tokenizer: Any) -> None:
    folder = saved("bart", tmp_path / "bart", byte_tokenizer)
    stream, ids = StreamedModel(open_model(str(folder))), zoo.ids(2, 8)
    read: list[torch.Tensor] = []
    calls = stream.begin(ids, 1)
    hidden = calls.hidden
    for stage, index in enumerate(stream.visits):
        block = stream.load(index)
        if index == 2:
            block.get_submodule("encoder_attn.k_proj").register_forward_pre_hook(lambda _, args: read.append(args[0]))
        hidden = calls.pass_on(stage, calls.run_all(block, stage, hidden))
    model = transformers.BartForConditionalGeneration.from_pretrained(folder).eval()
    with torch.no_grad():
        wanted = model.get_encoder()(input_ids=ids).last_hidden_state
    assert torch.allclose(torch.cat(read), wanted, atol=1e-5)


def test_a_bundle_is_verified_and_measured_again(
    both: Callable[[str], tuple[Path, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, done = both("t5")
    monkeypatch.setattr("quantkit.runtimes.apart.find", lambda name: name)
    checks, notes = reload(Bundle.load(done.bundle.path))
    with pytest.raises(InputError, match="two graphs"):
        load_runtime("quantkit_cpu").folder(done.bundle)
    assert checks and all(check.ok for check in checks)
    assert notes == ["not run in vLLM: vLLM runs no encoder beside a decoder"]
    again = measure_bundle(Bundle.load(done.bundle.path), str(folder), runtime="torch", speed=False)
    found = [
        {row.name: row.value for row in rows if row.name.startswith("accuracy.") and row.runtime == "torch"}
        for rows in (done.rows, again)
    ]
    assert found[0] == found[1] and found[0]
    with pytest.raises(InputError, match=r"architecture-unsupported.*vLLM runs no encoder"):
        measure_bundle(Bundle.load(done.bundle.path), str(folder), runtime="vllm")
    monkeypatch.setattr(Bundle, "demand_intact", None)
    with pytest.raises(InputError, match=r"architecture-unsupported.*encoder would read the text"):
        judge_draft(done.bundle.path, done.bundle.path)
    with pytest.raises(InputError, match="not-a-bundle"):
        judge_draft(done.bundle.path, tmp_path / "nope")


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        (["export=[{openvino: {}}]"], "architecture-unsupported"),
        (["export=[{gguf: {}}]", "scheme.weights={format: q8_0}"], "architecture-unsupported"),
        (["scheme.kv_cache={format: int8, granularity: tensor}"], "cache-unknown"),
        (["calibration.generated=0.5"], "calibration-generated"),
    ],
)
def test_what_is_not_done_is_refused_by_name(
    changes: list[str], code: str, tmp_path: Path, byte_tokenizer: Any
) -> None:
    folder = saved("t5", tmp_path / "t5", byte_tokenizer)
    with pytest.raises(InputError) as caught:
        compiled(folder, tmp_path / "out", changes=changes)
    assert caught.value.code == code
