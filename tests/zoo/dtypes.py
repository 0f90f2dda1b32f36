"""What a user does with a model of each dtype: every shipped recipe for decoders, from the compile to a text.

A cell is one step of one recipe on a tiny Llama that is stored in one dtype. It is right, or refused by a clear code:
a destination does not hold every format. `benchmarks/zoo.py --dtypes` records all of them.
"""

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import quantkit
from quantkit import content, plugins
from quantkit.bundle import Bundle
from quantkit.errors import InputError, MissingDependency
from quantkit.exporters import load_exporter
from quantkit.model.source.open import open_model
from quantkit.pipeline.measure import default_runtime
from quantkit.recipe import Recipe
from quantkit.runtimes import load_runtime
from zoo import judge, shrink

DTYPES = ("float32", "bfloat16", "float16")
# the shipped model, cast, and what it goes through besides
ALIAS, REAL = "smollm2-135m", ("awq-int4", "rtn-int4", "nf4")
STEPS = ("compile", "verify", "measure", "generate")
# widths that groups of 128, blocks of 256 and rotations divide
_WIDTHS = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 2}
_VOCABULARY = {"vocab_size": 260, "bos_token_id": 256, "eos_token_id": 257}
# random models lose more than trained ones, and quality is no question here
_CHANGES = ["gates={}", "calibration={set: prose-en, samples: 4, tokens: 32}"]
_SCORED, _FEW = "quantkit.pipeline.blocks.tokens.SCORED", 250


def recipes() -> list[str]:
    """Every shipped recipe that compiles a decoder."""
    return [name for name in content.names("recipes") if "decoder" in Recipe.load(name).models]


def destinations() -> list[str]:
    """Every exporter that a finished bundle can be given to."""
    return [name for name in plugins.EXPORTERS.names() if load_exporter(name).adds]


def model(dtype: str, folder: Path, **sizes: int) -> Path:
    """A tiny Llama with a tokenizer."""
    shrink.tiny("LlamaForCausalLM", folder, dtype=getattr(torch, dtype), **{**_VOCABULARY, **_WIDTHS, **sizes})
    shrink.tokenizer_of_bytes("<s> $A", (("t", "h"), ("th", "e"))).save_pretrained(folder)
    return folder


def real(dtype: str, folder: Path) -> Path:
    """Write the shipped model in another dtype, as plain transformers does."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = open_model(ALIAS).path
    AutoModelForCausalLM.from_pretrained(source, dtype=getattr(torch, dtype)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    return folder


def cells(source: Path, recipe: str, steps: Sequence[str] = STEPS, to: Sequence[str] | None = None) -> Iterator[Any]:
    """(step, verdict, code, line) of one recipe; nothing after a compile that does not end in a bundle."""
    with tempfile.TemporaryDirectory(prefix="dtypes-") as home:
        made: list[Bundle] = []
        yield _cell("compile", lambda: made.append(_compiled(source, recipe, Path(home))))
        if not made:
            return
        bundle = made[0]
        later: dict[str, Callable[[], Any]] = {
            "verify": lambda: _verified(bundle),
            "measure": lambda: _measured(bundle, source),
            "generate": lambda: _generated(bundle),
        }
        for step in steps[1:]:
            yield _cell(step, later[step])
        stated = {next(iter(step)) for step in bundle.manifest.recipe["export"]}
        for name in destinations() if to is None else to:
            if name in stated:
                continue
            copy = Path(home) / name
            shutil.copytree(bundle.path, copy)
            yield _cell(f"export {name}", lambda copy=copy, name=name: _verified(quantkit.export(copy, name)))
            shutil.rmtree(copy)


def _cell(step: str, do: Callable[[], Any]) -> dict[str, str]:
    try:
        do()
    except MissingDependency as problem:
        return {"step": step, "verdict": "not here", "code": problem.code, "line": problem.line()}
    except InputError as problem:
        return {"step": step, "verdict": "refused", "code": problem.code, "line": problem.line()}
    except Exception as problem:
        code = getattr(problem, "code", type(problem).__name__)
        return {"step": step, "verdict": "WRONG", "code": code, "line": f"{problem} {judge.place(problem)}"}
    return {"step": step, "verdict": "right", "code": "", "line": ""}


def _compiled(source: Path, recipe: str, home: Path) -> Bundle:
    with patch(_SCORED, _FEW):
        return quantkit.compile(str(source), recipe, out=home / "bundle", changes=_CHANGES, speed=False)


def _verified(bundle: Bundle) -> None:
    failed = [check for check in judge.verified(bundle) if not check.ok]
    if failed:
        raise AssertionError(f"{failed[0].name} {failed[0].value} of {failed[0].limit} {failed[0].where}")


def _measured(bundle: Bundle, source: Path) -> None:
    before = judge.figures(bundle.measurements)
    with patch(_SCORED, _FEW):
        quantkit.measure(bundle, str(source), speed=False)
    after = judge.figures(quantkit.load(bundle.path).measurements)
    off = {name: abs(after[name] - value) / max(abs(value), 1e-3) for name, value in before.items()}
    if any(error > judge.TOLERANCE for error in off.values()):
        raise AssertionError(f"{before} compiled, {after} measured")


def _generated(bundle: Bundle) -> None:
    loaded = quantkit.load(bundle.path)
    text = load_runtime(default_runtime(loaded)).generate(loaded, "a cat", new_tokens=4)["text"]
    assert isinstance(text, str)
