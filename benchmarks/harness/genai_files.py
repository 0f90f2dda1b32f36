"""The files of onnxruntime-genai's side, made by its own model builder at int4 with its defaults: a process of its own.

    request: {"folder": of the float model, "out": folder to make, "cache": an empty folder}
    answer:  {}

As `python -m onnxruntime_genai.models.builder -i FOLDER -o OUT -p int4 -e cpu -c CACHE`, by the same two functions. In
between, a config whose rotary angles differ by kind of layer (Gemma 3) is put as the builder's classes read it:
transformers 5 keeps one set a kind, builder 0.18 looks for that of global layers and a base frequency of local ones.
"""

from __future__ import annotations

from typing import Any

from onnxruntime_genai.models import builder


def main(request: dict[str, Any]) -> dict[str, Any]:
    where = ("", request["folder"], request["out"], "int4", "cpu", request["cache"])
    options = builder.parse_extra_options(*where, [])
    config = options["hf_details"]["hf_config"]
    angles = config.rope_parameters
    if "full_attention" in angles:
        config.rope_local_base_freq = angles["sliding_attention"]["rope_theta"]
        config.rope_parameters = angles["full_attention"]
    builder.create_model(*where, **options)
    return {}
