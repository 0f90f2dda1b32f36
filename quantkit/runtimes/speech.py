"""Write down a recording with a bundle's model, in torch or in ONNX Runtime."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.bundle import Bundle
from quantkit.errors import InputError, MissingDependency

if TYPE_CHECKING:
    from torch import Tensor

    from quantkit.runtimes import Runtime

CODE = "generate-audio"


def demand_hearing(bundle: Bundle, runtime: str, device: str | None, prompt: str | None) -> None:
    """Refuse a recording for a model of text, or where no library takes it. Raises InputError `generate-audio`."""
    value, rule, remedy = "", "", "leave --audio out"
    if not bundle.manifest.hears:
        value, rule = f"{bundle.manifest.model.name} takes text", "only a model of speech hears recordings"
    elif prompt is not None:
        value, rule, remedy = "with --prompt", "a model of speech writes what it hears", "leave --prompt out"
    elif device is not None:
        value, rule, remedy = f"on {device}", "a device receives tokens alone", "leave --on out"
    elif runtime not in ("torch", "onnxruntime"):
        value, rule, remedy = f"runtime {runtime}", "no such file holds an encoder of speech", "--runtime torch"
    if value:
        raise InputError(CODE, "--audio", value, rule, remedy)


def written(model: Any, tokenizer: Any, folder: Path, features: Sequence[Mapping[str, Tensor]], most: int) -> list[str]:
    """Return the transcripts of recordings, greedily, by a model of transformers or the graphs of ONNX Runtime.

    Args:
        folder: of the tokens before a transcript, and of those that are never written.
        features: the encoder's inputs for each recording, as `heard.features` makes them.
        most: most tokens of a transcript.
    """
    from quantkit.calibrate.tokens import heard
    from quantkit.runtimes.onnxruntime.encoder_decoder import OnnxPair

    if not isinstance(model, OnnxPair):
        return heard.transcripts(model, tokenizer, features, most)
    assert model.heard is not None
    before, stated = heard.prompt_of(tokenizer, folder), heard.generation_of(folder)
    rows = [model.written(one[model.heard[0]].float().numpy(), before, stated, most) for one in features]
    return [str(tokenizer.decode(row, skip_special_tokens=True)) for row in rows]


def transcribed(bundle: Bundle, runtime: Runtime, audio: Path, new_tokens: int | None) -> dict[str, Any]:
    """Write down a recording, in windows that the model hears at a time.

    Args:
        runtime: torch, or ONNX Runtime.
        audio: WAV file; a long one is cut at pauses.
        new_tokens: most tokens of a window; None for as many as the model takes.

    Returns:
        `text`, `tokens` (their number), `seconds`.

    Raises InputError: `calibration-audio`, `file-missing`; MissingDependency: transformers, for the features.
    """
    with MissingDependency.unless_found("transformers", extra="compile", purpose="features of a recording"):
        import transformers  # noqa: F401
    import inspect

    from quantkit.calibrate.sets.recordings import Recording, samples_of, windows
    from quantkit.calibrate.tokens import heard
    from quantkit.model.source import pretrained
    from quantkit.model.source.places import quiet_loading
    from quantkit.model.structure.kinds import positions
    from quantkit.runtimes.onnxruntime.encoder_decoder import OnnxPair

    folder = runtime.checked(bundle)
    extractor, tokenizer = heard.extractor_in(folder, str(bundle.path)), pretrained.tokenizer(folder)
    rate = heard.rate_of(extractor)
    samples = samples_of(audio, rate)
    parts = [Recording(audio.name, part) for part in windows(samples, rate, heard.window_of(extractor) or len(samples))]
    most = new_tokens or (positions(pretrained.config(folder).to_dict()) or heard.LONGEST) - heard.BEFORE
    model: Any
    if runtime.name == "torch":
        with quiet_loading():
            model = runtime.network(folder)  # type: ignore[attr-defined]
        takes = list(inspect.signature(model.forward).parameters)
    else:
        model = runtime.load(bundle)
        assert isinstance(model, OnnxPair) and model.heard is not None
        takes = [model.heard[0]]
    features, started = heard.features(extractor, parts, takes), time.perf_counter()
    texts = written(model, tokenizer, folder, features, most)
    text = " ".join(part.strip() for part in texts)
    return {
        "text": text,
        "tokens": len(tokenizer(text, add_special_tokens=False).input_ids),
        "seconds": time.perf_counter() - started,
    }
