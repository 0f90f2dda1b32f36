"""`quantkit generate`: text from a bundle."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

import quantkit
from quantkit.cli.answer import Answer, showing
from quantkit.cli.options import BundlePath, Json, On, Runtime, Wheelhouse, demand_device
from quantkit.errors import InputError


def generate(
    bundle: BundlePath,
    prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="Text to continue.", show_default=False)] = None,
    runtime: Runtime = None,
    new_tokens: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Most tokens to add; 64, or all of a recording.", show_default=False),
    ] = None,
    sample: Annotated[bool, typer.Option("--sample", help="Sample, instead of taking the most likely token.")] = False,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Seed of the sampling.")] = 0,
    chat: Annotated[bool, typer.Option("--chat", help="Wrap the prompt in the model's chat template.")] = False,
    image: Annotated[
        list[Path] | None,
        typer.Option("--image", metavar="FILE", help="Image before the text, in torch; may be repeated."),
    ] = None,
    audio: Annotated[
        Path | None,
        typer.Option("--audio", metavar="FILE", help="Recording (WAV) that a model of speech writes down."),
    ] = None,
    on: On = None,
    wheelhouse: Wheelhouse = None,
    as_json: Json = False,
) -> Answer:
    """Continue a prompt with a bundle's model, here or on a device."""
    from rich.text import Text

    from quantkit.pipeline.measure import config_of, default_runtime
    from quantkit.runtimes import load_runtime
    from quantkit.runtimes.generate import demand_images

    demand_device(on, wheelhouse)
    if prompt is None and audio is None:
        rule = "a model continues a text, or hears a recording"
        raise InputError(
            "usage", "--prompt", "not given", rule, '--prompt "TEXT"; of a model of speech --audio FILE.wav'
        )
    opened = quantkit.load(bundle)
    runner = load_runtime(runtime or default_runtime(opened), where="--runtime")
    if audio is not None:
        return _transcribed(opened, runner, audio, new_tokens, on, prompt)
    assert prompt is not None
    how: dict[str, Any] = {"new_tokens": new_tokens or 64, "sample": sample, "seed": seed, "chat": chat}
    if image:
        demand_images(opened, runner, image, on)
        how["images"] = image
    with showing() as progress:
        progress.begin(f"loading {bundle}")
        if on is None:
            answer = runner.generate(opened, prompt, **how)
        else:
            from quantkit.devices.asked import generate_on
            from quantkit.devices.named import demand_sessions, reach

            demand_sessions([runner.name], text=True)
            with reach(on, wheelhouse=wheelhouse, runtimes=[runner.name]) as reached:
                answer = generate_on(opened, reached, prompt, progress, runtime=runner.name, **how)
    # a turn of a chat, or an encoder's prompt, is no beginning of the text
    alone = chat or image or config_of(opened).get("is_encoder_decoder")
    text = answer["text"] if alone else f"{prompt}{answer['text']}"
    notes = answer.pop("notes", [])
    notes += [] if answer["text"] else ["the model ended its text at the first token"]
    return Answer({"prompt": prompt, **answer}, [Text(text), *(Text(f"! {note}") for note in notes)], warnings=notes)


def _transcribed(
    bundle: Any, runner: Any, audio: Path, new_tokens: int | None, device: str | None, prompt: str | None
) -> Answer:
    from rich.text import Text

    from quantkit.runtimes.speech import demand_hearing, transcribed

    demand_hearing(bundle, runner.name, device, prompt)
    with showing() as progress:
        progress.begin(f"loading {bundle.path}")
        answer = transcribed(bundle, runner, audio, new_tokens)
    return Answer({"prompt": audio.name, **answer}, [Text(answer["text"])])
