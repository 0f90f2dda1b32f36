"""What TensorRT-RTX builds for SM 8.9, model by model and recipe by recipe, without a GPU.

    python benchmarks/tensorrt_builds.py

Tiny models of random weights (heads of 64): a Llama, a Qwen3, a BERT, a convolutional network and a vision transformer
(the last two as float ONNX graphs, exported by torch), each compiled whole for `rtx-4090` in 16 bits, int8, int4
without zero points and fp8. Then every shipped recipe with TensorRT for its export, on a tiny model of its kind.
Claims: all of the first build; each of the second builds, or is refused by a check of our own before TensorRT sees it.
Nothing is run and nothing is timed; `seconds` are of the whole compile, on a machine that does other things.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from harness.random_model import byte_tokenizer
from harness.record import parsing, record, show, verdicts

import quantkit
from quantkit import content
from quantkit.errors import QuantkitError
from quantkit.recipe import Recipe

TARGET = "rtx-4090"
EXPORT = "export=[{tensorrt: {}}]"
STATIC_FP8 = "scheme.activations={format: fp8_e4m3, granularity: tensor, dynamic: false}"
KINDS = "models=[decoder, encoder, network]"
FORMS: dict[str, tuple[str, list[str]]] = {"float16": ("float", [KINDS]), "int8": ("int8-tensorrt", [KINDS])} | {
    "int4-symmetric": ("int4-symmetric", [KINDS]),
    "fp8": ("fp8", [KINDS, STATIC_FP8]),
}
# what TensorRT itself says, in our words: a check of ours should have come first
LATE = ("build-failed", "network-unsupported", "internal-error")


def transformer(folder: Path, name: str) -> Path:
    """Llama, Qwen3 or BERT of two layers, 128 wide."""
    import torch
    import transformers

    torch.manual_seed(0)
    tokenizer = byte_tokenizer()
    sizes: dict[str, Any] = {"vocab_size": len(tokenizer), "hidden_size": 128, "intermediate_size": 256} | {
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 256,
    }
    if name == "bert":
        model: Any = transformers.BertModel(transformers.BertConfig(**sizes))
    elif name == "llama":
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_key_value_heads=1))
    else:
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes, num_key_value_heads=1, head_dim=64))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def graph(path: Path, name: str) -> Path:
    """A small residual network, or a vision transformer, as torch exports it."""
    import torch
    import transformers
    from torch import nn

    from quantkit.model.to_onnx import write_onnx

    torch.manual_seed(0)

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Sequential(nn.Conv2d(3, 64, 3, stride=2, padding=1), nn.BatchNorm2d(64), nn.ReLU())
            self.depth = nn.Sequential(nn.Conv2d(64, 64, 3, padding=1, groups=64), nn.BatchNorm2d(64), nn.ReLU())
            self.point = nn.Sequential(nn.Conv2d(64, 64, 1), nn.BatchNorm2d(64))
            self.head = nn.Linear(64, 10)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            x = self.stem(images)
            return self.head(torch.relu(x + self.point(self.depth(x))).mean(dim=(2, 3)))

    class Transformer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            sizes = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 256}
            config = transformers.ViTConfig(**sizes, image_size=32, patch_size=8, num_labels=10)
            self.inside = transformers.ViTForImageClassification(config)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return self.inside(images).logits

    made = Network() if name == "cnn" else Transformer()
    write_onnx(made, [torch.randn(2, 3, 32, 32)], path, inputs=["images"], outputs=["logits"])
    return path


def compiled(model: Path, recipe: str, changes: Sequence[str], data: Path, out: Path) -> dict[str, Any]:
    """One compile: the bytes of its engine, or the line of its refusal."""
    begun = time.perf_counter()
    small = [EXPORT, "gates={}", "calibration.samples=4", "calibration.tokens=64"]
    found: dict[str, Any] = {"bytes": None, "refused": "", "code": ""}
    try:
        bundle = quantkit.compile(
            str(model), recipe=recipe, target=TARGET, calibration=data, out=out, changes=[*small, *changes], speed=False
        )
        built = json.loads((bundle.path / "engine" / "sm89.json").read_text())
        found |= {"bytes": built["bytes"], "layers": built["layers"]}
        found["kept"] = sum(each.code == "kept" for each in bundle.manifest.decisions)
    except QuantkitError as problem:
        found |= {"refused": problem.line()[:400], "code": problem.code}
    return {**found, "seconds": round(time.perf_counter() - begun, 1)}


def main() -> int:
    parser = parsing(__doc__)
    parser.add_argument("--models", nargs="+", default=["llama", "qwen3", "bert", "cnn", "vit"])
    parser.add_argument("--recipes", nargs="*", default=content.names("recipes"))
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as place:
        home = Path(place)
        text, images = home / "text.txt", home / "images.npz"
        text.write_text((Path(__file__).parent / "texts" / "alice.txt").read_text(encoding="utf-8")[:12_000])
        np.savez(images, images=np.random.default_rng(0).standard_normal((60, 3, 32, 32)).astype(np.float32))
        places: dict[str, tuple[Path, Path]] = {}

        def model(name: str) -> tuple[Path, Path]:
            if name not in places:
                seen = name in ("cnn", "vit")
                made = graph(home / f"{name}.onnx", name) if seen else transformer(home / name, name)
                places[name] = made, images if seen else text
            return places[name]

        def one(name: str, form: str, recipe: str, changes: Sequence[str]) -> None:
            given, data = model(name)
            found = compiled(given, recipe, changes, data, home / f"bundle-{len(rows)}")
            rows.append({"model": name, "form": form, "recipe": recipe, "changes": list(changes), **found})
            print(name, form or recipe, found, flush=True)

        for name in options.models:
            for form, (recipe, changes) in FORMS.items():
                one(name, form, recipe, changes)
        for recipe in options.recipes:
            kinds = Recipe.load(recipe).models
            one("llama" if "decoder" in kinds else "bert" if "encoder" in kinds else "cnn", "", recipe, [])
    columns = {"model": "model", "form": "form", "recipe": "recipe", "bytes": "bytes", "refused": "refused"}
    show(f"what is built for {TARGET}", rows, columns)
    claim = "16 bits, int8, int4 and fp8 of five kinds of model build for SM 8.9; recipes build or are refused by us"
    settings = {"target": TARGET, "export": EXPORT}
    record(Path(__file__).stem, claim, rows, settings)
    matrix, recipes = ([row for row in rows if bool(row["form"]) == formed] for formed in (True, False))
    return verdicts(
        {
            f"{len(matrix)} of models and forms build": all(row["bytes"] for row in matrix),
            f"{len(recipes)} recipes build, or are refused before TensorRT sees them": all(
                row["bytes"] or row["code"] not in LATE for row in recipes
            ),
        }
    )


if __name__ == "__main__":
    raise SystemExit(main())
