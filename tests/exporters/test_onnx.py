"""The ONNX export, run in ONNX Runtime and held against transformers' own forward; and what stands in the file."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import small_onnx
import torch
import zoo
from exported import write_as
from reference import plain_matmulnbits
from small_onnx import EXPORT, TEXT, Small, expected, export, relative, scheme
from thorough import beside

from quantkit.bundle import Bundle
from quantkit.errors import InputError
from quantkit.exporters import LayerSpec, check
from quantkit.exporters.trace import transformer
from quantkit.exporters.values import Values
from quantkit.model.finished import Finished
from quantkit.scheme import WeightScheme

pytestmark = pytest.mark.usefixtures("one_thread")

# float32 sums of 64 to 96 products in another order, through three layers; a wrong number anywhere gives 1e-2 and more
LIMIT = 5e-6
FUSED = {
    "llama": {"GroupQueryAttention": 3, "SkipSimplifiedLayerNormalization": 6, "RMSNormalization": 1, "MatMul": 13},
    "llama-tied": {"GroupQueryAttention": 3, "SkipSimplifiedLayerNormalization": 6, "FusedMatMul": 1, "MatMul": 12},
    "qwen2": {"GroupQueryAttention": 3, "SkipSimplifiedLayerNormalization": 6, "MatMul": 13},
    "qwen3": {"GroupQueryAttention": 3, "SkipSimplifiedLayerNormalization": 6, "RMSNormalization": 7, "MatMul": 13},
    "mistral": {"GroupQueryAttention": 3, "SkipSimplifiedLayerNormalization": 6, "MatMul": 13},
    # gemma's norms follow the sublayer too: those come after a product, not after a sum
    "gemma2": {"GroupQueryAttention": 3, "SkipSimplifiedLayerNormalization": 6, "RMSNormalization": 7, "MatMul": 12},
    "gemma3": {"GroupQueryAttention": 3, "SkipSimplifiedLayerNormalization": 6, "RMSNormalization": 13, "MatMul": 12},
    "phi3": {"GroupQueryAttention": 3, "SkipSimplifiedLayerNormalization": 6, "MatMul": 13},
    "gpt2": {"GroupQueryAttention": 3, "LayerNormalization": 7, "FusedMatMul": 1, "MatMul": 12},
    "opt": {"GroupQueryAttention": 3, "LayerNormalization": 7, "FusedMatMul": 1, "MatMul": 12},
    "bert": {"MultiHeadAttention": 3, "LayerNormalization": 7, "MatMul": 12},
}
ROTARY = set(FUSED) - {"gpt2", "opt", "bert"}
# the others change q, k or v between the product and attention, or make all three with one linear
PACKED = {"llama", "llama-tied", "qwen2", "mistral", "gemma2"}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Exports of unquantized models, made once."""
    made: dict[str, Small] = {}

    def of(name: str) -> Small:
        if name not in made:
            made[name] = export(tmp_path_factory.mktemp(name), name)
        return made[name]

    return of


def stepped(model: Any, ids: Any, prompt: int) -> Any:
    """Logits [B, S, V] of a prompt and of one step a token after it."""
    state = model.state(ids.shape[0], ids.shape[1])
    parts = [model.run(state, ids[:, :prompt])]
    parts += [model.run(state, ids[:, [column]]) for column in range(prompt, ids.shape[1])]
    return np.concatenate(parts, axis=1)


def padded(model: Any, ids: Any, lengths: tuple[int, ...], steps: int) -> list[Any]:
    """Logits of every row's own tokens: prompts of these lengths padded on the left, then steps."""
    prompt = max(lengths)
    tokens, mask = np.zeros((len(lengths), prompt), np.int64), np.zeros((len(lengths), prompt), np.int64)
    for row, length in enumerate(lengths):
        tokens[row, prompt - length :], mask[row, prompt - length :] = ids[row, :length], 1
    state = model.state(len(lengths), prompt + steps)
    parts = [model.run(state, tokens, mask)]
    following = [np.array([[ids[row, n + step]] for row, n in enumerate(lengths)]) for step in range(steps)]
    parts += [model.run(state, each) for each in following]
    together = np.concatenate(parts, axis=1)
    return [together[row, prompt - length :] for row, length in enumerate(lengths)]


# tied and packed, rotated in part, windows with and without caps, norms of q and k, learned positions
KEPT = ("llama", "llama-tied", "gemma3", "gpt2", "bert")


@pytest.mark.parametrize("name", beside(KEPT, [name for name in zoo.ARCHITECTURES if name != "bert"]))
def test_every_decoder_computes_what_transformers_does(small: Any, name: str) -> None:
    ids = zoo.ids(3, 20)
    wanted = expected(small(name).model, ids)
    loaded = small(name).load()
    assert relative(stepped(loaded, ids.numpy(), 13), wanted) < LIMIT
    # windows of 8 are shorter than the prompt; one row is a single token
    lengths = (13, 9, 1)
    for row, found in enumerate(padded(loaded, ids.numpy(), lengths, 6)):
        assert relative(found, wanted[row, : lengths[row] + 6]) < LIMIT
    # a prompt in pieces is the same prompt
    for rows in (1, 3):
        state = loaded.state(rows, 20)
        pieces = [loaded.run(state, ids.numpy()[:rows, start : start + 5]) for start in range(0, 20, 5)]
        assert relative(np.concatenate(pieces, axis=1), wanted[:rows]) < LIMIT


def test_an_encoder_computes_what_transformers_does(small: Any) -> None:
    ids = zoo.ids(3, 20)
    loaded = small("bert").load()
    assert relative(loaded.encode(ids.numpy()), expected(small("bert").model, ids)) < LIMIT
    mask = torch.ones_like(ids)
    mask[1, 15:], mask[2, 1:] = 0, 0
    found, wanted = loaded.encode(ids.numpy(), mask.numpy()), expected(small("bert").model, ids, mask)
    assert relative(found[mask.numpy() == 1], wanted[mask.numpy() == 1]) < LIMIT
    types = torch.arange(20).ge(10).long().expand(3, 20)
    feeds = {"input_ids": ids.numpy(), "attention_mask": np.ones((3, 20), np.int64), "token_type_ids": types.numpy()}
    with torch.no_grad():
        wanted = small("bert").model(ids, token_type_ids=types)[0].numpy()
    assert relative(loaded.session.run(["last_hidden_state"], feeds)[0], wanted) < LIMIT


@pytest.mark.parametrize("name", beside(KEPT, FUSED))
def test_the_graph_holds_fused_operators_and_no_placeholder(small: Any, name: str) -> None:
    model = small(name).proto()
    nodes = model.graph.node
    assert {node.domain for node in nodes} <= {"", "com.microsoft"}
    assert {entry.domain for entry in model.opset_import} == {"", "com.microsoft"}
    assert not model.functions
    assert not small(name).decisions
    count = Counter(node.op_type for node in nodes)
    assert {kind: count[kind] for kind in FUSED[name]} == FUSED[name]
    # none of what the fused operators stand for is left
    assert not {"Softmax", "Trilu", "Attention", "RotaryEmbedding", "Sin", "Where"} & set(count)
    for node in nodes:
        if node.op_type == "GroupQueryAttention":
            options = {each.name: each.i for each in node.attribute}
            assert options.get("do_rotary", 0) == (name in ROTARY)
            assert (not node.input[1] and not node.input[2]) == (name in PACKED)


def said(values: Any) -> dict[str, list[Any]]:
    return {
        value.name: [axis.dim_param or axis.dim_value for axis in value.type.tensor_type.shape.dim] for value in values
    }


@pytest.mark.parametrize("name", beside(["llama", "gpt2"], ["llama", "gpt2", "gemma2"]))
def test_names_and_axes_are_those_that_others_rely_on(small: Any, name: str) -> None:
    graph = small(name).proto().graph
    heads = 4 if name == "gpt2" else 2
    caches = [f"{layer}.{part}" for layer in range(3) for part in ("key", "value")]
    past = {f"past_key_values.{name}": ["batch_size", heads, "past_sequence_length", 16] for name in caches}
    present = {f"present.{name}": ["batch_size", heads, "total_sequence_length", 16] for name in caches}
    assert said(graph.input) == {
        "input_ids": ["batch_size", "sequence_length"],
        "attention_mask": ["batch_size", "total_sequence_length"],
        **past,
        "logits_to_keep": [1],
    }
    assert said(graph.output) == {"logits": ["batch_size", "kept_length", zoo.VOCABULARY], **present}


def test_an_exceeded_limit_is_as_wide_as_the_rounding_of_float32(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = small("llama-tied")
    values = Values.of_results(found.source, found.stream, found.results)
    assert 0 < check._noise(values) < 1e-5

    def wrong() -> Any:
        model = found.load()
        run = model.run
        monkeypatch.setattr(model, "run", lambda *args: run(*args) * (1 + 3e-4))
        return model

    assert not check.reloaded("reload.onnxruntime", 1e-4, values, wrong).ok
    monkeypatch.setattr(check, "_noise", lambda _: 1e-4)
    judged = check.reloaded("reload.onnxruntime", 1e-4, values, wrong)
    assert judged.ok and judged.limit == pytest.approx(5e-4) and "float64" in judged.where
    monkeypatch.setattr(check, "_noise", lambda _: 1e-5)
    assert not check.reloaded("reload.onnxruntime", 1e-4, values, wrong).ok


def test_an_encoder_s_output_keeps_its_name(small: Any) -> None:
    graph = small("bert").proto().graph
    assert [*said(graph.input)] == ["input_ids", "attention_mask", "token_type_ids"]
    assert said(graph.output) == {"last_hidden_state": ["batch_size", "sequence_length", 64]}


def test_logits_to_keep_may_be_left_out(small: Any) -> None:
    loaded, ids = small("gemma2").load(), zoo.ids(2, 9).numpy()
    feeds = {"input_ids": ids, "attention_mask": np.ones((2, 9), np.int64)}
    feeds |= {name: np.zeros((2, 2, 0, 16), np.float32) for name in loaded.caches}
    (everything,) = loaded.session.run(["logits"], feeds)
    assert everything.shape == (2, 9, zoo.VOCABULARY)
    for keep, count in ((1, 1), (4, 4), (9, 9), (20, 9), (0, 9)):
        (found,) = loaded.session.run(["logits"], feeds | {"logits_to_keep": np.array([keep], np.int64)})
        # the same sums; a product of another shape may add in another order
        assert relative(found, everything[:, 9 - count :]) < 1e-6


GROUP = {"granularity": "group"}
SCHEMES: dict[str, tuple[str, WeightScheme, dict[str, Any]]] = {
    "int4-16": ("llama", scheme(**GROUP, group=16), {}),
    "int4-32-asymmetric": ("llama", scheme(), {}),
    "int4-32-unmerged": ("llama", scheme(), {"merge": False}),
    # 48 divides the 96 of down_proj; the 64 of the others are filled up to 96
    "int4-48-padded": ("llama", scheme(**GROUP, group=48, symmetric=False), {}),
    "int4-96-padded": ("llama", scheme(**GROUP, group=96), {}),
    "int4-80-padded": ("llama", scheme(**GROUP, group=80, symmetric=False), {}),
    "int4-channel": ("llama", scheme(granularity="channel"), {}),
    "int4-channel-asymmetric": ("qwen2", scheme(granularity="channel", symmetric=False), {}),
    "int4-tensor": ("llama", scheme(granularity="tensor", symmetric=False), {}),
    "int4-float32-scale": ("llama", scheme(**GROUP, group=64, scale="float32"), {}),
    "int2-32": ("llama", scheme("int2", **GROUP, group=32, symmetric=False), {}),
    "int8-32": ("llama", scheme("int8", **GROUP, group=32, symmetric=False), {}),
    "int8-channel": ("gpt2", scheme("int8", granularity="channel", symmetric=False), {}),
    "biases-merged": ("qwen2", scheme(), {}),
    "biases-unmerged": ("qwen2", scheme(), {"merge": False}),
    "conv1d": ("gpt2", scheme(**GROUP, group=16, symmetric=False), {}),
    "encoder": ("bert", scheme(), {}),
    "norms-between": ("qwen3", scheme(), {}),
}


def decoded(found: Small) -> dict[str, Any]:
    """Linear (or linears below each other, by the node's output) -> weights [N, K], decoded by the plain oracle."""
    tensors = found.tensors()
    return {
        node.output[0].removesuffix("/output"): plain_matmulnbits.of(node, tensors)
        for node in found.proto().graph.node
        if node.op_type == "MatMulNBits"
    }


def below(name: str, linears: list[str]) -> list[str]:
    """The linears that a product is made of, by its name."""
    first = ("gate_proj", "up_proj", "q_proj", "k_proj", "v_proj", "query", "key", "value")
    if name.endswith("/merged"):
        stem = name.removesuffix("merged").rstrip("/") + "."
        return [linear for linear in linears if linear.startswith(stem) and linear.endswith(first)]
    if name.endswith("/qkv"):
        layer = name.removeprefix("attention.").removesuffix("/qkv")
        return [linear for linear in linears if f"layers.{layer}.self_attn." in linear and linear[-6:-5] in "qkv"]
    return [name]


@pytest.mark.parametrize(("name", "how", "options"), SCHEMES.values(), ids=SCHEMES)
def test_quantized_models(tmp_path: Path, name: str, how: WeightScheme, options: dict[str, Any]) -> None:
    found = export(tmp_path, name, how, **options)
    ids = zoo.ids(2, 14)
    wanted = expected(found.model, ids)
    loaded = found.load()
    given = stepped(loaded, ids.numpy(), 9) if loaded.decoder else loaded.encode(ids.numpy())
    assert relative(given, wanted) < LIMIT
    # every code, scale and zero point is what was decided on, to the last bit
    weights = decoded(found)
    linears = list(found.results.schemes)
    seen = []
    for product, values in weights.items():
        parts = below(product, linears)
        seen += parts
        dense = [found.model.get_submodule(part).weight.detach().numpy() for part in parts]
        joined = np.concatenate([part.T if name == "gpt2" else part for part in dense])
        np.testing.assert_array_equal(values, joined)
    assert sorted(seen) == sorted(linears)
    assert any("/" in product for product in weights) == (options.get("merge", True) and name != "gpt2")
    if name == "qwen2":
        assert len(weights) == 3 * (4 if options.get("merge", True) else 7)
    nodes = [node for node in found.proto().graph.node if node.op_type == "MatMulNBits"]
    assert {len(node.input) for node in nodes} == {3 if how.symmetric else 4}


def test_linears_of_different_schemes_stay_apart(tmp_path: Path) -> None:
    def mixed(linear: str) -> WeightScheme | None:
        if linear == "lm_head" or "layers.1.self_attn.k_proj" in linear:
            return scheme("int8", granularity="channel")
        return scheme() if "layers" in linear and not linear.endswith("o_proj") else None

    found = export(tmp_path, "llama", mixed)
    ids = zoo.ids(2, 14)
    assert relative(stepped(found.load(), ids.numpy(), 9), expected(found.model, ids)) < LIMIT
    nodes = found.proto().graph.node
    attention = [node for node in nodes if node.op_type == "GroupQueryAttention"]
    assert [bool(node.input[1]) for node in attention] == [False, True, False]
    outputs = {node.output[0]: node.op_type for node in nodes}
    assert outputs["logits"] == "MatMulNBits"
    assert outputs["model.layers.0.self_attn.o_proj/output"] == "MatMul"
    assert found.check()["reload.onnxruntime"].ok


@pytest.mark.parametrize("how", [scheme(), scheme("int2", granularity="group", group=32, symmetric=False)], ids=str)
def test_the_accuracy_level_is_the_recipe_s(tmp_path: Path, how: WeightScheme) -> None:
    ids = zoo.ids(2, 14)
    errors = {}
    for level in (0, 4):
        found = export(tmp_path / str(level), "llama", how, accuracy_level=level)
        nodes = [node for node in found.proto().graph.node if node.op_type == "MatMulNBits"]
        assert {each.i for node in nodes for each in node.attribute if each.name == "accuracy_level"} == {level}
        loaded = found.load(accuracy_level=None)
        assert loaded.accuracy_level == level
        wanted = expected(found.model, ids)
        errors[level] = relative(stepped(loaded, ids.numpy(), 9), wanted)
        # as the file says, or as one asks
        assert relative(stepped(found.load(accuracy_level=0), ids.numpy(), 9), wanted) < LIMIT
    assert errors[0] < LIMIT
    # activations in int8 show, and do no harm beyond their 2^-8 a product
    assert 1e-4 < errors[4] < 0.1


def test_a_tied_embedding_is_stored_once(small: Any) -> None:
    tied, untied = small("llama-tied"), small("llama")
    bytes_of = {found.folder: (found.onnx / "model.onnx.data").stat().st_size for found in (tied, untied)}
    assert bytes_of[untied.folder] - bytes_of[tied.folder] == zoo.VOCABULARY * 64 * 4
    names = [each.name for each in tied.proto().graph.initializer]
    assert names.count("model.embed_tokens.weight") == 1
    assert not [name for name in names if "lm_head" in name]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_sources_are_float32_in_the_file(tmp_path: Path, dtype: torch.dtype) -> None:
    found = export(tmp_path, "llama", scheme(scale="bfloat16", granularity="group", group=32), dtype=dtype)
    # `found.model` is the source's values in float32: what was rounded to the dtype stays so
    ids = zoo.ids(2, 14)
    assert relative(stepped(found.load(), ids.numpy(), 9), expected(found.model, ids)) < LIMIT
    kinds = {each.name: each.data_type for each in found.proto().graph.initializer}
    assert {onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16}.isdisjoint(kinds.values())
    tensors = found.tensors()
    exact = found.model.get_submodule("model.embed_tokens").weight.detach().numpy()
    np.testing.assert_array_equal(tensors["model.embed_tokens.weight"], exact)


def test_a_copied_trace_is_written_as_the_first(tmp_path: Path, small: Any) -> None:
    model = small("llama")
    transformer._last.clear()
    for name in ("first", "copied"):
        (tmp_path / name).mkdir()
        write_as(EXPORT, tmp_path / name, model.source, model.stream, Finished([], {}), {})
    first, copied = ((tmp_path / name / "onnx" / "model.onnx").read_bytes() for name in ("first", "copied"))
    assert first == copied


@pytest.mark.thorough
def test_two_exports_are_the_same_bytes(tmp_path: Path, small: Any) -> None:
    """In another process, traced anew, where strings hash otherwise."""
    import os
    import subprocess
    import sys

    program = (
        "import sys; from pathlib import Path; import torch; torch.set_num_threads(1)\n"
        "from quantkit.exporters.onnx.exporter import EXPORT; from quantkit.model.source.open import open_model\n"
        "from quantkit.model.streaming.stream import StreamedModel; from quantkit.model.finished import Finished\n"
        "from quantkit.exporters.values import Values\n"
        "source = open_model(sys.argv[1])\n"
        "values = Values.of_results(source, StreamedModel(source), Finished([], {}))\n"
        "EXPORT.export(Path(sys.argv[2]) / 'onnx', values, EXPORT.Options())\n"
    )
    found = small("llama")
    (tmp_path / "there").mkdir()
    arguments = [sys.executable, "-c", program, str(found.folder.parent / "source"), str(tmp_path / "there")]
    subprocess.run(arguments, check=True, capture_output=True, env={**os.environ, "PYTHONHASHSEED": "7"})
    (tmp_path / "here").mkdir()
    write_as(EXPORT, tmp_path / "here", found.source, found.stream, Finished([], {}), {})
    first, second = (
        {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        for folder in (tmp_path / "here", tmp_path / "there")
    )
    assert len(first) >= 4
    assert first.keys() == second.keys()
    assert [name for name in first if first[name] != second[name]] == []


def test_what_stands_in_the_folder(tmp_path: Path, byte_tokenizer: Any) -> None:
    found = export(tmp_path, "llama", tokenizer=byte_tokenizer, changes=TEXT)
    names = {path.name for path in found.onnx.iterdir()}
    assert names >= {"model.onnx", "model.onnx.data", "config.json", "genai_config.json", "tokenizer.json"}
    assert not [name for name in names if name.endswith(".safetensors")]
    graph = found.proto().graph
    places = {entry.value for each in graph.initializer for entry in each.external_data if entry.key == "location"}
    assert places == {"model.onnx.data"}
    # whatever is large lies there
    inside = [each for each in graph.initializer if each.data_location != onnx.TensorProto.EXTERNAL]
    assert max(each.ByteSize() for each in inside) < 2048
    config = json.loads((found.onnx / "config.json").read_text())
    assert config["model_type"] == "llama"
    assert "quantization_config" not in config
    said = json.loads((found.onnx / "genai_config.json").read_text())["model"]
    assert said["vocab_size"] == 258
    assert said["context_length"] == 128
    assert (said["bos_token_id"], said["eos_token_id"], said["pad_token_id"]) == (1, 257, 0)
    decoder = said["decoder"]
    assert (decoder["head_size"], decoder["num_attention_heads"], decoder["num_key_value_heads"]) == (16, 4, 2)
    assert decoder["num_hidden_layers"] == 2
    for names_of in (decoder["inputs"], decoder["outputs"]):
        for name in names_of.values():
            assert name.replace("%d", "0") in {value.name for value in (*graph.input, *graph.output)}


def test_metadata_says_what_a_roofline_needs(small: Any) -> None:
    meta = small("llama-tied").load().meta
    assert meta["quantkit.kind"] == "decoder"
    assert meta["quantkit.context"] == "64"
    linears = 64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 96
    assert int(meta["quantkit.flops"]) == 2 * 3 * linears
    assert int(meta["quantkit.head_flops"]) == 2 * 64 * zoo.VOCABULARY
    assert int(meta["quantkit.attention_flops"]) == 3 * 4 * 4 * 16
    assert int(meta["quantkit.float_head_flops"]) == 2 * 64 * zoo.VOCABULARY
    assert int(meta["quantkit.float_bytes"]) == 4 * (3 * linears + 64 * zoo.VOCABULARY)
    weights = 4 * (3 * linears + 64 * zoo.VOCABULARY + 7 * 64)
    assert weights <= int(meta["quantkit.step_bytes"]) < weights * 1.01
    assert small("bert").load().meta["quantkit.kind"] == "encoder"


def test_what_the_dialect_cannot_hold_is_refused_before_any_work() -> None:
    for how, reason in (
        (scheme("float16", granularity="tensor"), "weights in float16"),
        (scheme(granularity="group", group=24), "groups of 24"),
        (scheme(granularity="group", group=8), "groups of 8"),
    ):
        with pytest.raises(InputError, match=reason) as caught:
            EXPORT.accepts(EXPORT.Options(), LayerSpec({"good": scheme(), "a.linear": how}, set(), []))
        assert (caught.value.code, caught.value.where) == ("layout-unsupported", "a.linear")
        assert caught.value.remedy
    for how in (scheme(), scheme("int8", granularity="tensor"), scheme(granularity="group", group=48)):
        EXPORT.accepts(EXPORT.Options(accuracy_level=0, merge=False), LayerSpec({"a": how}, set(), ["a"]))
    for options in ({"dialect": "tensorrt"}, {"accuracy_level": 2}, {"accuracylevel": 4}):
        with pytest.raises(ValueError, match=next(iter(options))):
            EXPORT.accepts(EXPORT.Options(**options), LayerSpec())


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from quantkit.errors import MissingDependency

    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(MissingDependency, match=r"onnxscript.*pip install -e '\.\["):
        EXPORT.accepts(EXPORT.Options(), LayerSpec())


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Bundle, Small]:
    """A bundle with a packed checkpoint, and the ONNX file that the same compile made."""
    from quantkit.bundle import LayerEntry
    from quantkit.exporters import load_exporter

    found = export(tmp_path_factory.mktemp("finished"), "llama", scheme())
    folder = tmp_path_factory.mktemp("finished") / "b"
    folder.mkdir()
    write_as(load_exporter("checkpoint"), folder, found.source, found.stream, found.results, {})
    layers = [
        LayerEntry(name=name, shape=[1, 1], scheme=how.model_dump(), bits_per_weight=4.5)
        for name, how in found.results.schemes.items()
    ]
    return small_onnx.bundle(folder, layers=layers), found


def test_a_finished_bundle_s_export_is_the_same_file(tmp_path: Path, finished: tuple[Bundle, Small]) -> None:
    bundle, found = finished
    EXPORT.export(tmp_path / "onnx", Values.of_bundle(bundle.path), EXPORT.Options())
    for name in ("model.onnx", "model.onnx.data", "genai_config.json"):
        assert (tmp_path / "onnx" / name).read_bytes() == (found.onnx / name).read_bytes(), name
    assert "quantization_config" not in json.loads((tmp_path / "onnx/config.json").read_text())


def test_a_bundle_that_has_no_codes_is_refused(tmp_path: Path, finished: tuple[Bundle, Small]) -> None:
    from quantkit.exporters import load_exporter

    bundle, found = finished
    (tmp_path / "none").mkdir()
    small_onnx.bundle(tmp_path / "none")
    with pytest.raises(InputError) as caught:
        EXPORT.export(tmp_path / "onnx", Values.of_bundle(tmp_path / "none"), EXPORT.Options())
    assert caught.value.code == "bundle-without-checkpoint"
    (tmp_path / "dense").mkdir()
    dense = {"layout": "dense"}
    write_as(load_exporter("checkpoint"), tmp_path / "dense", found.source, found.stream, found.results, dense)
    small_onnx.bundle(tmp_path / "dense", layers=bundle.manifest.layers)
    with pytest.raises(InputError) as caught:
        EXPORT.export(tmp_path / "onnx", Values.of_bundle(tmp_path / "dense"), EXPORT.Options())
    assert caught.value.code == "bundle-dense"
    assert not (tmp_path / "onnx").exists()


def test_a_full_disk_stops_safely(tmp_path: Path, small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import errno

    import onnx_ir

    from quantkit.errors import Stopped

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(onnx_ir, "save", full)
    found = small("llama")
    (tmp_path / "b").mkdir()
    with pytest.raises(Stopped) as caught:
        write_as(EXPORT, tmp_path / "b", found.source, found.stream, Finished([], {}), {})
    assert caught.value.code == "disk-full"
