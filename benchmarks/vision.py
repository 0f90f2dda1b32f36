"""Vision-language models with real text stacks under random towers: text as the plain model's, images as transformers'.

    python benchmarks/vision.py
    python benchmarks/vision.py --only smollm2-135m

No model with a trained tower is at hand. So SmolLM2-135M becomes the text stack of a LLaVA and of an Idefics 3, and
Gemma 3 270M that of a Gemma 3 for images, each under a tower and projector of random weights. Each is compiled on text,
as its plain model is, and on text and photographs. Targets: KL on text equals the plain bundle's to 1e-6; run block by
block, a sequence with an image gives the logits of transformers' own forward to 1e-4. Quality on images is not shown:
a random tower says nothing of it. Five cases, 512 scored positions each.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from harness.record import layout, parsing, record, show, verdicts

from quantkit.model.source.alias import ALIASES, materialize

SAME, EXACT, POSITIONS = 1e-6, 1e-4, 512
_TOWER = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
_CASES = [
    ("smollm2-135m", "llava", "float32", "gptq-int4"),
    ("smollm2-135m", "llava", "bfloat16", "rtn-int4"),
    ("smollm2-135m", "idefics3", "float32", "rtn-int4"),
    ("gemma-3-270m", "gemma3", "float32", "rtn-int4"),
    ("gemma-3-270m", "gemma3", "bfloat16", "rtn-int4"),
]
_CHANGES = ("calibration.samples=4", "calibration.tokens=192", "export=[{checkpoint: {}}]", "gates={}")


def wrapped(kind: str, folder: Path, plain: Any, tokenizer: Any) -> Any:
    """A config of a class around a text model, and a processor that is saved to a folder.

    A processor may add tokens, for which the text model then gets rows.
    """
    import transformers as hf

    known = tokenizer.get_vocab()
    if kind == "gemma3":
        names = {"image_token": "<unused0>", "boi_token": "<unused1>", "eoi_token": "<unused2>"}
        tokenizer.init_kwargs |= names
        for name, token in names.items():
            setattr(tokenizer, name, token)
            setattr(tokenizer, f"{name}_id", known[token])
        pixels = hf.Gemma3ImageProcessorPil(size={"height": 64, "width": 64})
        hf.Gemma3Processor(pixels, tokenizer, image_seq_length=16).save_pretrained(folder)
        tower = {**_TOWER, "image_size": 64, "patch_size": 8, "model_type": "siglip_vision_model"}
        ids = {f"{name}_index": known[token] for name, token in names.items()}
        return hf.Gemma3Config(text_config=plain.config.to_dict(), vision_config=tower, mm_tokens_per_image=16, **ids)
    image = "<file_sep>"
    if kind == "idefics3":
        pixels = hf.Idefics3ImageProcessorPil(size={"longest_edge": 64}, max_image_size={"longest_edge": 64})
        hf.Idefics3Processor(pixels, tokenizer, image_seq_len=16).save_pretrained(folder)
        plain.resize_token_embeddings(len(tokenizer))
        tower = {**_TOWER, "image_size": 64, "patch_size": 8}
        tied = {"image_token_id": tokenizer.convert_tokens_to_ids("<image>"), "tie_word_embeddings": True}
        return hf.Idefics3Config(text_config=plain.config.to_dict(), vision_config=tower, scale_factor=2, **tied)
    pixels = hf.CLIPImageProcessorPil(size={"shortest_edge": 64}, crop_size={"height": 64, "width": 64})
    how = {"patch_size": 8, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    hf.LlavaProcessor(pixels, tokenizer, image_token=image, **how).save_pretrained(folder)
    tower = {**_TOWER, "image_size": 64, "patch_size": 8, "model_type": "clip_vision_model"}
    tied = {"image_token_index": known[image], "tie_word_embeddings": True}
    return hf.LlavaConfig(text_config=plain.config.to_dict(), vision_config=tower, **tied)


def made(source: Path, kind: str, dtype: str, place: Path) -> tuple[Path, Path]:
    """Folders of the plain model in a dtype, and of the model around it."""
    import torch
    import transformers as hf

    plain = hf.AutoModelForCausalLM.from_pretrained(source, dtype=getattr(torch, dtype))
    tokenizer = hf.AutoTokenizer.from_pretrained(source)
    torch.manual_seed(0)
    config = wrapped(kind, place / kind, plain, tokenizer)
    plain.save_pretrained(place / "plain")
    tokenizer.save_pretrained(place / "plain")
    whole = hf.AutoModelForImageTextToText.from_config(config).to(getattr(torch, dtype))
    stack = getattr(whole.model, "language_model", None) or whole.model.text_model
    stack.load_state_dict(plain.model.state_dict())
    whole.tie_weights()
    whole.save_pretrained(place / kind)
    return place / "plain", place / kind


def one(model: Path, recipe: str, out: Path, *changes: str) -> tuple[float, dict[str, float]]:
    """Compile a bundle; its KL on text, and the values of its checks."""
    import quantkit
    from quantkit.pipeline import Request, compile_model

    asked = Request.of(str(model), recipe=recipe, changes=(*_CHANGES, *changes), out=out, speed=False, vllm=False)
    compile_model(asked)
    manifest = json.loads((out / "manifest.json").read_text())
    kl = next(row["value"] for row in quantkit.load(out).measurements if row["name"] == "accuracy.kl")
    shutil.rmtree(out)
    return kl, {check["name"]: check["value"] for check in manifest["checks"]}


def compile_case(source: Path, name: str, kind: str, dtype: str, recipe: str, place: Path) -> dict[str, Any]:
    """A bundle of the plain model, one of the text alone, and one of text and photographs."""
    plain, whole = made(source, kind, dtype, place)
    kl_plain, _ = one(plain, recipe, place / "plain-bundle")
    kl_text, checks = one(whole, recipe, place / "text-bundle")
    kl_images, seen = one(whole, "gptq-int4", place / "images-bundle", "calibration.images=photos")
    return {
        **{"model": name, "class": kind, "dtype": dtype, "recipe": recipe, "kl_plain": kl_plain, "kl_text": kl_text},
        "apart": abs(kl_text - kl_plain) / kl_plain,
        "own_forward_images": seen["stream.own_forward.images"],
        "kl_images": kl_images,
        "reload": max(checks["reload.transformers"], seen["reload.transformers"]),
    }


def main() -> int:
    """Build, compile, compare, record."""
    parser = parsing(__doc__)
    parser.add_argument("--only", nargs="*", default=[], help="models, classes or dtypes")
    options = parser.parse_args()
    import transformers

    from quantkit.pipeline.blocks import tokens

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    tokens.SCORED = POSITIONS
    sources = {name: materialize(ALIASES[name]) for name, *_ in _CASES}
    rows, began = [], time.monotonic()
    for case in _CASES:
        if not options.only or set(options.only) & set(case):
            with tempfile.TemporaryDirectory(prefix="vision-") as home:
                os.environ["QUANTKIT_CACHE"] = f"{home}/cache"
                rows.append(compile_case(sources[case[0]], *case, Path(home)))
                print(f"{time.monotonic() - began:.0f} s {rows[-1]}", flush=True)
    columns = "model | class | dtype | recipe | kl_plain=KL plain:.6f | kl_text=KL:.6f | apart=apart:.1e"
    columns += " | own_forward_images=own forward:.1e | kl_images=KL with images:.6f | reload=reload:.1e"
    show("text stacks under random towers", rows, layout(columns))
    claim = f"KL on text equals the plain bundle's to {SAME:g}; logits with an image equal transformers' to {EXACT:g}"
    settings = {"changes": _CHANGES, "images": "photos, gptq-int4", "positions": POSITIONS}
    record("vision", claim, rows, settings, write=not options.only)
    return verdicts(
        {
            "text is as the plain model's": all(row["apart"] <= SAME for row in rows),
            "images are as transformers'": all(row["own_forward_images"] <= EXACT for row in rows),
        }
    )


if __name__ == "__main__":
    raise SystemExit(main())
