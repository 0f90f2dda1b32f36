"""What a runtime reads of a linear, and what it multiplies in."""

import pytest

from quantkit.formats import stored_bits
from quantkit.model.sizes.architecture import Architecture, BlockShapes, Matrix
from quantkit.planning.roofline import compute_type, products
from quantkit.scheme import ActivationScheme, WeightScheme
from quantkit.target import Target

UP, HEAD = Matrix("model.layers.0.up_proj", N=256, K=192), Matrix("lm_head", N=1000, K=192)
MODEL = Architecture(
    *("test", "decoder", "llama", "float32", 192, [BlockShapes("model.layers.0", [UP], None)]),
    embeddings=0,
    others=0,
    head=HEAD,
)
INT4 = WeightScheme(format="int4", granularity="group", group=64, symmetric=False)
INT8 = WeightScheme(format="int8", granularity="channel")
FP8 = WeightScheme(format="fp8_e4m3", granularity="channel", scale="float32")
INPUTS = {name: ActivationScheme(format=name) for name in ("int8", "fp8_e4m3")}


def test_bytes_are_codes_scales_and_zeros() -> None:
    # 4 bits a weight; for each 64 of them a scale of 16 bits and a zero point of 4
    assert stored_bits((UP.N, UP.K), INT4) / 8 == 256 * 192 * (4 + 20 / 64) / 8
    # the last group of 65 columns is filled up
    assert stored_bits((1, 65), INT4) / 8 == 128 * (4 + 20 / 64) / 8


def test_all_linears_and_the_head_last() -> None:
    quantized, head = products(MODEL, {UP.name: INT4}, {}, Target.load("h100"), "vllm")
    assert (quantized.matrix, quantized.format, quantized.compute) == (UP, "int4", "bf16")
    assert quantized.bytes == stored_bits((UP.N, UP.K), INT4) / 8
    assert (head.matrix, head.format, head.bytes, head.width) == (HEAD, "bfloat16", 1000 * 192 * 2, 2)


def test_what_is_expanded_is_read_as_floats() -> None:
    expanded, _ = products(MODEL, {UP.name: INT4}, {}, Target.load("h100"), "torch")
    assert (expanded.format, expanded.bytes) == ("bfloat16", 256 * 192 * 2)


def test_a_cpu_reads_what_is_not_quantized_in_32_bits() -> None:
    _, head = products(MODEL, {UP.name: INT4}, {}, Target.load("cpu-x86-avx2"), "onnxruntime")
    assert (head.format, head.bytes, head.compute) == ("float32", 1000 * 192 * 4, "fp32")


@pytest.mark.parametrize(
    ("weights", "inputs", "target", "runtime", "level", "compute"),
    [
        (None, None, "h100", "vllm", None, "bf16"),
        (None, None, "rtx-4090", "vllm", None, "fp16"),
        # weights alone: the inputs stay in 16 bits
        (INT8, None, "h100", "vllm", None, "bf16"),
        (INT8, "int8", "h100", "vllm", None, "int8"),
        (FP8, "fp8_e4m3", "h100", "vllm", None, "fp8_e4m3"),
        # Ampere has no 8-bit floats to multiply
        (FP8, "fp8_e4m3", "a100", "vllm", None, "bf16"),
        (INT8, "int8", "h100", "torch", None, "bf16"),
        # ONNX Runtime quantizes the inputs itself at level 4
        (INT4, None, "cpu-x86-avx2", "onnxruntime", 4, "int8"),
        (INT4, None, "cpu-x86-avx2", "onnxruntime", 0, "fp32"),
    ],
)
def test_products_are_done_in(
    weights: WeightScheme | None, inputs: str | None, target: str, runtime: str, level: int | None, compute: str
) -> None:
    given = INPUTS[inputs] if inputs is not None else None
    assert compute_type(weights, given, Target.load(target), runtime, level) == compute
