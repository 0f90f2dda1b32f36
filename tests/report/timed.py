"""Bundles that were timed, with figures that are known; `planted` has the plain one."""

from typing import Any

import planted

from quantkit.bundle import Manifest
from quantkit.measurement.rows import Row

BATCHES = (1, 2, 4, 8, 16, 32)
DEVICE = {"id": "cpu-1", "kind": "cpu", "name": "A Processor"}


def timed_rows(subject: str = planted.CONTENT) -> list[Row]:
    """What `measure` gives for a decoder: a model whose speed-up falls with the batch and is lost between 8 and 16."""
    settings = {"accuracy_level": 4, "threads": 2, "compute_type": "int8"}
    common: dict[str, Any] = {"subject": subject, "runtime": "onnxruntime", "device": DEVICE, "n": 60}
    common |= {"settings": settings, "versions": {"onnxruntime": "1.31.1"}, "aa_spread": 0.013}
    rows = [
        Row(name="ceiling.read", value=23.1e9, unit="B/s", subject="cpu-1"),
        Row(name="ceiling.compute", value=2.1e11, unit="op/s", subject="cpu-1", settings={"compute_type": "int8"}),
    ]
    for context in (128, 1024):
        shape = {"new_tokens": 1, "context": context}
        for batch in BATCHES:
            attention, known = 1e-6 * context * batch, {**common, "batch": batch, "shape": shape}
            float_s, own_s = 0.030 + 0.0011 * batch + attention, 0.0098 + 0.0031 * batch + attention
            op = {"M": batch, "format": "int4", "hp_s": float_s}
            op |= {"bound_s": max(0.0042, 0.0013 * batch), "hp_bound_s": max(0.0233, 0.0009 * batch)}
            moved = {**known, "settings": {**settings, "share_of_ceiling": 0.52}}
            rows.append(_time("latency.decode_step", own_s, float_s, known))
            rows.append(Row(name="tax.total", value=own_s - op["bound_s"], unit="s", op=op, **known))
            rows.append(Row(name="bandwidth.effective", value=12.1e9, unit="B/s", **moved))
        wins = {"over": "batch", "ideal": 19.4, "wins": 1, "win_1_from": None}
        wins |= {"win_1_to": 10.1, "win_1_to_low": 9.6, "win_1_to_high": 10.7}
        known = {**common, "shape": shape, "settings": settings | wins}
        rows.append(Row(name="tax.break_even", value=10.1, ci95=(9.6, 10.7), unit="1", **known))
    prompts = {**common, "batch": 1}
    for tokens in (64, 256, 1024):
        known = {**prompts, "shape": {"new_tokens": tokens, "context": 0}}
        rows.append(_time("latency.prefill", 0.008 + 0.00152 * tokens, 0.012 + 0.00145 * tokens, known))
    large = {**prompts, "shape": {"new_tokens": 4096, "context": 0}, "flags": ["out-of-memory"]}
    rows.append(Row(name="latency.prefill", value=None, unit="s", **large))
    peak = {"subject": "f" * 64, "value": 912e6, "ratio": 912 / 391}
    return [*rows, Row(name="memory.peak", value=391e6, unit="B", baseline=peak, **{**common, "n": 1})]


def _time(name: str, own: float, base: float, common: dict[str, Any]) -> Row:
    ratio = base / own
    more = {"baseline_p90": base * 1.05, "baseline_p99": base * 1.15, "p99_ratio": ratio * 0.96}
    against = {"subject": "f" * 64, "value": base, "ratio": ratio, "ratio_ci95": (ratio * 0.97, ratio * 1.03)}
    common = {**common, "settings": common["settings"] | more, "baseline": against, "ci95": (own * 0.985, own * 1.02)}
    quantiles = {"p50": own, "p90": own * 1.06, "p99": own * 1.2}
    return Row(name=name, value=own, unit="s", stat="median", better="lower", quantiles=quantiles, **common)


def exported_rows(subject: str = planted.CONTENT) -> list[Row]:
    """Accuracy of the ONNX export at two accuracy levels, and its size."""
    rows = []
    for level, extra in ((0, 0.0), (4, 0.011)):
        common: dict[str, Any] = {"subject": subject, "runtime": "onnxruntime", "shape": {"sequences": 12}, "n": 6132}
        common |= {"data": {"set": "prose-en", "split": "eval", "sha256": "e" * 64, "items": 6132}}
        common |= {"settings": {"accuracy_level": level, "threads": 2}}
        common |= {"flags": ["ci95-by-sequence", "source-was-gguf-q4_1"]}
        ratio = 0.927 - extra
        base = {"subject": "b", "value": 30.31, "ratio": ratio, "ratio_ci95": (ratio - 0.02, ratio + 0.02)}
        rows += [
            Row(name="accuracy.perplexity", value=30.31 / ratio, unit="1", baseline=base, **common),
            Row(name="accuracy.kl", value=0.0979 + extra, unit="nat", ci95=(0.088 + extra, 0.107 + extra), **common),
            Row(name="accuracy.top1_agreement", value=0.818 - extra, unit="1", ci95=(0.803 - extra, 0.833), **common),
        ]
    against = {"subject": "b", "value": 538e6, "ratio": 538 / 172}
    size = Row(name="size.bytes", value=172e6, unit="B", subject=subject, baseline=against, settings={"export": "onnx"})
    return [*rows, size]


def judged(**changes: Any) -> Manifest:
    """A bundle with an ONNX export, layers of three blocks, gates and a verdict."""
    usual = planted.manifest()
    kinds = ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")
    layer = {"shape": [576, 576], "scheme": usual.layers[0].scheme, "bits_per_weight": 4.3125}
    layers = [
        {**layer, "name": f"model.layers.{block}.{kind}", "error": 0.02 + 0.004 * block + 0.003 * i}
        for block in range(3)
        for i, kind in enumerate(kinds)
    ]
    file = usual.files[0].model_dump(by_alias=True)
    names = (("onnx/model.onnx", "onnx"), ("onnx/genai_config.json", "config"), ("onnx/tokenizer.json", "tokenizer"))
    files = [file, *({**file, "path": path, "role": role} for path, role in names)]
    because = ["2.40× the speed of float32 at batch 1 (2.33 to 2.47)"]
    because += ["1.12× at batch 8 (1.09 to 1.15)", "0.81× at batch 16 (0.79 to 0.83)"]
    verdict = {"answer": "ship_up_to", "batch": 8, "because": because}
    recipe = {**usual.recipe, "gates": {"kl_max": 0.25, "top1_agreement_min": 0.75}}
    return planted.manifest(**{"layers": layers, "files": files, "verdict": verdict, "recipe": recipe, **changes})


def everything() -> list[Row]:
    return [*planted.rows(), *exported_rows(), *timed_rows()]


def onnx_only(**changes: Any) -> Manifest:
    """A bundle whose recipe exports ONNX alone: there is no checkpoint."""
    file = planted.manifest().files[0].model_dump(by_alias=True)
    paths = (("onnx/model.onnx", "onnx"), ("onnx/model.onnx.data", "onnx"), ("onnx/tokenizer.json", "tokenizer"))
    recipe = {**planted.manifest().recipe, "export": [{"onnx": {"accuracy_level": 4}}]}
    files = [{**file, "path": path, "role": role} for path, role in paths]
    return judged(**{"files": files, "recipe": recipe, "verdict": None, **changes})
