"""Bounds against figures reckoned by hand and published ones."""

import pytest

from quantkit.model.sizes.architecture import Architecture, Attention, BlockShapes, Matrix
from quantkit.planning.roofline import Bound, Cache, ModelStep, RooflineProduct, alike, bound, kept, looked_at, reached
from quantkit.target import Target

FULL = Attention("full", heads=4, kv_heads=2, head_dim=8, value_dim=8)
NO_CACHE = Cache("float16", lambda each: 0.0)
# a card's copy bandwidth and dense 16-bit rate, as seen, with 80 % of the datasheet's for 8 bits
FIGURES = {"read": 4.3e12, "bf16": 790e12, "int8": 1583e12}


def target(**more: float | None) -> Target:
    figures = FIGURES | more

    def figure(name: str, unit: str) -> dict[str, object]:
        return {"value": figures[name] or "auto", "unit": unit, "source": "test"}

    return Target.from_dict(
        {
            "schema": 1,
            "summary": "test",
            "kind": "gpu",
            "arch": {"vendor": "nvidia", "sm": "9.0"},
            "memory": {
                "capacity": {"value": 141e9, "unit": "B", "source": "test"},
                "read_bandwidth": figure("read", "B/s"),
                "last_level_cache": {"value": 50e6, "unit": "B", "source": "test"},
            },
            "compute": {"bf16": figure("bf16", "flop/s"), "int8": figure("int8", "op/s")},
            "formats": {"int4": {"torch": {"state": "native", "source": "test"}}},
            "runtimes": ["torch"],
            "baseline": "bf16",
            "batches": [1],
        },
        name="test",
    )


def model(*matrices: Matrix, attention: Attention | None = None, layers: int = 1) -> Architecture:
    blocks = [BlockShapes(f"model.layers.{i}", matrices, attention) for i in range(layers)]
    return Architecture("test", "decoder", "llama", "bfloat16", 4096, blocks, embeddings=0, others=0)


def of_one(step: ModelStep, bits: float, *, compute: str = "bf16") -> Bound:
    matrix = Matrix("model.layers.0.mlp.up_proj", N=14336, K=4096)
    product = RooflineProduct(matrix, matrix.parameters * bits / 8, "int4", compute)  # type: ignore[arg-type]
    return bound(model(matrix), alike([product]), NO_CACHE, target(), step, attention="bf16")


@pytest.mark.parametrize(
    ("rows", "bits", "compute", "micros"),
    [
        (1, 16, "bf16", 27.3),
        (16, 16, "bf16", 27.5),
        (64, 16, "bf16", 27.9),
        (256, 16, "bf16", 38.1),
        (1, 8, "int8", 13.7),
        (64, 8, "int8", 14.2),
        (1, 4.125, "bf16", 7.05),
        (64, 4.125, "bf16", 9.51),
        (128, 4.125, "bf16", 19.0),
    ],
)
def test_the_floor_of_one_linear_is_the_one_reckoned_by_hand(
    rows: int, bits: float, compute: str, micros: float
) -> None:
    found = of_one(ModelStep(rows), bits, compute=compute).seconds
    assert found is not None
    assert found * 1e6 == pytest.approx(micros, rel=0.01)


def test_a_sum_is_never_below_the_step_as_one_piece() -> None:
    wide, narrow = Matrix("a", N=4096, K=4096), Matrix("b", N=64, K=65536)
    products = [
        RooflineProduct(wide, 2.0 * wide.parameters, "bfloat16", "bf16"),
        RooflineProduct(narrow, 1.0, "int4", "bf16"),
    ]
    found = bound(model(wide, narrow), alike(products), NO_CACHE, target(), ModelStep(300), attention="bf16")
    assert {op.limit for op in found.ops} == {"memory", "compute"}
    together = found.together(target())
    assert together < (found.seconds or 0.0)
    assert together == pytest.approx(max(found.bytes / FIGURES["read"], found.operations / FIGURES["bf16"]))


def test_equal_blocks_are_counted_not_listed() -> None:
    matrix = Matrix("model.layers.0.q_proj", N=64, K=64)
    products = [RooflineProduct(matrix, 100.0, "int4", "bf16")] * 5
    found = bound(
        model(matrix, attention=FULL, layers=5), alike(products), NO_CACHE, target(), ModelStep(1), attention="bf16"
    )
    assert [(op.name, op.times) for op in found.ops] == [("q_proj", 5), ("attention, full", 5)]


def test_experts_that_are_read() -> None:
    expert = Matrix("experts.*.up", N=1, K=1, count=8, active=2)
    assert reached(expert, 1) == pytest.approx(2.0)
    assert reached(expert, 1000) == pytest.approx(8.0)
    # two tokens, each with 2 of 8: 8 (1 − (3/4)²)
    assert reached(expert, 2) == pytest.approx(3.5)
    assert reached(Matrix("up", N=1, K=1), 7) == 1.0


@pytest.mark.parametrize(("tokens", "context"), [(1, 0), (5, 0), (9, 3), (1, 40), (6, 6), (30, 2)])
@pytest.mark.parametrize("window", [None, 1, 4, 8])
def test_what_attention_looks_at(tokens: int, context: int, window: int | None) -> None:
    each = Attention("sliding" if window else "full", 1, 1, 8, 8, window=window)
    positions = range(context, context + tokens)
    seen = [[key for key in range(at + 1) if window is None or key > at - window] for at in positions]
    step = ModelStep(3, tokens, context)
    assert looked_at(each, step) == sum(len(keys) for keys in seen)
    assert kept(each, step) == len({key for keys in seen for key in keys})


def test_tokens_of_an_encoder_see_each_other() -> None:
    assert looked_at(Attention("full", 1, 1, 8, 8, causal=False), ModelStep(1, 6)) == 36


def test_attention_reads_the_cache_of_each_sequence() -> None:
    cache = Cache("float16", lambda each: 2.0 * 2 * each.kv_heads * each.head_dim)
    matrix = Matrix("q", N=1, K=1)
    found = bound(model(matrix, attention=FULL), {}, cache, target(), ModelStep(3, 1, 99), attention="bf16")
    (op,) = found.ops
    # 100 tokens of 3 sequences at 64 bytes, queries and outputs of 4 heads of 8 in 2 bytes
    assert op.bytes == 3 * 100 * 64 + 3 * 4 * 16 * 2
    assert op.operations == 2 * 3 * 100 * 4 * 16


def test_logits_are_of_last_tokens_alone() -> None:
    head = Matrix("lm_head", N=1000, K=64)
    whole = Architecture("t", "decoder", "llama", "bfloat16", 64, [], embeddings=0, others=0, head=head)
    product = RooflineProduct(head, 2000.0, "bfloat16", "bf16")
    (op,) = bound(whole, alike([product]), NO_CACHE, target(), ModelStep(2, 500), attention="bf16").ops
    assert op.operations == 2 * 2 * 1000 * 64


def test_devices_share_the_work() -> None:
    matrix = Matrix("up_proj", N=512, K=512)
    product = RooflineProduct(matrix, 2.0 * matrix.parameters, "bfloat16", "bf16")
    one, four = (
        bound(model(matrix), alike([product]), NO_CACHE, target(), ModelStep(4), devices=n, attention="bf16").seconds
        for n in (1, 4)
    )
    assert one == pytest.approx(4 * (four or 0.0))


@pytest.mark.parametrize(("lacks", "missing"), [("bf16", ["compute.bf16"]), ("read", ["compute.bf16"])])
def test_what_is_not_known_is_no_bound(lacks: str, missing: list[str]) -> None:
    matrix = Matrix("up_proj", N=512, K=512)
    product = RooflineProduct(matrix, 1.0, "bfloat16", "bf16")
    found = bound(model(matrix), alike([product]), NO_CACHE, target(**{lacks: None}), ModelStep(4), attention="bf16")
    assert found.seconds is None
    assert found.missing == missing
