"""The fixed set of compiles whose `content_sha256` stays: small enough to be compiled in each run of the tests.

SmolLM2 is cut to two blocks, calibration to two short sequences, and nothing is timed. What a compile computes depends
on the processor and on libraries, so a content is known for a machine, by what a manifest says of it.
"""

import json
from pathlib import Path
from typing import Any

import zoo
from zoo.shrink import tokenizer_of_bytes

FEW: dict[str, Any] = {"calibration.samples": 2, "calibration.tokens": 64}
SMOLLM2 = {
    "awq-int4": {**FEW, "awq.grid": 3},
    "int8-dynamic": FEW,
    "gguf-q4_k_m": {**FEW, "calibration.generated": 0},
    "nf4": FEW,
}
# name -> model, recipe, changes; a model is an alias or one that is made by `_made`
COMPILES: dict[str, tuple[str, str, dict[str, Any]]] = {
    **{f"smollm2 {recipe}": ("smollm2-cut", recipe, changes) for recipe, changes in SMOLLM2.items()},
    "decoder awq-int4": ("decoder", "awq-int4", {**SMOLLM2["awq-int4"], "scheme.weights.group": 32}),
    "encoder int8-encoder": ("encoder", "int8-encoder", FEW),
    "minilm-l6 int8-encoder": ("minilm-l6", "int8-encoder", FEW),
    "fashion-mnist-cnn int8-network": ("fashion-mnist-cnn", "int8-network", {"calibration.images": 8}),
    "efficientnet-lite0 int8-network": ("efficientnet-lite0", "int8-network", {"calibration.images": 2}),
    "mixture rtn-int4": (
        "mixture",
        "rtn-int4",
        {**FEW, "scheme.weights.group": 32, "scheme.weights.symmetric": "true"},
    ),
}


def installed(name: str) -> bool:
    """Whether the model of a compile is here: one that is a package's may not be."""
    from quantkit.errors import InputError
    from quantkit.model.source import alias

    model, *_ = COMPILES[name]
    try:
        return model in _MADE or bool(alias.ALIASES[model].source.find(model))
    except InputError:
        return False


def compiled(name: str, folder: Path) -> dict[str, Any]:
    """The manifest of a compile of the set.

    Args:
        name: of `COMPILES`.
        folder: where models and bundles are put; a model that is there is taken.
    """
    from quantkit import cli
    from quantkit.pipeline.blocks import tokens

    model, recipe, changes = COMPILES[name]
    reference = str(_made(model, folder)) if model in _MADE else model
    out = folder / name.replace(" ", "--")
    words = ["compile", reference, "--recipe", recipe, "--no-speed", "--out", str(out), "--json"]
    scored, tokens.SCORED = tokens.SCORED, 64
    try:
        code = cli.run([*words, *(word for key, value in changes.items() for word in ("--set", f"{key}={value}"))])
    finally:
        tokens.SCORED = scored
    assert code in {0, 1}, f"{name} was not compiled"  # a gate may fail: so few sequences say little
    return json.loads((out / "manifest.json").read_text(encoding="utf-8"))


def machine_of(manifest: dict[str, Any]) -> str:
    """What a content depends on, as a manifest states it."""
    versions = manifest["versions"]
    libraries = (f"{name} {versions[name]}" for name in ("torch", "onnxruntime", "transformers", "numpy"))
    return ", ".join([manifest["device"]["name"], manifest["isa"], f"{manifest['threads']} threads", *libraries])


def here() -> str:
    """The same of this machine."""
    import torch

    from quantkit import machine

    stated = {"versions": machine.versions(), "device": machine.device(), "isa": machine.isa()}
    return machine_of({**stated, "threads": torch.get_num_threads()})


def _smollm2(folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from quantkit.model.source import alias

    whole = alias.materialize(alias.ALIASES["smollm2-135m"])
    AutoModelForCausalLM.from_pretrained(whole, num_hidden_layers=2).save_pretrained(folder)
    AutoTokenizer.from_pretrained(whole).save_pretrained(folder)


def _encoder(folder: Path) -> None:
    tokenizer = tokenizer_of_bytes("<s> $A </s>")
    zoo.save(folder, tokenizer, "bert", vocab_size=len(tokenizer), max_position_embeddings=128)


def _decoder(folder: Path) -> None:
    tokenizer = tokenizer_of_bytes("<s> $A")
    zoo.save(folder, tokenizer, "llama", vocab_size=len(tokenizer), num_hidden_layers=2)


def _mixture(folder: Path) -> None:
    tokenizer = tokenizer_of_bytes("<s> $A")
    zoo.mixture("mixtral", vocab_size=len(tokenizer), max_position_embeddings=128).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


_MADE = {"smollm2-cut": _smollm2, "decoder": _decoder, "encoder": _encoder, "mixture": _mixture}


def _made(model: str, folder: Path) -> Path:
    path = folder / model
    if not path.exists():
        _MADE[model](path)
    return path
