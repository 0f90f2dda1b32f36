"""Models of speech, from a compile to a reload: Whisper, with random weights in bfloat16."""

import json
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
import zoo

from quantkit import cli
from quantkit.calibrate.sets.recordings import recordings, resampled, samples_of, windows
from quantkit.calibrate.tokens.heard import load_heard
from quantkit.errors import InputError
from quantkit.measurement.accuracy.labelled import About
from quantkit.measurement.accuracy.spoken import errors, row_of, words_of
from quantkit.measurement.rows import Data
from quantkit.model.source.open import open_model
from quantkit.model.streaming.calls import Sounds
from quantkit.model.streaming.stream import StreamedModel
from quantkit.pipeline import Request, compile_model
from quantkit.pipeline.blocks.tokens import UNHEARD

pytestmark = pytest.mark.usefixtures("own_cache")

_SIZES: dict[str, Any] = {
    **{"d_model": 32, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 2},
    **{"decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_target_positions": 64},
    **{"max_source_positions": 50, "num_mel_bins": 16, "vocab_size": 258, "pad_token_id": 257, "eos_token_id": 257},
    **{"bos_token_id": 257, "decoder_start_token_id": 256},
}
FEW = ["calibration.samples=2", "scheme.weights.group=16", "gates={}", "export=[{checkpoint: {}}]"]


@pytest.fixture(scope="module", autouse=True)
def fewer_positions(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUANTKIT_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setattr("quantkit.pipeline.blocks.tokens.SCORED", 200)
        patch.setattr("quantkit.pipeline.blocks.tokens.LOOKED", 100)
        yield


def whisper(folder: Path, tokenizer: Any) -> Path:
    model = zoo.filled(transformers.WhisperForConditionalGeneration, transformers.WhisperConfig(**_SIZES))
    model.generation_config = transformers.GenerationConfig(
        **{name: _SIZES[name] for name in ("pad_token_id", "eos_token_id", "decoder_start_token_id")}, max_length=64
    )
    model.bfloat16().save_pretrained(folder)  # type: ignore[operator]
    tokenizer.save_pretrained(folder)
    transformers.WhisperFeatureExtractor(feature_size=16, chunk_length=1).save_pretrained(folder)
    return folder


def wav(path: Path, samples: np.ndarray, rate: int = 16000, width: int = 2, channels: int = 1) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(rate)
        scaled = (np.repeat(samples, channels) * (2 ** (8 * width - 1) - 1)).astype("<i4")
        file.writeframes(scaled.view(np.uint8).reshape(-1, 4)[:, :width].tobytes())
    return path


def speech(folder: Path, texts: int = 6, count: int = 6) -> Path:
    """Hums of different pitch; the first ones have a transcript."""
    for number in range(count):
        hum = 0.3 * np.sin(np.arange(12000) * (0.02 + 0.01 * number)) * np.linspace(1, 0, 12000)
        wav(folder / f"{number}.wav", hum)
        if number < texts:
            (folder / f"{number}.txt").write_text(f"hum number {number}" + " again" * number)
    return folder


def compiled(folder: Path, out: Path, recipe: str, *changes: str, **asked: Any) -> Any:
    return compile_model(
        Request.of(str(folder), recipe=recipe, out=out, changes=[*FEW, *changes], speed=False, **asked)
    )


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory, fewer_positions: None, byte_tokenizer: Any) -> Any:
    """Return a compile to a checkpoint and to two graphs."""
    home = tmp_path_factory.mktemp("both")
    folder, audio = whisper(home / "whisper", byte_tokenizer), speech(home / "speech")
    changes = "export=[{checkpoint: {}}, {onnx: {accuracy_level: 0}}]"
    return compiled(folder, home / "out", "gptq-int4", changes, calibration=str(audio))


def test_speech_calibrates_both_stacks_and_scores(tmp_path: Path, byte_tokenizer: Any) -> None:
    folder, audio = whisper(tmp_path / "whisper", byte_tokenizer), speech(tmp_path / "speech")
    done = compiled(folder, tmp_path / "out", "gptq-int4", calibration=str(audio))
    names = {layer.name for layer in done.bundle.manifest.layers}
    assert "model.decoder.layers.1.encoder_attn.k_proj" in names and "model.encoder.layers.0.fc2" in names
    assert len(names) == 6 + 2 * 10
    checks = {check.name: check for check in done.bundle.manifest.checks}
    assert all(checks[name].ok for name in ("stream.own_forward", "reload.transformers", "score.kl", "score.loss"))
    kl = next(row for row in done.rows if row.name == "accuracy.kl")
    assert kl.n == sum(len(f" hum number {n}{' again' * n}".strip().encode()) + 1 for n in (1, 3, 5)) and kl.value > 0
    # plain transformers reads it, and hears the same
    model = transformers.AutoModelForSpeechSeq2Seq.from_pretrained(done.bundle.model_folder, dtype=torch.float32)
    seen = load_heard(str(audio), "eval", open_model(str(folder)), samples=None, tokens=64)
    own = StreamedModel(open_model(str(folder)))
    own.pictures = seen.pictures
    heard = next(iter(seen.pictures.rows.values()))  # type: ignore[union-attr]
    ids = seen.ids[:1]
    with torch.no_grad():
        quantized = model(**heard, decoder_input_ids=ids).logits
        floats = transformers.WhisperForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
        plain = floats.eval()(**heard, decoder_input_ids=ids).logits
    assert torch.allclose(own.answers(ids).all(), plain, atol=1e-5)
    assert 0 < (quantized - plain).norm() / plain.norm() < 0.5


def test_inputs_in_integers_are_transcribed_too(tmp_path: Path, byte_tokenizer: Any) -> None:
    folder, audio = whisper(tmp_path / "whisper", byte_tokenizer), speech(tmp_path / "speech", count=4)
    whole = "scheme.weights={format: int8, granularity: channel}"
    done = compiled(folder, tmp_path / "out", "int8-dynamic", whole, calibration=str(audio))
    assert next(row for row in done.rows if row.name == "accuracy.wer").n == 2


def test_a_recipe_without_recordings_rounds_and_is_not_scored(tmp_path: Path, byte_tokenizer: Any) -> None:
    folder = whisper(tmp_path / "whisper", byte_tokenizer)
    done = compiled(folder, tmp_path / "out", "int8-dynamic", "scheme.weights={format: int8, granularity: channel}")
    codes = {step.code for step in done.bundle.manifest.decisions}
    assert {UNHEARD, "rounded-without-audio"} <= codes
    assert done.bundle.manifest.recipe["passes"] == [{"rtn": {"range": "mse", "imatrix": ""}}]
    assert not any(row.name.startswith("accuracy.") for row in done.rows)
    assert not (done.bundle.path / "harm.json").exists()


def test_a_recording_without_transcript_has_the_models_own(tmp_path: Path, byte_tokenizer: Any) -> None:
    folder, audio = whisper(tmp_path / "whisper", byte_tokenizer), speech(tmp_path / "speech", texts=1, count=2)
    loaded = load_heard(str(audio), "all", open_model(str(folder)), samples=None, tokens=64)
    assert loaded.spoken == ("hum number 0", None)
    assert any("no transcript" in note for note in loaded.notes)
    assert loaded.lengths is not None and max(loaded.lengths) == loaded.ids.shape[1] and loaded.ids[:, 0].eq(256).all()


def test_wavs_of_any_kind_are_read(tmp_path: Path) -> None:
    tone = 0.5 * np.sin(2 * np.pi * 440 * np.arange(48000) / 48000)
    for rate, width, channels in ((48000, 2, 1), (48000, 3, 2), (48000, 4, 1)):
        read = samples_of(wav(tmp_path / "tone.wav", tone, rate, width, channels), 16000)
        wanted = 0.5 * np.sin(2 * np.pi * 440 * np.arange(16000) / 16000)
        assert read.dtype == np.float32 and len(read) == 16000
        assert np.abs(read - wanted)[200:-200].max() < 2e-3
    assert np.allclose(resampled(tone, 48000, 48000), tone)
    parts = windows(read, 16000, 5000)
    assert all(2500 <= len(part) <= 5000 for part in parts[:-1]) and np.array_equal(np.concatenate(parts), read)


def _jsonl(folder: Path, *lines: Any) -> Path:
    path = folder / f"{len(list(folder.iterdir()))}.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return path


def test_what_is_no_recording_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "a.wav").write_bytes(b"no sound")
    wav(tmp_path / "none" / "a.wav", np.zeros(0))
    wav(tmp_path / "long.wav", np.ones(40000) / 2)
    text = tmp_path / "text.txt"
    text.write_text("text")
    for reference, value in (
        (tmp_path / "empty", "no .wav file"),
        (tmp_path / "bad", "RIFF"),
        (tmp_path / "none", "no sample"),
        (text, "another kind"),
        (_jsonl(tmp_path), "no line"),
        (_jsonl(tmp_path, "{"), "line 1"),
        (_jsonl(tmp_path, {"text": "x"}), "audio"),
        (_jsonl(tmp_path, {"audio": "gone.wav"}), "no file gone.wav"),
        (_jsonl(tmp_path, {"audio": "long.wav", "text": "long"}), "2.5 s with a transcript"),
    ):
        with pytest.raises(InputError, match="calibration-audio") as caught:
            recordings(str(reference), 16000, 16000)
        assert value in caught.value.line() and "\n" not in caught.value.line()
    cut = recordings(str(_jsonl(tmp_path, {"audio": "long.wav"})), 16000, 16000)
    assert len(cut) > 2 and all(len(part.samples) <= 16000 for part in cut)


@pytest.mark.parametrize(
    ("recipe", "calibration", "missing", "value"),
    [
        ("gptq-int4", "speech", "preprocessor_config.json", "no such file"),
        ("gptq-int4", "text.txt", "", "no set of recordings"),
        ("int8", None, "", "no recordings were given"),
    ],
)
def test_what_cannot_calibrate_is_refused_before_work(
    recipe: str, calibration: str | None, missing: str, value: str, tmp_path: Path, byte_tokenizer: Any
) -> None:
    folder = whisper(tmp_path / "whisper", byte_tokenizer)
    speech(tmp_path / "speech")
    (tmp_path / "text.txt").write_text("text " * 1000)
    if missing:
        (folder / missing).unlink()
    given = None if calibration is None else str(tmp_path / calibration)
    changes = ["scheme.weights={format: int8, granularity: channel}"] if recipe == "int8" else []
    with pytest.raises(InputError, match="calibration-audio") as caught:
        compiled(folder, tmp_path / "out", recipe, *changes, calibration=given)
    assert value in caught.value.line()
    assert not list(tmp_path.glob("out*"))


def test_two_graphs_hear_and_answer_as_torch_does(both: Any) -> None:
    checks = {check.name: check for check in both.bundle.manifest.checks}
    assert checks["reload.onnxruntime"].ok and checks["reload.onnxruntime"].value < 1e-4
    kl = {row.runtime: row.value for row in both.rows if row.name == "accuracy.kl"}
    assert kl["torch"] == pytest.approx(kl["onnxruntime"], rel=0.5)
    # both write transcripts, of which words are counted
    wer = {row.runtime: row for row in both.rows if row.name == "accuracy.wer"}
    assert set(wer) == {"torch", "onnxruntime"} and wer["torch"].n == 3 and wer["torch"].shape == {"words": 18}
    assert wer["torch"].value == pytest.approx(wer["onnxruntime"].value, abs=0.2)
    assert wer["torch"].baseline is not None and wer["torch"].baseline.difference is not None


def test_words_are_counted_as_errors_of_the_best_alignment() -> None:
    assert words_of("Don’t STOP, 2 go!") == ["don't", "stop", "2", "go"]
    for spoken, written, count in (
        ("a b c", "a b c", 0),
        ("a b c", "a c", 1),
        ("a b c", "a x b c", 1),
        ("a b c", "x y", 3),
        ("a b c", "", 3),
        ("", "a b", 2),
        ("a b c d", "b c d e", 2),
    ):
        assert errors(spoken.split(), written.split()) == count, (spoken, written)
    data = Data(set="x", split="eval", sha256="0", items=3)
    row = row_of(
        [["a", "b"]] * 3, [["a", "b"]] * 3, [["a", "b"], ["a"], ["a", "x", "y"]], About("s", "o", "torch", data)
    )
    assert row.value == pytest.approx(3 / 6) and row.better == "lower" and row.stat == "ratio"
    assert row.baseline is not None and (row.baseline.value, row.baseline.difference) == (0, pytest.approx(0.5))
    assert row.ci95 is not None and row.ci95[0] < 0.5 < row.ci95[1]


def test_a_recording_is_written_down(both: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place, long = str(both.bundle.path), wav(tmp_path / "long.wav", 0.3 * np.sin(np.arange(20000) * 0.05))
    answers = {}
    for runtime in ("torch", "onnxruntime"):
        capsys.readouterr()
        asked = ["generate", place, "--audio", str(long), "--runtime", runtime, "--new-tokens", "6", "--json"]
        assert cli.run(asked) == 0
        answers[runtime] = json.loads(capsys.readouterr().out)["result"]
    assert answers["torch"]["text"] == answers["onnxruntime"]["text"]
    assert answers["torch"]["prompt"] == "long.wav"
    assert "--audio recording.wav" in (both.bundle.path / "README.md").read_text()
    for words, code in (
        (["--prompt", "text", "--runtime", "torch"], "generate-audio"),
        (["--prompt", "text", "--audio", str(long)], "generate-audio"),
        ([], "usage"),
        (["--audio", str(long), "--runtime", "vllm"], "generate-audio"),
        (["--audio", str(both.bundle.model_folder / "config.json")], "calibration-audio"),
        (["--audio", str(tmp_path / "gone.wav")], "file-missing"),
    ):
        capsys.readouterr()
        assert cli.run(["generate", place, *words]) == 2, words
        assert f"[{code}]" in capsys.readouterr().err, words


def test_recordings_that_begin_alike_are_told_apart(tmp_path: Path, byte_tokenizer: Any) -> None:
    folder, audio = whisper(tmp_path / "whisper", byte_tokenizer), speech(tmp_path / "speech", count=4)
    for name, text in {0: "yes", 1: "yes and", 2: "yes it is", 3: "yes"}.items():
        (audio / f"{name}.txt").write_text(text)
    done = compiled(folder, tmp_path / "out", "gptq-int4", calibration=str(audio))
    assert all(check.ok for check in done.bundle.manifest.checks)
    loaded = load_heard(str(audio), "all", open_model(str(folder)), samples=None, tokens=64)
    assert len(loaded.beginnings(2, 4)) == 1 and len(loaded.beginnings(2, 64)) == 2
    assert loaded.pictures is not None
    first, second = loaded.beginnings(2, 64)
    rows = [loaded.pictures.rows[Sounds.key(row)]["input_features"] for row in (first, second)]
    assert not torch.equal(*rows)
