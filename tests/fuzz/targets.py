"""One target a reader: an honest file, how it is mutated, and what reads it."""

import hashlib
import io
import json
import random
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fuzz import mutate

Mutate = Callable[[bytes, random.Random], bytes]


@dataclass(frozen=True)
class Target:
    """A reader.

    Args:
        name: of it.
        seed: makes the files of an honest input in a folder, and names the one that is mutated.
        mutate: its content, anew.
        read: reads the folder.
        slow: needs so long for a mutant that a short campaign gives it fewer.
        hang: seconds after which it hangs.
    """

    name: str
    seed: Callable[[Path], Path]
    mutate: Mutate
    read: Callable[[Path], object]
    slow: bool = False
    hang: float = 5.0


def _written(name: str, data: bytes | str) -> Callable[[Path], Path]:
    def seed(folder: Path) -> Path:
        path = folder / name
        path.write_bytes(data.encode() if isinstance(data, str) else data)
        return path

    return seed


def _tiny(folder: Path) -> None:
    """A random Llama with a tokenizer, of a few kilobytes."""
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = transformers.LlamaConfig(vocab_size=16, max_position_embeddings=16, **sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate("abcdefghijklmnop")}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "a", "chat_template": "{{ messages }}"}))


def _of_model(name: str) -> Callable[[Path], Path]:
    def seed(folder: Path) -> Path:
        _tiny(folder)
        if name == "model.safetensors.index.json":
            from safetensors import safe_open

            with safe_open(folder / "model.safetensors", "pt") as file:
                names = list(file.keys())
            (folder / "model.safetensors").rename(folder / "model-1.safetensors")
            index = {"metadata": {}, "weight_map": dict.fromkeys(names, "model-1.safetensors")}
            (folder / name).write_text(json.dumps(index))
        return folder / name

    return seed


def _weights(folder: Path) -> None:
    from quantkit.model.source.weights import Weights

    weights = Weights.open(folder)
    for name in weights.entries:
        weights.read(name)


def _model(folder: Path) -> None:
    from quantkit.model.source.open import open_model

    open_model(str(folder), hashed=False).skeleton()


def _tokenizer(folder: Path) -> None:
    from quantkit.runtimes.text import Tokenizer

    tokenizer = Tokenizer(folder)
    tokenizer.decode(tokenizer.encode("abc def"))
    tokenizer.chat("abc")


def _onnx(external: bool) -> Callable[[Path], Path]:
    def seed(folder: Path) -> Path:
        import onnx_ir as ir

        rng = np.random.default_rng(0)
        weight = ir.tensor(rng.standard_normal((4, 4)).astype(np.float32), name="w")
        given = ir.Value(name="x", shape=ir.Shape(["n", 4]), type=ir.TensorType(ir.DataType.FLOAT))
        held = ir.Value(name="w", shape=ir.Shape([4, 4]), type=ir.TensorType(ir.DataType.FLOAT), const_value=weight)
        node = ir.node("MatMul", inputs=[given, held])
        node.outputs[0].name, node.outputs[0].shape = "y", ir.Shape(["n", 4])
        node.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
        graph = ir.Graph([given], node.outputs, nodes=[node], initializers=[held], opset_imports={"": 20}, name="g")
        path = folder / "model.onnx"
        how = {"external_data": "model.onnx.data", "size_threshold_bytes": 0} if external else {}
        ir.save(ir.Model(graph, ir_version=10), path, **how)
        return path

    return seed


def _graph(folder: Path) -> None:
    from quantkit.graph.open import open_graph

    open_graph(folder / "model.onnx")


def _operators(folder: Path) -> Path:
    """A decoder of one block, of what `quantkit_cpu` has operators for."""
    from onnx import TensorProto, helper, numpy_helper

    rng = np.random.default_rng(0)
    floats = {"table": (16, 32), "gamma": (32,), "cos": (16, 8), "sin": (16, 8)}
    stored = {name: rng.normal(size=shape).astype(np.float32) for name, shape in floats.items()}
    stored |= {"one": np.array([1]), "zero": np.array([0])}

    def node(kind: str, given: str, made: str, domain: str = "", **how: Any) -> Any:
        names = ["" if name == "-" else name for name in given.split()]
        return helper.make_node(
            kind, names, ["" if name == "-" else name for name in made.split()], domain=domain, **how
        )

    def product(x: str, name: str, rows: int, columns: int) -> Any:
        blocks = columns // 16
        stored[f"{name}.codes"] = rng.integers(0, 256, (rows, blocks, 8)).astype(np.uint8)
        stored[f"{name}.scales"] = rng.uniform(0.01, 0.1, (rows, blocks)).astype(np.float32)
        how = {"N": rows, "K": columns, "bits": 4, "block_size": 16, "accuracy_level": 4}
        return node("MatMulNBits", f"{x} {name}.codes {name}.scales", name, "com.microsoft", **how)

    how = {"num_heads": 4, "kv_num_heads": 2, "scale": 0.25, "do_rotary": 1, "local_window_size": 4}
    caches = "past_key_values.0.key past_key_values.0.value"
    nodes = [
        node("Shape", "attention_mask", "columns", start=1, end=2),
        node("Shape", "attention_mask", "rows", start=0, end=1),
        node("Sub", "columns one", "last"),
        node("Cast", "last", "last32", to=6),
        node("Expand", "last32 rows", "lengths"),
        node("Squeeze", "columns zero", "total64"),
        node("Cast", "total64", "total", to=6),
        node("Gather", "table input_ids", "x"),
        node("SkipSimplifiedLayerNormalization", "x x gamma", "normed - - sum", "com.microsoft", epsilon=1e-5),
        product("normed", "qkv", 128, 32),
        node(
            "GroupQueryAttention",
            f"qkv - - {caches} lengths total cos sin",
            "mixed present.0.key present.0.value",
            "com.microsoft",
            **how,
        ),
        product("mixed", "both", 128, 64),
        node("Split", "both", "gate up", axis=-1, num_outputs=2),
        node("Sigmoid", "gate", "sigmoid"),
        node("Mul", "gate sigmoid", "silu"),
        node("Mul", "silu up", "inner"),
        product("inner", "logits", 16, 64),
    ]
    whole, real = TensorProto.INT64, TensorProto.FLOAT
    given = [
        helper.make_tensor_value_info(n, whole, ["b", t]) for n, t in (("input_ids", "s"), ("attention_mask", "t"))
    ]
    given += [helper.make_tensor_value_info(name, real, ["b", 2, "p", 16]) for name in caches.split()]
    made = [helper.make_tensor_value_info("logits", real, ["b", "s", 16])]
    made += [helper.make_tensor_value_info(f"present.0.{n}", real, ["b", 2, "n", 16]) for n in ("key", "value")]
    arrays = [numpy_helper.from_array(array, name) for name, array in stored.items()]
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(helper.make_graph(nodes, "g", given, made, arrays), opset_imports=opsets, ir_version=10)
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    return path


def _stepped(folder: Path) -> None:
    from quantkit.kernels.cpu import library
    from quantkit.runtimes.onnxruntime.session import OnnxModel

    model = OnnxModel(folder, threads=1, own=library._compiler() is not None)
    state = model.state(2, 8)
    model.run(state, np.arange(8).reshape(2, 4))
    model.run(state, np.array([[3], [5]]))


def _gguf_writer(path: Path, architecture: str) -> Any:
    import gguf

    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(1)
    writer.add_context_length(16)
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(8)
    writer.add_head_count(1)
    return writer


def _finish(writer: Any, shapes: dict[str, tuple[int, ...]], **tensors: Any) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(["a", "b", "ab", "d"])
    writer.add_token_types([1, 1, 1, 1])
    writer.add_token_merges(["a b"])
    shapes = {"token_embd": (4, 8), "output_norm": (8,), "blk.0.attn_norm": (8,), "blk.0.ffn_norm": (8,), **shapes}
    arrays = tensors | {name: np.zeros(shape, dtype=np.float32) for name, shape in shapes.items()}
    for name, array in arrays.items():
        writer.add_tensor(f"{name}.weight", array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _gguf(folder: Path) -> Path:
    path = folder / "model.gguf"
    writer = _gguf_writer(path, "llama")
    writer.add_layer_norm_rms_eps(1e-5)
    shapes = {f"blk.0.{name}": (8, 8) for name in ("attn_q", "attn_k", "attn_v", "attn_output")}
    shapes |= {f"blk.0.ffn_{name}": (8, 8) for name in ("gate", "up", "down")}
    _finish(writer, shapes, rope_freqs=np.array([1, 8, 8, 8], dtype=np.float32))
    return path


def _converted(folder: Path) -> None:
    from quantkit.model.source.gguf import convert_gguf

    (folder / "out").mkdir(exist_ok=True)
    convert_gguf(folder / "model.gguf", folder / "out")


def _metadata(folder: Path) -> None:
    from quantkit.model.source.gguf.file import fields

    fields(folder / "model.gguf")


def _phi3(folder: Path) -> Path:
    """Of an architecture that transformers reads."""
    path = folder / "model.gguf"
    writer = _gguf_writer(path, "phi3")
    writer.add_head_count_kv(1)
    writer.add_rope_scaling_orig_ctx_len(16)
    writer.add_sliding_window(0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    shapes = {"blk.0.attn_qkv": (24, 8), "blk.0.attn_output": (8, 8), "output": (4, 8)}
    _finish(writer, shapes | {"blk.0.ffn_up": (16, 8), "blk.0.ffn_down": (8, 8)})
    return path


def _imatrix(name: str) -> Callable[[Path], Path]:
    def build(folder: Path) -> Path:
        import torch

        from quantkit.calibrate.statistics import imatrix

        squares = {imatrix.tensor_name("model.layers.0.self_attn.q_proj"): torch.ones(8)}
        imatrix.write(imatrix.ImportanceMatrix(squares, 32, 8, ["text"]), folder / name)
        return folder / name

    return build


def _importance(name: str) -> Callable[[Path], None]:
    def read(folder: Path) -> None:
        from quantkit.calibrate.statistics import imatrix

        imatrix.read(folder / name).of_linears({"model.layers.0.self_attn.q_proj": 8}, name)

    return read


RECIPE = {
    "schema": 1,
    "summary": "a recipe",
    "calibration": {"set": "prose-en", "samples": 4, "tokens": 32},
    "scheme": {"weights": {"format": "int4", "granularity": "group", "group": 32, "symmetric": False}},
    "passes": [{"awq": {"grid": 4}}, {"gptq": {"damping": 0.01}}],
    "overrides": [{"match": "*.down_proj", "weights": {"format": "int8", "granularity": "channel"}}],
    "keep": ["lm_head"],
    "gates": {"kl_max": 0.2},
    "export": [{"checkpoint": {"layout": "pack-quantized"}}],
}


def _shipped(kind: str, name: str) -> bytes:
    """A shipped YAML as JSON, which YAML takes too."""
    from quantkit import content

    return json.dumps(content.read_yaml(content.find(kind, name))).encode()  # type: ignore[arg-type]


def _shipped_target(folder: Path) -> Path:
    return _written("target.yaml", _shipped("export", "h100"))(folder)


def _recipe(folder: Path) -> None:
    from quantkit.recipe import Recipe

    Recipe.load(str(folder / "recipe.yaml"))


def _change(folder: Path) -> None:
    from quantkit.recipe import Recipe

    Recipe.load("awq-int4", changes=[(folder / "change").read_bytes().decode("utf-8", "surrogateescape")])


def _target(folder: Path) -> None:
    from quantkit.target import Target

    Target.load(str(folder / "target.yaml"))


def _card(folder: Path) -> Path:
    card = json.loads(_shipped("calibration", "prose-en"))
    for file in card["files"]:
        text = f"one text of {file['split']}\n\nanother text\n".encode()
        (folder / file["path"]).write_bytes(text)
        file.update(bytes=len(text), sha256=hashlib.sha256(text).hexdigest())
    return _written("card.yaml", json.dumps(card))(folder)


def _calibration(suffix: str, *, chat: bool = False) -> Callable[[Path], None]:
    def read(folder: Path) -> None:
        from quantkit.calibrate.sets.card import read_bytes
        from quantkit.calibrate.tokens import sources

        sources.parse(read_bytes(folder / f"text{suffix}"), suffix=suffix, where="text", chat=chat)

    return read


def _read_card(folder: Path) -> None:
    from quantkit.calibrate.sets.card import Card

    Card.load(folder / "card.yaml").read("calib")


def _parquet(folder: Path) -> Path:
    import pyarrow as pa
    import pyarrow.parquet

    path = folder / "text.parquet"
    pyarrow.parquet.write_table(pa.table({"text": ["one", "two", "three"] * 5}), path)
    return path


def _picture(kind: str) -> Callable[[Path], Path]:
    def seed(folder: Path) -> Path:
        from PIL import Image

        path = folder / f"image.{kind}"
        rng = np.random.default_rng(0)
        Image.fromarray(rng.integers(0, 255, (12, 10, 3), dtype=np.uint8)).save(path)
        return path

    return seed


def _zip(folder: Path) -> Path:
    picture = io.BytesIO()
    from PIL import Image

    Image.fromarray(np.zeros((4, 4, 3), dtype=np.uint8)).save(picture, "PNG")
    path = folder / "image.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.png", picture.getvalue())
        archive.writestr("b.png", picture.getvalue())
    return path


def _arrays(kind: str) -> Callable[[Path], Path]:
    def seed(folder: Path) -> Path:
        path = folder / f"image.{kind}"
        images = np.zeros((3, 4, 4, 3), dtype=np.uint8)
        np.save(path, images) if kind == "npy" else np.savez_compressed(path, images=images, labels=np.arange(3))
        return path

    return seed


def _images(kind: str) -> Callable[[Path], None]:
    def read(folder: Path) -> None:
        from quantkit.calibrate.sets import images as image_sources
        from quantkit.model.source.packaged import Preprocess

        how = Preprocess(resize=8, crop=8, mean=[0.5] * 3, std=[0.5] * 3)
        found = image_sources.parse(folder / f"image.{kind}", suffix=f".{kind}", where="image")
        for number in range(min(found.count, 2)):
            image = found.read(number)
            if found.bytes_:
                image_sources.preprocess(image, how, where="image")

    return read


def _manifest(folder: Path) -> Path:
    import planted

    path = folder / "manifest.json"
    path.write_bytes(planted.manifest().as_bytes())
    return path


def _bundle(folder: Path) -> None:
    from quantkit.bundle import Bundle

    bundle = Bundle.load(folder)
    bundle.verify()
    _ = bundle.measurements


class SilentError(Exception):
    """Something was changed where a hash covers it, and nobody noticed."""


def _sealed(folder: Path) -> Path:
    """A bundle whose manifest is mutated: no mutant verifies."""
    import planted

    from quantkit.bundle import content_sha256, inventory, seal

    (folder / "model").mkdir()
    (folder / "model" / "model.safetensors").write_text("weights")
    files = inventory(folder)
    manifest = planted.manifest(files=[file.model_dump(by_alias=True) for file in files])
    manifest = manifest.model_copy(update={"content_sha256": content_sha256(files)})
    seal.write_manifest(folder, manifest.as_bytes())
    return folder / "manifest.json"


def _verified(folder: Path) -> None:
    from quantkit.bundle import Bundle

    checks = Bundle.load(folder).verify()
    sealed = json.loads((folder / "seal.json").read_bytes())["manifest.json"]
    changed = hashlib.sha256((folder / "manifest.json").read_bytes()).hexdigest() != sealed
    if changed and all(check.ok for check in checks):
        raise SilentError


def _rows(folder: Path) -> Path:
    import planted

    from quantkit.measurement.rows import write_rows

    write_rows(folder / "measurements.jsonl", planted.rows()[:4])
    return folder / "measurements.jsonl"


def _read_rows(folder: Path) -> None:
    from quantkit.measurement.rows import read_rows

    read_rows(folder / "measurements.jsonl")


def _plan(folder: Path) -> None:
    from quantkit.model.sizes import configs

    configs.read(str(folder))


def _nightly(folder: Path) -> None:
    from quantkit.nightly.config import Nightly

    Nightly.load(folder / "nightly.yaml", look=False)


def _nightly_example(folder: Path) -> Path:
    from quantkit import content

    path = folder / "nightly.yaml"
    here = Path(__file__).parents[2] / "docs" / "nightly" / "nightly.yaml"
    path.write_text(json.dumps(content.read_yaml(here), default=str))
    return path


def _prices(folder: Path) -> None:
    from quantkit.planning.cost import Prices

    Prices.load(folder / "prices.yaml")


def _prices_example(folder: Path) -> Path:
    import quantkit.planning as here
    from quantkit import content

    path = folder / "prices.yaml"
    path.write_text(json.dumps(content.read_yaml(Path(here.__file__).parent / "prices.yaml"), default=str))
    return path


def _measured(folder: Path) -> None:
    import os

    from quantkit.target import read_measured

    os.environ["QUANTKIT_CACHE"] = str(folder)  # the worker, or the test, is alone with it
    read_measured("cpu-x86")


def _measured_seed(folder: Path) -> Path:
    (folder / "doctor").mkdir(exist_ok=True)
    path = folder / "doctor" / "cpu-x86.json"
    path.write_text(json.dumps({"schema": 1, "memory_bandwidth": 2e10, "compute": {"float32": 1e11}, "cores": 2}))
    return path


def _answers(folder: Path) -> None:
    from quantkit.runtimes.child import heard

    heard((folder / "answers").read_bytes().decode("utf-8", "replace").splitlines())


ANSWERS = 'at 0.5 decode, batch 1\nrow {"name": "latency", "value": 0.1}\nchatter\nnote "warm"\nat 1.0 done\n'
ENDED = ANSWERS + 'error {"code": "out-of-memory", "where": "cpu", "value": "", "rule": "", "remedy": "", "exit": 2}\n'
TEXT = "one text of a few words\n\nanother text\n"
LINES = "\n".join(json.dumps({"text": f"text number {n}"}) for n in range(4))
CHATS = "\n".join(json.dumps({"messages": [{"role": "user", "content": "hello"}]}) for _ in range(3))
TARGETS: tuple[Target, ...] = (
    Target("safetensors", _of_model("model.safetensors"), mutate.of_header, _weights),
    Target("index", _of_model("model.safetensors.index.json"), mutate.of_json, _weights),
    Target("config", _of_model("config.json"), mutate.of_json, _model, slow=True, hang=40),
    Target("config-plan", _of_model("config.json"), mutate.of_json, _plan),
    Target("tokenizer", _of_model("tokenizer.json"), mutate.of_json, _tokenizer),
    Target("tokenizer-config", _of_model("tokenizer_config.json"), mutate.of_json, _tokenizer),
    Target("onnx", _onnx(external=False), mutate.of_bytes, _graph),
    Target("onnx-external", _onnx(external=True), mutate.of_bytes, _graph),
    Target("onnx-operators", _operators, mutate.of_graph, _stepped),
    Target("gguf", _gguf, mutate.of_bytes, _converted, slow=True),
    Target("gguf-metadata", _gguf, mutate.of_bytes, _metadata),
    Target("gguf-transformers", _phi3, mutate.of_bytes, _converted, slow=True),
    Target("imatrix", _imatrix("i.gguf"), mutate.of_bytes, _importance("i.gguf")),
    Target("imatrix-dat", _imatrix("i.dat"), mutate.of_bytes, _importance("i.dat")),
    Target("recipe", _written("recipe.yaml", json.dumps(RECIPE)), mutate.of_json, _recipe),
    Target("change", _written("change", "scheme.weights.group=32"), mutate.of_bytes, _change),
    Target("target", _shipped_target, mutate.of_json, _target),
    Target("card", _card, mutate.of_json, _read_card),
    Target("text", _written("text.txt", TEXT), mutate.of_bytes, _calibration(".txt")),
    Target("jsonl", _written("text.jsonl", LINES), mutate.of_lines, _calibration(".jsonl")),
    Target("chats", _written("text.jsonl", CHATS), mutate.of_lines, _calibration(".jsonl", chat=True)),
    Target("parquet", _parquet, mutate.of_bytes, _calibration(".parquet")),
    Target("png", _picture("png"), mutate.of_bytes, _images("png")),
    Target("jpg", _picture("jpg"), mutate.of_bytes, _images("jpg")),
    Target("tif", _picture("tif"), mutate.of_bytes, _images("tif")),
    Target("webp", _picture("webp"), mutate.of_bytes, _images("webp")),
    Target("zip", _zip, mutate.of_bytes, _images("zip")),
    Target("npy", _arrays("npy"), mutate.of_bytes, _images("npy")),
    Target("npz", _arrays("npz"), mutate.of_bytes, _images("npz")),
    Target("manifest", _manifest, mutate.of_json, _bundle),
    Target("sealed", _sealed, mutate.of_bytes, _verified),
    Target("rows", _rows, mutate.of_lines, _read_rows),
    Target("nightly", _nightly_example, mutate.of_json, _nightly),
    Target("prices", _prices_example, mutate.of_json, _prices),
    Target("answers", _written("answers", ANSWERS), mutate.of_bytes, _answers),
    Target("answers-error", _written("answers", ENDED), mutate.of_bytes, _answers),
    Target("measured", _measured_seed, mutate.of_json, _measured),
)
BY_NAME: dict[str, Any] = {target.name: target for target in TARGETS}
