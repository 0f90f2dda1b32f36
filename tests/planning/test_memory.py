"""What a model takes while it runs: against tables derived by hand, and figures that others report."""

from typing import Any

import pytest

from quantkit.model.sizes import configs
from quantkit.model.sizes.architecture import Architecture
from quantkit.planning.memory import Footprint, cache_of, storage, taken_by
from quantkit.planning.roofline import RooflineProduct
from quantkit.recipe import Recipe
from quantkit.scheme import CacheScheme

CARD = 80e9


def footprint(model: str | Architecture, recipe: str = "float", runtime: str = "", **changes: Any) -> Footprint:
    """In 16 bits but for what the recipe quantizes."""
    architecture = configs.read(model) if isinstance(model, str) else model
    found = storage(architecture, Recipe.load(recipe))
    linears = [each for each in [*found.linears, found.head] if each is not None]
    settings: dict[str, Any] = (
        {"products": [RooflineProduct(each.matrix, each.bytes - each.bias, each.format, "fp16") for each in linears]}
        | {"cache": cache_of(None, "float16"), "width": 2, "shared": found.shared}
        | {"runtime": taken_by(runtime, "gpu"), "capacity": CARD}
        | {"groups": {each.matrix.name: each.scheme.group for each in linears if each.scheme and each.scheme.group}}
    )
    return Footprint(architecture, **{**settings, **changes})


# bytes of a token's keys and values in 16 bits, within all windows: layers · (keys + values) · heads · features · 2
PER_TOKEN = {
    "llama-3-8b": 32 * 2 * 8 * 128 * 2,  # 128 KiB
    "llama-3-70b": 80 * 2 * 8 * 128 * 2,  # 320 KiB
    "llama-3.1-405b": 126 * 2 * 8 * 128 * 2,  # 504 KiB
    "qwen2.5-7b": 28 * 2 * 4 * 128 * 2,  # 56 KiB
    "qwen3-0.6b": 28 * 2 * 8 * 128 * 2,  # a head is 128 wide, not 1024 / 16
    "qwen3-8b": 36 * 2 * 8 * 128 * 2,  # 144 KiB
    "qwen3-32b": 64 * 2 * 8 * 128 * 2,  # 256 KiB
    "qwen3-30b-a3b": 48 * 2 * 4 * 128 * 2,  # experts keep nothing
    "qwen3-235b-a22b": 94 * 2 * 4 * 128 * 2,
    "mixtral-8x7b": 32 * 2 * 8 * 128 * 2,
    "deepseek-v3": 61 * (512 + 64) * 2,  # one vector for all heads, and the rotated key
    "gemma-3-270m": 18 * 2 * 1 * 256 * 2,
    "qwen2.5-coder-0.5b": 24 * 2 * 2 * 64 * 2,
    "gemma-3-1b": 26 * 2 * 1 * 256 * 2,
    "gemma-3-27b": 62 * 2 * 16 * 128 * 2,
    "phi-4": 40 * 2 * 10 * 128 * 2,  # 200 KiB
    "smollm2-135m": 30 * 2 * 3 * 64 * 2,  # 22.5 KiB
    "bert-base": 0,
    "minilm-l6": 0,
    "vit-b-16": 0,
}


@pytest.mark.parametrize("name", PER_TOKEN)
def test_a_token_of_cache_takes_what_was_derived_by_hand(name: str) -> None:
    assert footprint(name).cache_per_token == PER_TOKEN[name]


def test_the_table_has_every_shipped_model() -> None:
    from quantkit.model.sizes import configs

    assert set(PER_TOKEN) == set(configs.shipped_names())


def test_windows_cap_the_cache() -> None:
    """Gemma 3, 27B: of 62 layers every sixth sees all, 10 of them; 52 see 1,024 tokens. 16 KiB a token and layer."""
    found = footprint("gemma-3-27b")
    layer = 2 * 16 * 128 * 2
    assert found.cache_bytes(1, 1024) == 62 * layer * 1024
    assert found.cache_bytes(1, 131072) == (10 * 131072 + 52 * 1024) * layer
    assert found.cache_bytes(3, 131072) == 3 * found.cache_bytes(1, 131072)


@pytest.mark.parametrize(
    ("scheme", "grouped", "latent"),
    [
        (None, 2 * 8 * 128 * 2, 576 * 2),
        (CacheScheme(format="fp8_e4m3"), 2 * 8 * 128, 576),
        (CacheScheme(format="int8", granularity="head", symmetric=False), 2 * 8 * 128, 576),
        (CacheScheme(format="int8", granularity="token"), 2 * 8 * (128 + 2), 576 + 2),
        (CacheScheme(format="int4", granularity="token"), 2 * 8 * (64 + 2), 288 + 2),
        (CacheScheme(format="int4", granularity="token", symmetric=False), 2 * 8 * (64 + 2 + 1), 288 + 2 + 1),
    ],
)
def test_quantized_caches_with_the_scales_of_tokens(scheme: CacheScheme | None, grouped: int, latent: int) -> None:
    cache = cache_of(scheme, "bfloat16")
    assert footprint("llama-3-8b", cache=cache).cache_per_token == 32 * grouped
    assert footprint("deepseek-v3", cache=cache).cache_per_token == 61 * latent


def test_llama_3_8b_in_vllm_on_one_card_as_its_own_profile_says() -> None:
    """vllm-project/vllm#10511, on 79.22 GiB: weights 14.96 GiB, activations at their peak (8,192 tokens at once, 256
    sequences) 1.26 GiB, and 53.29 GiB left for the cache.
    """
    found = footprint("llama-3-8b", runtime="vllm", capacity=79.22 * 2**30)
    parts = found.parts(256, 8192)
    gib = {name: value / 2**30 for name, value in parts.items()}
    assert gib["weights"] + gib["embeddings"] + gib["others"] == pytest.approx(14.96, abs=0.01)
    assert gib["activations"] + gib["logits"] == pytest.approx(1.26, rel=0.1)
    left = 79.22 * 0.9 - sum(value for name, value in gib.items() if name != "cache")
    assert left == pytest.approx(53.29, rel=0.01)


def test_what_fits_a_card_of_80_gb() -> None:
    assert not footprint("llama-3-70b").fits(1, 8192)
    assert footprint("llama-3-70b", "rtn-int4").fits(1, 8192)
    assert footprint("llama-3-70b").largest_batch(8192) == footprint("llama-3-70b").largest_context(1) == 0
    assert footprint("llama-3-70b").needed(1, 8192) == 2
    assert footprint("deepseek-v3", "fp8").needed(1, 8192, most=8) is None
    assert footprint("deepseek-v3", "fp8").needed(1, 8192) == 16


@pytest.mark.parametrize(("model", "devices"), [("llama-3-8b", 1), ("llama-3-70b", 4), ("gemma-3-27b", 1)])
def test_the_largest_batch_fits_and_the_next_does_not(model: str, devices: int) -> None:
    found = footprint(model)
    batch = found.largest_batch(8192, prompt=1024, devices=devices)
    assert batch is not None
    assert batch > 1
    assert found.fits(batch, 8192, prompt=1024, devices=devices)
    assert not found.fits(batch + 1, 8192, prompt=1024, devices=devices)
    context = found.largest_context(batch, devices=devices)
    assert context is not None
    assert context <= (found.architecture.max_context or 0)
    assert found.fits(batch, context, devices=devices)


def test_the_context_ends_where_the_model_does() -> None:
    assert footprint("llama-3-8b").largest_context(1) == 8192
    long = footprint("llama-3-8b").largest_context(200)
    assert long is not None
    assert 0 < long < 8192


def test_nothing_bounds_what_has_no_capacity() -> None:
    found = footprint("llama-3-8b", capacity=None)
    assert found.fits(10**6, 8192)
    assert found.largest_batch(8192) is None
    assert found.needed(10**6, 8192) == 1


def test_devices_share_heads_and_repeat_the_few() -> None:
    found = footprint("llama-3-8b", "rtn-int4")
    one, two = found.parts(8, 8192), found.parts(8, 8192, devices=2)
    assert two["weights"] == pytest.approx(one["weights"] / 2)
    assert two["cache"] == one["cache"] / 2
    assert two["others"] == one["others"]
    # eight heads of keys on sixteen devices: one on each, twice
    assert found.cache_bytes(8, 8192, devices=16) == found.cache_bytes(8, 8192, devices=8)
    assert found.parts(8, 8192, devices=16)["weights"] > one["weights"] / 16
    assert found.why_not(16) == ""
    assert "heads" in found.why_not(3)
    assert "heads" in found.why_not(64)  # 32 of queries


def test_a_latent_cache_is_the_same_on_every_device() -> None:
    found = footprint("deepseek-v3", "fp8")
    assert found.cache_bytes(1, 4096, devices=8) == found.cache_bytes(1, 4096)
    one, eight = found.parts(1, 4096), found.parts(1, 4096, devices=8)
    made = 61 * (1536 + 576) * 7168  # in bytes of FP8, without scales: on every device
    routers = 58 * 256 * 7168 * 2
    assert eight["weights"] - one["weights"] / 8 == pytest.approx((made + routers) * 7 / 8, rel=0.001)


def test_groups_have_to_divide_the_share_of_a_device() -> None:
    """K 14,336 on 32 devices is 448 each: seven groups of 64, no groups of 128."""
    assert footprint("llama-3-8b", "rtn-int4").why_not(32) == ""
    groups = dict.fromkeys(footprint("llama-3-8b", "rtn-int4").groups, 128)
    reason = footprint("llama-3-8b", "rtn-int4", groups=groups).why_not(32)
    assert reason == "model.layers.0.mlp.down_proj: a share of 448 is not in groups of 128"


def test_activations_by_hand_and_by_chunk() -> None:
    """Llama 3, 8B: the residual and its norm, gate, up and their product, in 16 bits, for each row."""
    row = 2 * (2 * 4096 + 3 * 14336)
    whole = footprint("llama-3-8b", chunk=None)
    assert whole.parts(4, 8192, prompt=1000)["activations"] == 4000 * row
    assert footprint("llama-3-8b", chunk=512).parts(4, 8192, prompt=1000)["activations"] == 512 * row
    assert whole.parts(4, 8192, prompt=1)["activations"] == 4 * row  # a step of decoding
    assert whole.parts(4, 8192)["logits"] == 4 * 128256 * 18
    # attention is the wider one where few experts of few features follow it: q, k, v, and what o reads
    small = footprint("qwen3-30b-a3b", chunk=None)
    assert small.parts(1, 100)["activations"] == 100 * 2 * (2 * 2048 + max(2 * 4096 + 1024, 8 * 3 * 768 + 128))


def test_encoders_have_no_cache_and_are_bounded_by_activations() -> None:
    found = footprint("bert-base", chunk=None)
    assert found.parts(32, 512)["cache"] == 0
    assert found.parts(32, 512)["activations"] == 32 * 512 * 2 * (2 * 768 + max(4 * 768, 2 * 3072))
    batch = found.largest_batch(512)
    assert batch is not None
    assert batch > 1000


def test_a_decoder_without_its_head_is_an_encoder_and_keeps_nothing() -> None:
    from quantkit.model.sizes import configs

    config = {**configs.shipped("qwen3-0.6b").config, "architectures": ["Qwen3Model"]}
    assert footprint(configs.from_config(config, "embedder")).cache_bytes(8, 512) == 0


def test_a_runtime_is_said_by_its_source() -> None:
    assert "vllm-project" in taken_by("vllm", "gpu").source
    assert "CUDA context" in taken_by("torch", "gpu").source
    assert taken_by("onnxruntime", "cpu").bytes == 0
    assert taken_by("onnxruntime", "cpu").source
