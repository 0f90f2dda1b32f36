"""Vision-language models with real text stacks under random towers: text as the plain model's, images as transformers'.

    python benchmarks/vision.py
    python benchmarks/vision.py --only smollm2-135m

No model with a trained tower is at hand. So SmolLM2-135M becomes the text stack of a LLaVA and of an Idefics 3, and
Gemma 3 270M that of a Gemma 3 for images, each under a tower and projector of random weights. Each is compiled on text,
as its plain model is, and on text and photographs. Targets: KL on text equals the plain bundle's to 1e-6; run block by
block, a sequence with an image gives the logits of transformers' own forward to 1e-4. Quality on images is not shown:
a random tower says nothing of it.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from harness.process import compiled
from harness.record import layout, parsing, record, show, verdicts

from quantkit.model.source.alias import ALIASES, materialize

SAME, EXACT = 1e-6, 1e-4
_TOWER = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
_CASES = [
    ("smollm2-135m", "llava", "float32"),
    ("smollm2-135m", "llava", "bfloat16"),
    ("smollm2-135m", "idefics3", "float32"),
    ("gemma-3-270m", "gemma3", "float32"),
]
_CHANGES = ("calibration.samples=4", "calibration.tokens=192", "export=[{checkpoint: {}}]", "gates={}")


def wrapped(kind: str, folder: Path, text: Any, tokenizer: Any) -> Any:
    """A config of a class around a text config, and a processor that is saved to a folder."""
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
        return hf.Gemma3Config(text_config=text, vision_config=tower, mm_tokens_per_image=16, **ids)
    image = "<file_sep>"
    if kind == "idefics3":
        pixels = hf.Idefics3ImageProcessorPil(size={"longest_edge": 64}, max_image_size={"longest_edge": 64})
        tokenizer.add_tokens(["<end_of_utterance>"])
        hf.Idefics3Processor(pixels, tokenizer, image_seq_len=16).save_pretrained(folder)
        tower = {**_TOWER, "image_size": 64, "patch_size": 8}
        return hf.Idefics3Config(
            text_config=text, vision_config=tower, scale_factor=2, image_token_id=known[image], tie_word_embeddings=True
        )
    pixels = hf.CLIPImageProcessorPil(size={"shortest_edge": 64}, crop_size={"height": 64, "width": 64})
    how = {"patch_size": 8, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    hf.LlavaProcessor(pixels, tokenizer, image_token=image, **how).save_pretrained(folder)
    tower = {**_TOWER, "image_size": 64, "patch_size": 8, "model_type": "clip_vision_model"}
    tied = {"image_token_index": known[image], "tie_word_embeddings": True}
    return hf.LlavaConfig(text_config=text, vision_config=tower, **tied)


def made(name: str, kind: str, dtype: str, place: Path) -> tuple[Path, Path]:
    """Folders of the plain model in a dtype, and of the model around it."""
    import torch
    import transformers as hf

    source = materialize(ALIASES[name])
    plain = hf.AutoModelForCausalLM.from_pretrained(source, dtype=getattr(torch, dtype))
    tokenizer = hf.AutoTokenizer.from_pretrained(source)
    plain.save_pretrained(place / "plain")
    tokenizer.save_pretrained(place / "plain")
    torch.manual_seed(0)
    config = wrapped(kind, place / kind, plain.config.to_dict(), tokenizer)
    whole = hf.AutoModelForImageTextToText.from_config(config).to(getattr(torch, dtype))
    stack = getattr(whole.model, "language_model", None) or whole.model.text_model
    stack.load_state_dict(plain.model.state_dict())
    whole.tie_weights()
    whole.save_pretrained(place / kind)
    return place / "plain", place / kind


def compile_case(name: str, kind: str, dtype: str, place: Path) -> dict[str, Any]:
    """The plain bundle, one of the text alone, and one of text and photographs."""
    plain, whole = made(name, kind, dtype, place)
    kl, checks = {}, {}
    for label, model, more in (
        ("plain", plain, ()),
        ("text", whole, ()),
        ("images", whole, ("calibration.images=photos",)),
    ):
        sets = [f"--set={change}" for change in (*_CHANGES, *more)]
        result, done = compiled(str(model), "gptq-int4", place / f"{label}-bundle", *sets, "--no-speed")
        assert done.status == 0, (label, done.status)
        row = next(row for row in result["measurements"] if row["name"] == "accuracy.kl")
        kl[label] = row["value"]
        manifest = json.loads((place / f"{label}-bundle" / "manifest.json").read_text())
        checks |= {check["name"]: check["value"] for check in manifest["checks"]}
    return {
        **{"model": name, "class": kind, "dtype": dtype},
        **{f"kl_{label}": value for label, value in kl.items()},
        "apart": abs(kl["text"] - kl["plain"]) / kl["plain"],
        "own_forward_images": checks["stream.own_forward.images"],
        "reload": checks["reload.transformers"],
    }


def main() -> int:
    """Build, compile, compare, record."""
    parser = parsing(__doc__)
    parser.add_argument("--only", nargs="*", default=[], help="models, classes or dtypes")
    options = parser.parse_args()
    rows = []
    for case in _CASES:
        if not options.only or set(options.only) & set(case):
            with tempfile.TemporaryDirectory(prefix="vision-") as home:
                rows.append(compile_case(*case, Path(home)))
    columns = "model | class | dtype | kl_plain=KL plain:.6f | kl_text=KL:.6f | apart=apart:.1e"
    columns += " | kl_images=KL with images:.6f | own_forward_images=own forward:.1e | reload=reload:.1e"
    show("text stacks under random towers", rows, layout(columns))
    claim = f"KL on text equals the plain bundle's to {SAME:g}; logits with an image equal transformers' to {EXACT:g}"
    record("vision", claim, rows, {"recipe": "gptq-int4", "changes": _CHANGES, "images": "photos"})
    return verdicts(
        {
            "text is as the plain model's": all(row["apart"] <= SAME for row in rows),
            "images are as transformers'": all(row["own_forward_images"] <= EXACT for row in rows),
        }
    )


if __name__ == "__main__":
    raise SystemExit(main())
