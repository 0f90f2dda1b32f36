"""A manifest and rows with known figures, for code that reads or shows them."""

from typing import Any

from quantkit.bundle import Manifest
from quantkit.measurement.rows import Row

CONTENT = "a" * 64
NOTE = "converted from GGUF Q4_1; no claim may rest on that scheme"


def manifest(**changes: Any) -> Manifest:
    """Return a complete bundle's manifest; keyword arguments replace its top-level keys."""
    scheme = {"format": "int4", "granularity": "group", "group": 64, "symmetric": False, "scale": "float16"}
    data: dict[str, Any] = {
        "quantkit": "0.1.0",
        "content_sha256": CONTENT,
        "state": "complete",
        "model": {
            "name": "a-model",
            "kind": "decoder",
            "source": {"ref": "hf:org/a-model@main", "sha256": "b" * 64, "dtype": "float32"},
        },
        "recipe": {
            "schema": 1,
            "name": "rtn-int4",
            "summary": "4-bit weights",
            "passes": [{"rtn": {"range": "mse"}}],
            "export": [{"checkpoint": {"layout": "pack-quantized"}}],
        },
        "target": {"name": "cpu-x86"},
        "calibration": {"set": "prose-en", "split": "calib", "ids_sha256": "c" * 64, "samples": 16, "tokens": 512},
        "seed": 7,
        "threads": 2,
        "isa": "avx2",
        "device": {"name": "A Processor"},
        "versions": {"torch": "2.13.0"},
        "created": "2027-01-01T00:00:00+00:00",
        "layers": [{"name": "layers.0.q", "shape": [64, 64], "scheme": scheme, "bits_per_weight": 4.3125}],
        "files": [
            {
                "path": "model/model.safetensors",
                "bytes": 170_000_000,
                "sha256": "d" * 64,
                "role": "weights",
                "deterministic": True,
            },
            {
                "path": "model/tokenizer.json",
                "bytes": 1_000,
                "sha256": "e" * 64,
                "role": "tokenizer",
                "deterministic": True,
            },
        ],
        "decisions": [
            {
                "pass": "gptq",
                "code": "damping-raised",
                "where": f"layers.{i}.mlp",
                "from": 0.01,
                "to": 0.1,
                "reason": "no factor",
            }
            for i in range(3)
        ],
        "checks": [
            {"name": "scales.finite", "value": 0, "limit": 0, "ok": True},
            {"name": "reload.transformers", "value": 3.2e-7, "limit": 1e-4, "ok": True},
            {"name": "gate.kl_max", "value": 0.14312, "limit": 0.5, "ok": True},
        ],
        "verdict": None,
    }
    return Manifest.model_validate({**data, **changes})


FAILED_GATE = {"name": "gate.top1_agreement_min", "value": 0.8214, "limit": 0.85, "ok": False}


def rows() -> list[Row]:
    """Return rows: perplexity 16.92 to 19.53, KL 0.143, agreement 82.1 %, next word 43.1 to 41.2 %, 538 to 170 MB, 4.31
    bits."""
    common: dict[str, Any] = {
        "subject": CONTENT,
        "runtime": "torch",
        "data": {"set": "prose-en", "split": "eval", "sha256": "e" * 64, "items": 6132},
        "shape": {"sequences": 12},
        "n": 6132,
    }
    perplexity = {"subject": "b" * 64, "value": 16.9234, "ratio": 16.9234 / 19.5312, "ratio_ci95": (0.857, 0.876)}
    return [
        Row(name="accuracy.perplexity", value=19.5312, unit="1", baseline=perplexity, **common),
        Row(name="accuracy.kl", value=0.14312, unit="nat", ci95=(0.13512, 0.15112), **common),
        Row(name="accuracy.top1_agreement", value=0.8214, unit="1", ci95=(0.8104, 0.8324), **common),
        Row(
            name="accuracy.next_word", value=0.4119, unit="1", baseline={"subject": "b" * 64, "value": 0.4311}, **common
        ),
        Row(
            name="size.bytes",
            value=170e6,
            unit="B",
            subject=CONTENT,
            baseline={"subject": "b" * 64, "value": 538e6, "ratio": 538 / 170},
        ),
        Row(name="size.bits_per_weight", value=4.3125, unit="bit", subject=CONTENT),
    ]
