"""A float GGUF of ours says and holds what llama.cpp's own converter writes from the same folder.

    pip download --no-deps --no-binary :all: llama-cpp-python==0.3.36     its source holds llama.cpp, unpack it
    python benchmarks/gguf_converter.py --converter vendor/llama.cpp/convert_hf_to_gguf.py

Compared: every field of the metadata, and every tensor's type and bytes, in float32 and float16. Gemma's converter
reads `tokenizer.model`, which the packaged file lost: it is made again from the tokens, scores and kinds of that
file (needs `sentencepiece` and `protobuf` where the converter runs).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from harness.record import layout, parsing, record, show, verdicts

from quantkit.model.source.alias import ALIASES, materialize

MODELS = ["smollm2-135m", "gemma-3-270m", "qwen2.5-coder-0.5b"]
FLOATS = {"float32": "f32", "float16": "f16"}


def folder_of(model: str, place: Path) -> Path:
    """A folder called like the model, for a converter that reads its name."""
    found = place / model
    found.mkdir()
    for path in materialize(ALIASES[model]).iterdir():
        os.link(path, found / path.name)
    if model.startswith("gemma"):
        pieces(ALIASES[model].source.find(model), found / "tokenizer.model")
        # the converter looks for added tokens where a folder of transformers 4 has them
        added = json.loads((found / "tokenizer.json").read_text())["added_tokens"]
        config = json.loads((found / "tokenizer_config.json").read_text())
        config["added_tokens_decoder"] = {each["id"]: each for each in added}
        (found / "tokenizer_config.json").unlink()  # a link to the cache's
        (found / "tokenizer_config.json").write_text(json.dumps(config))
    return found


def pieces(source: Path, target: Path) -> None:
    """SentencePiece's model of a GGUF's tokens."""
    import gguf
    from transformers.utils import sentencepiece_model_pb2_new as schema

    fields = gguf.GGUFReader(source).fields
    names = ("tokens", "scores", "token_type")
    model = schema.ModelProto()
    model.trainer_spec.model_type = 2
    model.trainer_spec.byte_fallback = True
    model.normalizer_spec.add_dummy_prefix = False
    for token, score, kind in zip(*(fields[f"tokenizer.ggml.{name}"].contents() for name in names), strict=True):
        piece = model.pieces.add()
        piece.piece, piece.score, piece.type = token.replace(" ", "\u2581"), score, kind
    target.write_bytes(model.SerializeToString())


def ours(folder: Path, out: Path, floats: str) -> None:
    from quantkit.exporters.gguf.exporter import EXPORT
    from quantkit.exporters.values import Values
    from quantkit.model.source.open import open_model
    from quantkit.model.streaming.stream import StreamedModel

    stream = StreamedModel(open_model(str(folder)))
    EXPORT.export(out, Values(stream, {}, lambda *_, **__: None), EXPORT.Options(floats=floats))


def compared(mine: Path, theirs: Path) -> dict[str, Any]:
    """What differs."""
    import gguf
    import numpy as np

    first, second = (gguf.GGUFReader(path) for path in (mine, theirs))
    said = [{key: field.contents() for key, field in each.fields.items()} for each in (first, second)]
    fields = sorted(key for key in said[0].keys() | said[1].keys() if said[0].get(key) != said[1].get(key))
    tensors = [{each.name: each for each in reader.tensors} for reader in (first, second)]
    names = tensors[0].keys() | tensors[1].keys()
    other = [
        name
        for name in names
        if name not in tensors[0]
        or name not in tensors[1]
        or tensors[0][name].tensor_type != tensors[1][name].tensor_type
        or not np.array_equal(tensors[0][name].data, tensors[1][name].data)
    ]
    for key in fields:
        print(f"  {key}: {str(said[0].get(key))[:100]} | {str(said[1].get(key))[:100]}")
    counts = {"fields": len(said[1]), "tensors": len(tensors[1])}
    return {**counts, "fields_that_differ": fields, "tensors_that_differ": sorted(other)}


def main() -> int:
    parser = parsing(__doc__)
    parser.add_argument("--converter", type=Path, required=True, help="llama.cpp's convert_hf_to_gguf.py")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    options = parser.parse_args()
    rows = []
    for model in options.models:
        for floats, short in FLOATS.items():
            with tempfile.TemporaryDirectory(dir=materialize(ALIASES[model]).parent) as name:
                place = Path(name)
                folder = folder_of(model, place)
                theirs = place / "theirs.gguf"
                asked = [folder, "--outfile", theirs, "--outtype", short, "--model-name", model]
                subprocess.run([sys.executable, options.converter, *asked], check=True, stderr=subprocess.DEVNULL)
                ours(folder, place / "gguf", floats)
                rows.append({"model": model, "floats": floats, **compared(place / "gguf" / "model.gguf", theirs)})
    columns = layout(
        "model | floats | fields:.0f | fields_that_differ=that differ | tensors:.0f | tensors_that_differ=that differ"
    )
    show("a file of ours, and llama.cpp's converter's", rows, columns)
    claim = "the metadata and tensors of a float GGUF equal those that llama.cpp's converter writes"
    record("gguf-converter", claim, rows, {"converter": options.converter.parent.name})
    named = {f"{row['model']} {row['floats']}": row for row in rows}
    equal = {
        f"{name} equal": not row["fields_that_differ"] and not row["tensors_that_differ"] for name, row in named.items()
    }
    return verdicts(equal)


if __name__ == "__main__":
    raise SystemExit(main())
