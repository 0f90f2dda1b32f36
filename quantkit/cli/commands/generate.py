"""`quantkit generate`: text out of a bundle."""

from __future__ import annotations

from typing import Annotated, Any

import typer

import quantkit
from quantkit.cli.answer import Answer, showing
from quantkit.cli.options import BundlePath, Json, On, Runtime, Wheelhouse, demand_device


def generate(
    bundle: BundlePath,
    prompt: Annotated[str, typer.Option(metavar="TEXT", help="The text to go on from.", show_default=False)],
    runtime: Runtime = None,
    new_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Tokens to add at most.")] = 64,
    sample: Annotated[bool, typer.Option("--sample", help="Draw, instead of the most likely token.")] = False,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Of the drawing.")] = 0,
    chat: Annotated[bool, typer.Option("--chat", help="Put the prompt into the model's chat template.")] = False,
    on: On = None,
    wheelhouse: Wheelhouse = None,
    as_json: Json = False,
) -> Answer:
    """Let a bundle's model go on from a prompt, here or on a device."""
    from rich.text import Text

    from quantkit.pipeline.measure import default_runtime
    from quantkit.runtimes import load_runtime

    demand_device(on, wheelhouse)
    opened = quantkit.load(bundle)
    runner = load_runtime(runtime or default_runtime(opened), where="--runtime")
    with showing() as progress:
        progress.begin(f"loading {bundle}")
        how: dict[str, Any] = {"new_tokens": new_tokens, "sample": sample, "seed": seed, "chat": chat}
        if on is None:
            made = runner.generate(opened, prompt, **how)
        else:
            from quantkit.devices.asked import generate_on
            from quantkit.devices.named import demand_sessions, reach

            demand_sessions([runner.name], text=True)
            with reach(on, wheelhouse=wheelhouse, runtimes=[runner.name]) as found:
                made = generate_on(opened, found, prompt, progress, runtime=runner.name, **how)
    text = made["text"] if chat else f"{prompt}{made['text']}"
    notes = made.pop("notes", [])
    return Answer({"prompt": prompt, **made}, [Text(text), *(Text(f"! {note}") for note in notes)], warnings=notes)
