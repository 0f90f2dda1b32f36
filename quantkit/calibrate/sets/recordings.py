"""Recordings of speech: WAV files, with transcripts where there are some.

    FOLDER       every `*.wav` in it, in the order of their names; `NAME.txt` beside `NAME.wav` is its transcript
    FILE.jsonl   a recording a line, `{"audio": "one.wav", "text": "..."}`; paths are relative to the file

Files are read with the standard library: PCM of 8 to 32 bits, any number of channels, which are averaged. Another rate
is converted exactly in the band that both rates hold, through the spectrum of the whole recording.
"""

from __future__ import annotations

import json
import wave
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit import limits
from quantkit.errors import InputError, absent

Samples = NDArray[np.float32]
CODE = "calibration-audio"
_CONVERT = "convert it: ffmpeg -i FILE -ac 1 -c:a pcm_s16le FILE.wav"
RULE = "a folder of WAV files (NAME.txt beside NAME.wav is its transcript), or a .jsonl with `audio` and `text`"
# pauses are looked for in this last part of a window, in stretches of so many seconds
_LATE, _STRETCH = 0.5, 0.05


@dataclass(frozen=True, eq=False)
class Recording:
    """A recording, or a part of one.

    Args:
        name: name of its file, for messages.
        samples: [n] from -1 to 1.
        text: its transcript; None without one.
    """

    name: str
    samples: Samples
    text: str | None = None


def recordings(reference: str, rate: int, most: int | None) -> list[Recording]:
    """Read all recordings of a folder or .jsonl file, at `rate` samples a second.

    Args:
        most: samples that a model hears at a time; longer recordings without a transcript are cut at pauses.

    Raises InputError: `calibration-audio`, for a set without recordings, a damaged file, or a transcript of a recording
    that is too long; `file-missing`.
    """
    read: list[Recording] = []
    for path, text in _listed(Path(reference).expanduser()):
        samples = samples_of(path, rate)
        if most is None or len(samples) <= most:
            read.append(Recording(path.name, samples, text))
            continue
        if text is not None:
            value, rule = (
                f"{len(samples) / rate:.1f} s with a transcript",
                f"the model hears {most / rate:g} s at a time",
            )
            raise InputError(CODE, str(path), value, rule, "cut both, or leave the transcript out: it is cut at pauses")
        read += [Recording(path.name, part) for part in windows(samples, rate, most)]
    return read


def _listed(place: Path) -> list[tuple[Path, str | None]]:
    if not place.exists():
        raise absent(str(place))
    if place.is_dir():
        files = sorted(path for path in place.iterdir() if path.suffix.lower() == ".wav")
        if not files:
            raise InputError(CODE, str(place), "no .wav file", RULE, _CONVERT)
        texts = [path.with_suffix(".txt") for path in files]
        return [
            (file, _text(limits.read(text)) if text.is_file() else None)
            for file, text in zip(files, texts, strict=True)
        ]
    if place.suffix.lower() != ".jsonl":
        raise InputError(CODE, str(place), "another kind of file", RULE)
    lines = [line for line in limits.read(place, limits.DATA).splitlines() if line.strip()]
    listed = [_record(line, place, number) for number, line in enumerate(lines, 1)]
    if not listed:
        raise InputError(CODE, str(place), "no line", RULE)
    return listed


def _text(data: bytes) -> str:
    return " ".join(data.decode(errors="replace").split())


def _record(line: bytes, place: Path, number: int) -> tuple[Path, str | None]:
    where = f"{place}, line {number}"
    try:
        record: Any = json.loads(line)
    except (ValueError, RecursionError) as problem:
        raise InputError(CODE, where, str(problem)[:100], RULE) from None
    audio, text = (record.get(key) if isinstance(record, dict) else None for key in ("audio", "text"))
    if not isinstance(audio, str) or not isinstance(text, str | None):
        raise InputError(CODE, where, f"{record!r:.60}", '{"audio": "one.wav", "text": "..."}, or without `text`')
    path = place.parent / audio
    if not path.is_file():
        raise InputError(CODE, where, f"no file {audio}", "paths are relative to the .jsonl file")
    return path, None if text is None else _text(text.encode())


def samples_of(path: Path, rate: int) -> Samples:
    """Read a WAV file as [n] float32 from -1 to 1, at `rate` samples a second. Raises `calibration-audio`."""
    if not path.is_file():
        raise absent(str(path))
    try:
        with wave.open(str(path)) as file:
            width, channels, own = file.getsampwidth(), file.getnchannels(), file.getframerate()
            limits.DATA.demand(width * channels * file.getnframes(), str(path))
            data = file.readframes(file.getnframes())
    except (wave.Error, EOFError) as problem:
        rule, remedy = "a WAV file of PCM", _CONVERT
        raise InputError(CODE, str(path), str(problem) or "it ends too early", rule, remedy) from None
    data = data[: len(data) - len(data) % (width * channels)]
    if not data:
        raise InputError(CODE, str(path), "no sample", "a recording has sound in it")
    values = _values(data, width).reshape(-1, channels).mean(axis=1)
    return resampled(values, own, rate).astype(np.float32)


def _values(data: bytes, width: int) -> NDArray[np.float64]:
    if width == 1:  # the only one without a sign
        return (np.frombuffer(data, np.uint8).astype(np.float64) - 128) / 128
    padded = np.zeros((len(data) // width, 4), np.uint8)
    padded[:, 4 - width :] = np.frombuffer(data, np.uint8).reshape(-1, width)
    return padded.view("<i4")[:, 0] / 2.0**31


def resampled(values: NDArray[np.float64], own: int, rate: int) -> NDArray[np.float64]:
    """Convert samples [n] from one rate to another; frequencies above half of the lower rate are dropped."""
    if own == rate:
        return values
    # silence behind the end, because the spectrum takes a recording for a period
    padded = np.concatenate([values, np.zeros(own // 10)])
    count = round(len(padded) * rate / own)
    spectrum = np.fft.rfft(padded)[: count // 2 + 1]
    spectrum = np.pad(spectrum, (0, count // 2 + 1 - len(spectrum)))
    changed: NDArray[np.float64] = np.fft.irfft(spectrum, count) * (count / len(padded))
    return changed[: max(1, round(len(values) * rate / own))]


def windows(samples: Samples, rate: int, most: int) -> list[Samples]:
    """Cut a recording into parts of at most `most` samples, each at the quietest place in the second half of it."""
    parts, stretch = list[Samples](), max(1, int(_STRETCH * rate))
    while len(samples) > most:
        first = int(most * _LATE)
        late = np.square(samples[first : most - (most - first) % stretch]).reshape(-1, stretch).mean(axis=1)
        cut = first + int(late.argmin()) * stretch + stretch // 2
        parts.append(samples[:cut])
        samples = samples[cut:]
    return [*parts, samples]
