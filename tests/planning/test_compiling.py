"""What a compile takes, against counts by hand, and what has to hold of any prediction."""

from dataclasses import replace

import pytest

from quantkit import machine
from quantkit.content import names
from quantkit.errors import InputError
from quantkit.model.sizes import configs
from quantkit.model.sizes.architecture import Architecture, Attention, BlockShapes, Matrix
from quantkit.planning.compiling import CompileSpec, chunk_size, copies, described, disk, fitted, held, predict, shared
from quantkit.recipe import Recipe

HIDDEN, WIDE, LENGTH = 64, 128, 32


def model(layers: int = 2) -> Architecture:
    """Llama's block, small."""

    def block(index: int) -> BlockShapes:
        at = f"model.layers.{index}"
        sizes = [("self_attn.q_proj", HIDDEN, HIDDEN), ("self_attn.k_proj", HIDDEN // 2, HIDDEN)]
        sizes += [("self_attn.v_proj", HIDDEN // 2, HIDDEN), ("self_attn.o_proj", HIDDEN, HIDDEN)]
        sizes += [("mlp.gate_proj", WIDE, HIDDEN), ("mlp.up_proj", WIDE, HIDDEN), ("mlp.down_proj", HIDDEN, WIDE)]
        matrices = [Matrix(f"{at}.{name}", n, k) for name, n, k in sizes]
        return BlockShapes(at, matrices, Attention("full", 4, 2, 16, 16), 2 * HIDDEN)

    blocks = [block(index) for index in range(layers)]
    head = Matrix("lm_head", 1000, HIDDEN)
    return Architecture(
        "small", "decoder", "llama", "float32", HIDDEN, blocks, 1000 * HIDDEN, HIDDEN, head, True, 1000, LENGTH
    )


def spec(recipe: str = "gptq-int4", *changes: str, layers: int = 2, speed: bool = False) -> CompileSpec:
    return described(model(layers), Recipe.load(recipe, [*changes, "calibration.samples=4"]), speed=speed)


def test_linears_that_share_an_input_are_one_group() -> None:
    found = [[matrix.name.rpartition(".")[2] for matrix in group] for group in shared(model().layers[0])]
    assert found == [["q_proj", "k_proj", "v_proj"], ["o_proj"], ["gate_proj", "up_proj"], ["down_proj"]]


def test_what_goes_through_at_once_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quantkit.planning.compiling.ACTIVATION_BYTES", 1)
    assert chunk_size(WIDE, LENGTH) == spec().chunk == 1


def test_memory_grows_with_the_block_and_not_with_their_number() -> None:
    low, high = (predict(spec(layers=count)).memory["quantize"] for count in (2, 200))
    assert low == high
    wide = replace(model(), layers=[replace(each, matrices=[Matrix("x", 4096, 4096)]) for each in model().layers])
    assert predict(replace(spec(), architecture=wide)).memory["quantize"] > low + 2 * 4 * 4096**2


@pytest.mark.parametrize(
    ("hidden", "wide", "heads", "tied", "recipe", "peaks"),
    [
        (4096, 14336, 32, False, "gptq-int4", {"prove": 2027, "quantize": 3558, "score checkpoint": 3435}),
        (4096, 14336, 32, False, "awq-int4", {"prove": 2028, "quantize": 4144, "score checkpoint": 3393}),
        (3072, 8192, 24, True, "rtn-int4", {"score checkpoint": 2197}),
    ],
)
def test_large_blocks_are_counted(
    hidden: int, wide: int, heads: int, tied: bool, recipe: str, peaks: dict[str, float]
) -> None:
    """MB that one block of Llama's shapes took; 11 GB were forecast once (`benchmarks/memory.py --block`)."""
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden, "dtype": "bfloat16"}
    config |= {"intermediate_size": wide, "num_hidden_layers": 1, "num_attention_heads": heads, "vocab_size": 4096}
    config |= {"num_key_value_heads": 8, "max_position_embeddings": 8192, "tie_word_embeddings": tied}
    calibration = ["calibration.samples=2", "calibration.tokens=128"] if recipe != "rtn-int4" else []
    positions = 256 if calibration else None
    found = predict(described(configs.from_config(config, "b"), Recipe.load(recipe, calibration), positions=positions))
    assert found.memory["quantize"] < 4.5e9
    for part, peak in peaks.items():
        assert found.memory[part] == pytest.approx(1e6 * peak, rel=0.15), part
    assert found.peak == pytest.approx(1e6 * max(peaks.values()), rel=0.15)


def mixture(experts: int = 32, layers: int = 4, **changes: object) -> Architecture:
    """Qwen3's mixture, small: of 61 million weights if it has 32 experts."""
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 512,
        "vocab_size": 8192,
    }
    config |= {"num_hidden_layers": layers, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
    config |= {"num_experts": experts, "num_experts_per_tok": 4, "moe_intermediate_size": 256, "dtype": "float32"}
    config |= {"intermediate_size": 256, "max_position_embeddings": 2048, "tie_word_embeddings": False}
    return configs.from_config(config | changes, "mixture")


@pytest.mark.parametrize(
    ("recipe", "peak"), [("rtn-int4", 1139), ("gptq-int4", 1157), ("awq-int4", 1179), ("int4-best", 1525)]
)
def test_a_small_mixture_is_checked_whole_and_its_experts_are_there_twice(recipe: str, peak: float) -> None:
    """MB that were resident (`plan_compile.py --on mixture`); 901, 904, 1104 and 1151 were forecast once."""
    changes = [] if recipe == "rtn-int4" else ["calibration.samples=4"]
    found = predict(described(mixture(), Recipe.load(recipe, changes), positions=1000))
    assert found.at_peak == "check checkpoint"
    assert found.peak == pytest.approx(1e6 * peak, rel=0.1)


def test_a_block_of_many_experts_is_largest_where_plain_transformers_joins_them() -> None:
    """MB that one block of Qwen3-30B-A3B took (`memory.py --block qwen3-30b-a3b`); 6.0 GB were forecast once."""
    widths = {"hidden_size": 2048, "moe_intermediate_size": 768, "num_attention_heads": 32, "num_key_value_heads": 4}
    one = mixture(128, 1, **widths, head_dim=128, num_experts_per_tok=8, vocab_size=4096, dtype="bfloat16")
    recipe = Recipe.load("gptq-int4", ["calibration.samples=2", "calibration.tokens=128"])
    found = predict(described(one, recipe, positions=256))
    assert found.at_peak == "prove"
    assert found.peak == pytest.approx(9090e6, rel=0.1)


def test_a_large_model_is_checked_a_few_blocks_at_a_time() -> None:
    few, many = (held(described(mixture(layers=count), Recipe.load("rtn-int4"))) for count in (4, 40))
    assert {"whole", "file"} < few["check checkpoint"].keys()
    assert "whole" not in many["check checkpoint"]
    assert (
        many["check checkpoint"]["block"]
        == held(described(mixture(layers=80), Recipe.load("rtn-int4")))["check checkpoint"]["block"]
    )


def test_gradients_hold_all_inputs_of_blocks_and_a_linear_with_the_curvature_of_its_outputs() -> None:
    with_them, without = spec("int4-best"), spec("int4-best", "gptq.gradients=0")
    found, plain = held(with_them), held(without)
    assert "gradients" not in plain
    assert found["gradients"]["hidden"] == 4 * 4 * LENGTH * HIDDEN * (2 + 1)
    # gate and up: the factor and weights; of each, two matrices by outputs, three copies of gradients, and a target
    curved = 2 * (2 * 4 * WIDE**2 + 3 * 4 * 4 * LENGTH * WIDE + 4 * WIDE * HIDDEN)
    assert found["quantize"]["solve"] == 4 * HIDDEN**2 + 4 * 2 * WIDE * HIDDEN + curved
    assert found["quantize"]["gradients"] == 2 * 4 * LENGTH * (3 * HIDDEN + 2 * WIDE + HIDDEN)
    assert plain["quantize"]["gradients"] == 0
    dense, experts = (
        held(described(each, Recipe.load("int4-best")))["quantize"]["library"] for each in (model(), mixture())
    )
    assert (dense, experts) == (0, 1024 * 3e5), "kernels of as many shapes as experts see tokens"


@pytest.mark.parametrize(
    ("outputs", "inputs", "count", "peak"),
    [(2048, 1024, 2, 181), (4096, 2048, 2, 524), (6144, 1536, 2, 958), (1536, 6144, 1, 174), (14336, 4096, 2, 2302)],
)
def test_a_solve_with_gradients(outputs: int, inputs: int, count: int, peak: float) -> None:
    """MB beyond weights and factor that `gptq_shared` took with gradients of 2,048 tokens, on two threads."""
    names = ["gate_proj", "up_proj"][:count]
    block = replace(model().layers[0], matrices=[Matrix(f"mlp.{name}", outputs, inputs) for name in names])
    recipe = Recipe.load("int4-best", ["calibration.samples=4", "gptq.correction=0"])
    alone = replace(model(), layers=[block], max_context=512)
    found = held(described(alone, recipe))["quantize"]["solve"]
    assert (found - 4 * inputs**2 - 4 * count * outputs * inputs) / 1e6 == pytest.approx(peak, rel=0.15)


def test_a_head_with_codes_is_the_widest_solve(monkeypatch) -> None:
    """1,353 MB of SmolLM2-135M by `int4-cpu` were resident while its head was solved, on two threads."""
    monkeypatch.setattr(machine, "cores", lambda: 2)
    found = predict(described(configs.read("smollm2-135m"), Recipe.load("int4-cpu", ["calibration.samples=8"])))
    assert found.memory["quantize"] == pytest.approx(1353e6, rel=0.06)
    small = spec("gptq-int4", "keep=[]", layers=1)
    head = held(small)["quantize"]["solve"]
    assert head == (4 + 4 + 1 + 7 * 4) * 1000 * HIDDEN
    assert held(spec("rtn-int4", "keep=[]", layers=1))["quantize"]["solve"] == head - 4 * 1000 * HIDDEN


def test_no_time_is_foretold() -> None:
    shown = predict(spec()).as_dict()
    assert [shown[name] for name in ("seconds", "total_seconds", "total_interval", "cpu_seconds")] == [None] * 4
    assert shown["memory_peak_bytes"] > 1e8 and shown["disk_bytes"]["bundle"] > 0


def test_the_baseline_takes_disk_once() -> None:
    again = replace(spec("awq-int4", speed=True), baseline=False)
    found = [disk(each).cache for each in (spec("awq-int4"), spec("awq-int4", speed=True), again)]
    assert found == [0, 4 * model().parameters, 0]


KINDS = {"smollm2-135m": "decoder", "bert-base": "encoder", "mixtral-8x7b": "decoder"}
PAIRS = [
    (recipe, name)
    for recipe in names("recipes")
    for name, kind in KINDS.items()
    if recipe != "kv-fp8" and kind in Recipe.load(recipe).models
]


@pytest.mark.parametrize(("recipe", "name"), PAIRS)
def test_every_part_was_fitted(recipe: str, name: str) -> None:
    loaded, sizes = Recipe.load(recipe), configs.read(name)
    assert sizes.kind == KINDS[name]
    try:
        found = described(sizes, loaded, speed=True)
    except InputError as problem:
        # blocks of 128 of the inputs do not divide SmolLM2's 576
        assert (problem.code, name) == ("group-indivisible", "smollm2-135m")
        return
    assert set(map(fitted, held(found))) <= copies().keys()
    assert 0 < predict(found).peak < 1e12


def large_vocabulary(**changes: object) -> Architecture:
    """Two layers of Gemma 3 270M's widths under its vocabulary: a model that is all embedding."""
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 640, "dtype": "float32"}
    config |= {"intermediate_size": 2048, "num_hidden_layers": 2, "num_attention_heads": 10, "num_key_value_heads": 2}
    config |= {"vocab_size": 262144, "max_position_embeddings": 2048, "tie_word_embeddings": True, **changes}
    return configs.from_config(config, "large")


def test_two_heads_are_held_where_two_models_are_compared() -> None:
    """What is loaded whole is counted as often as it is there, and not fitted to models that have little of it."""
    for tied, tables in ((True, 1), (False, 2)):
        found = held(described(large_vocabulary(tie_word_embeddings=tied), Recipe.load("gptq-int4")))
        ends = 4 * (tables * 262144 * 640 + 640)
        assert found["begin"]["ends"] == found["check checkpoint"]["ends"] == ends
        assert found["score checkpoint"]["ends"] == 2 * ends
    for part, terms in copies().items():
        assert 0.95 <= terms.get("ends", 1.0) <= 1.05, part


def test_an_encoder_has_no_head_to_compare() -> None:
    found = held(described(configs.read("minilm-l6"), Recipe.load("int8-dynamic")))
    assert found["score checkpoint"]["ends"] == found["begin"]["ends"]


def test_the_peak_of_a_model_that_is_all_vocabulary() -> None:
    """2,055 MB were resident, without a tokenizer to speak of (`plan_compile.py --fit`); 1,667 were forecast once."""
    found = described(large_vocabulary(), Recipe.load("gptq-int4", ["calibration.samples=2"]), positions=500)
    expected = predict(found)
    assert expected.at_peak == "score checkpoint"
    tokenizer = copies()["score checkpoint"]["tokenizer"] * held(found)["score checkpoint"]["tokenizer"]
    assert expected.peak - tokenizer == pytest.approx(2055e6, rel=0.06)


def test_a_graph_holds_a_tied_table_twice_and_the_float_model_is_the_peak() -> None:
    """3,899 MB of Gemma 3 270M were resident while its float graph was made; 2,579 were forecast without that part."""
    gemma = described(configs.read("gemma-3-270m"), Recipe.load("awq-int4"), speed=True, positions=1000)
    table = 4 * 262144 * 640
    assert held(gemma)["check onnx"]["floats"] == held(replace(gemma, timed=False))["check onnx"]["floats"] > 2 * table
    assert predict(gemma).at_peak == "speed"
    assert predict(gemma).peak == pytest.approx(3899e6, rel=0.06)
    assert "speed" not in held(replace(gemma, baseline=False)), "what is in the cache is not made again"


def test_a_network_of_images_is_another_compile() -> None:
    with pytest.raises(InputError) as refused:
        described(replace(model(), kind="network"), Recipe.load("int8-weights"))
    assert refused.value.code == "compile-unknown"


def test_what_blocks_are_given_beside_hidden_states_is_counted_up_to_what_lies_in_files() -> None:
    few, many = (replace(spec(), beside=count) for count in (1000, 10**9))
    plain = predict(spec()).memory
    for part in ("begin", "quantize"):
        grown = predict(few).memory[part] - plain[part]
        assert grown == pytest.approx(4 * few.tokens * 1000)
        assert predict(many).memory[part] - plain[part] == pytest.approx(1 << 30)
