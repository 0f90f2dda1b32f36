"""The files of llama.cpp's side, made by the interpreter of its own environment.

    request: {"source": GGUF of any type, "f32": GGUF to write, "q4_0": GGUF to write, "threads": 2}
    answer:  {"bytes", "tensors": {type: count}, "other": {tensor that is neither Q4_0 nor F32: type}}

Q4_0 by llama.cpp's own quantize function with its defaults, from a float32 file that holds the source's tensors
dequantized, exactly the float weights that quantkit starts from.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np


def write_f32(source: Path, target: Path) -> None:
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, str(reader.fields["general.architecture"].contents()))
    for field in reader.fields.values():
        # the first three are of the file itself; the writer has added the architecture
        if field.name.startswith("GGUF.") or field.name in ("general.architecture", "general.file_type"):
            continue
        items = field.types[-1] if field.types[0] is gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=items)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type).reshape(tensor.shape[::-1])
        writer.add_tensor(tensor.name, np.ascontiguousarray(values, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def quantize(source: Path, target: Path, threads: int) -> None:
    settings = llama_cpp.llama_model_quantize_default_params()
    settings.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0
    settings.nthread = threads
    if status := llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), settings):
        raise SystemExit(f"llama_model_quantize: {status}")


def main(request: dict[str, Any]) -> dict[str, Any]:
    f32, q4_0 = Path(request["f32"]), Path(request["q4_0"])
    write_f32(Path(request["source"]), f32)
    quantize(f32, q4_0, request["threads"])
    types = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(q4_0).tensors}
    return {
        "bytes": q4_0.stat().st_size,
        "tensors": dict(Counter(types.values())),
        "other": {name: kind for name, kind in types.items() if kind not in ("Q4_0", "F32")},
    }
