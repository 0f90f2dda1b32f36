"""What a text model is for is what is scored: held against plain transformers on padded batches, with their masks."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
import zoo
from exported import check_as, write_as
from safetensors.torch import save_file
from thorough import beside

from measurement.test_labelled import about
from quantkit.bundle import Bundle
from quantkit.calibrate.sets.pairs import PairSet
from quantkit.calibrate.tokens.ids import TokenSet, token_ids
from quantkit.errors import InputError
from quantkit.exporters import load_exporter
from quantkit.measurement.accuracy.labelled import About
from quantkit.measurement.accuracy.purpose import ON_MEAN, TextResults, embeddings, result_rows, results, rows_of
from quantkit.measurement.rows import Data
from quantkit.model.finished import Finished
from quantkit.model.source.open import Source, open_model
from quantkit.model.streaming.stream import StreamedModel
from quantkit.pipeline import Request, compile_model
from quantkit.pipeline.measure import measure_bundle
from quantkit.runtimes.onnxruntime.session import OnnxModel
from quantkit.runtimes.openvino.session import OpenvinoModel

pytestmark = pytest.mark.usefixtures("own_cache")

WIDTH, WEIGHTED = 64, "weightedmean"
LEFT = ["a cat", "the dog sat on the mat, and so on", "mice", "what is it"]
RIGHT = ["cats", "a dog", "a mouse and another", "it is"]
SMALL = {"vocab_size": 258, "num_hidden_layers": 2, "max_position_embeddings": 128, "initializer_range": 0.2}
IDENTITY = "torch.nn.modules.linear.Identity"
OWN = "sentence_transformers.models."


def model(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A random model of a class, with all parameters far from their initial values."""
    found = getattr(transformers, name)
    size: dict[str, Any] = {"hidden_size": WIDTH, "num_attention_heads": 4, "intermediate_size": 128, "pad_token_id": 0}
    if name.startswith(("Qwen3", "Llama")):
        size |= {"num_key_value_heads": 2, "head_dim": 16}
    if name.startswith("ModernBert"):
        size |= {"cls_token_id": 2, "sep_token_id": 3, "bos_token_id": 2, "eos_token_id": 3}
    torch.manual_seed(0)
    return found(found.config_class(**{**size, **SMALL, **changes})).to(dtype).eval()


def folder(place: Path, made: Any, tokenizer: Any, modules: list[tuple[str, dict[str, Any]]], **beside: Any) -> Path:
    """A folder as sentence-transformers writes one; weights of modules are drawn by their number."""
    made.save_pretrained(place)
    tokenizer.save_pretrained(place)
    listed = [{"path": "", "type": f"{OWN}Transformer"}]
    for number, (kind, config) in enumerate(modules, 1):
        name = f"{number}_{kind}"
        (place / name).mkdir()
        (place / name / "config.json").write_text(json.dumps(config))
        listed.append({"path": name, "type": kind if "." in kind else OWN + kind})
        if tensors := weights(kind, config, number):
            save_file(tensors, place / name / "model.safetensors")
    if modules:
        (place / "modules.json").write_text(json.dumps(listed))
    for name, content in beside.items():
        (place / f"{name}.json").write_text(json.dumps(content))
    return place


def weights(kind: str, config: dict[str, Any], number: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    if kind == "Dense":
        shape = config["out_features"], config["in_features"]
        made = {"linear.weight": torch.randn(shape, generator=generator)}
        return made | ({"linear.bias": torch.randn(shape[:1], generator=generator)} if config.get("bias", True) else {})
    size = (config["dimension"],) if kind == "LayerNorm" else ()
    return {f"norm.{name}": torch.randn(size, generator=generator) for name in ("weight", "bias")} if size else {}


class LogitsAlone(OnnxModel):
    """A session that is not asked for states: its own head gives the logits."""

    def encode(self, *_: Any) -> Any:
        """Nothing."""
        raise AssertionError


def scored(place: Path, *, pairs: bool = True) -> tuple[TextResults, list[np.ndarray]]:
    """What is scored of a folder, and what comes out."""
    stream = StreamedModel(open_model(str(place)))
    both = PairSet(LEFT, RIGHT, "pairs", "eval", "0" * 64) if pairs else None
    tokens = TokenSet(zoo.ids(4, 12), "set", "eval", "0" * 64, pairs=both)
    found = TextResults(stream, tokens)
    return found, results(stream, found.ids, found)


def plain(place: Path, name: str, tokenizer: Any, texts: list[str]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states of a padded batch, its mask, and the places of its tokens, by transformers alone."""
    ids = [torch.tensor(text) for text in tokenizer(texts)["input_ids"]]
    ids, mask = (torch.nn.utils.rnn.pad_sequence(each, True) for each in (ids, [torch.ones(len(text)) for text in ids]))
    base = getattr(transformers, name).from_pretrained(place, dtype=torch.float32).eval()
    with torch.no_grad():
        states = base(input_ids=ids, attention_mask=mask.long())[0]
    return states, mask, mask.cumsum(1)


def by_mask(mode: str, states: torch.Tensor, mask: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Pooling by its definition, with a mask and padding on the right."""
    last = mask.sum(1).long() - 1
    weighed = mask * (places if mode == "weightedmean" else 1)
    total = (states * weighed[..., None]).sum(1)
    return {
        "cls": lambda: states[:, 0],
        "lasttoken": lambda: states[torch.arange(len(states)), last],
        "max": lambda: states.masked_fill(mask[..., None] == 0, -torch.inf).max(1).values,
        "mean_sqrt_len_tokens": lambda: total / mask.sum(1, keepdim=True).sqrt(),
    }.get(mode, lambda: total / weighed.sum(1, keepdim=True))()


@pytest.mark.parametrize(
    ("name", "config", "modes"),
    [
        ("BertModel", {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, ["cls"]),
        ("BertModel", {"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True}, ["max", "mean"]),
        ("BertModel", {"pooling_mode": [WEIGHTED, "mean_sqrt_len_tokens"]}, [WEIGHTED, "mean_sqrt_len_tokens"]),
        ("BertModel", {}, ["mean"]),
        ("Qwen3Model", {"pooling_mode_lasttoken": True}, ["lasttoken"]),
        ("Qwen3ForCausalLM", {"pooling_mode": "lasttoken"}, ["lasttoken"]),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_vectors_are_pooled_as_the_folder_says(
    tmp_path: Path, byte_tokenizer: Any, name: str, config: dict[str, Any], modes: list[str], dtype: torch.dtype
) -> None:
    wide = WIDTH * len(modes)
    dense = {"in_features": wide, "out_features": 24, "activation_function": "torch.nn.modules.activation.Tanh"}
    last = {"in_features": 24, "out_features": 8, "bias": False, "activation_function": IDENTITY}
    modules = [
        ("Pooling", config),
        ("Dense", dense),
        ("LayerNorm", {"dimension": 24}),
        ("Dense", last),
        ("Normalize", {}),
    ]
    place = folder(tmp_path / "m", model(name, dtype), byte_tokenizer, modules)
    found, ours = scored(place)
    assert found.purpose.doubt == "" and found.decisions() == []
    # a head for words is no part of it
    base = name.replace("ForCausalLM", "Model")
    assert open_model(str(place)).architecture == base and open_model(str(place)).kind == "encoder"
    vectors = torch.cat([by_mask(mode, *plain(place, base, byte_tokenizer, [*LEFT, *RIGHT])) for mode in modes], dim=1)
    one, norm, two = (weights(kind, config, number) for number, (kind, config) in enumerate(modules[1:4], 2))
    vectors = (vectors @ one["linear.weight"].T + one["linear.bias"]).tanh()
    vectors = torch.nn.functional.layer_norm(vectors, (24,), norm["norm.weight"], norm["norm.bias"])
    vectors = vectors @ two["linear.weight"].T
    vectors = vectors / vectors.norm(dim=1, keepdim=True)
    torch.testing.assert_close(torch.from_numpy(np.stack(ours)), vectors, rtol=0, atol=2e-5)


def test_a_pooled_decoder_is_refused_as_one_and_taken_without_its_modules(
    tmp_path: Path, merging_tokenizer: Any
) -> None:
    made = model("Qwen3Model", torch.bfloat16, vocab_size=len(merging_tokenizer), tie_word_embeddings=True)
    place = folder(tmp_path / "m", made, merging_tokenizer, [("Pooling", {"pooling_mode": "lasttoken"})])
    config = json.loads((place / "config.json").read_text())
    # as Qwen3-Embedding lies on the hub: tensors of the base, and the class for words
    (place / "config.json").write_text(json.dumps({**config, "architectures": ["Qwen3ForCausalLM"]}))
    asked = {"recipe": "gguf-q8_0", "changes": ["gates={}"], "speed": False, "out": tmp_path / "out"}
    with pytest.raises(InputError, match=r"model-kind.*a copy of the folder without that file is a decoder"):
        compile_model(Request.of(str(place), **asked))
    (place / "modules.json").unlink()
    bundle = compile_model(Request.of(str(place), **asked)).bundle
    assert (bundle.path / "gguf" / "model.gguf").is_file()


def test_texts_go_in_as_the_folder_says_and_a_prompt_may_be_left_out(tmp_path: Path, byte_tokenizer: Any) -> None:
    place = folder(
        tmp_path / "m",
        model("BertModel"),
        byte_tokenizer,
        [("Pooling", {"pooling_mode": "mean", "include_prompt": False})],
        sentence_bert_config={"max_seq_length": 16, "do_lower_case": True},
        config_sentence_transformers={"prompts": {"q": "Find: "}, "default_prompt_name": "q"},
    )
    found, ours = scored(place)
    texts = [f"find: {text}" for text in (*LEFT, *RIGHT)]
    ids = byte_tokenizer(texts, truncation=True, max_length=16)["input_ids"]
    assert found.ids == ids
    base = transformers.BertModel.from_pretrained(place).eval()
    before = len(byte_tokenizer("find: ", add_special_tokens=False)["input_ids"])
    before += ids[0].index(byte_tokenizer("f", add_special_tokens=False)["input_ids"][0])
    with torch.no_grad():
        expected = [base(input_ids=torch.tensor([text]))[0][0, before:].mean(0) for text in ids]
    torch.testing.assert_close(torch.from_numpy(np.stack(ours)), torch.stack(expected), rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (("LSTM", {}), "LSTM"),
        (("mine.Pooling", {}), "mine.Pooling"),
        (("Dense", {"in_features": WIDTH, "out_features": 4, "activation_function": "os.system"}), "os.system"),
        (("Pooling", {"pooling_mode": "median"}), "median"),
    ],
)
def test_a_module_that_is_not_known_is_a_decision(
    tmp_path: Path, byte_tokenizer: Any, module: tuple[str, dict[str, Any]], said: str
) -> None:
    modules = [module] if "Pooling" in module[0] else [("Pooling", {"pooling_mode": "cls"}), module]
    place = folder(tmp_path / "m", model("BertModel"), byte_tokenizer, modules)
    found, ours = scored(place)
    (decision,) = found.decisions()
    assert decision.code == ON_MEAN and said in decision.reason
    expected = by_mask("mean", *plain(place, "BertModel", byte_tokenizer, [*LEFT, *RIGHT]))
    torch.testing.assert_close(torch.from_numpy(np.stack(ours)), expected, rtol=0, atol=2e-5)


def test_weights_that_do_not_fit_their_module_are_refused(tmp_path: Path, byte_tokenizer: Any) -> None:
    modules = [("Pooling", {}), ("Dense", {"in_features": WIDTH, "out_features": 4})]
    place = folder(tmp_path / "m", model("BertModel"), byte_tokenizer, modules)
    for damage in (b"", b"{}"):
        (place / "2_Dense" / "model.safetensors").write_bytes(damage)
        with pytest.raises(InputError, match="modules-invalid"):
            scored(place)


@pytest.mark.parametrize(
    ("name", "changes", "gives"),
    [
        ("BertForSequenceClassification", {"num_labels": 3}, "text"),
        ("RobertaForSequenceClassification", {"num_labels": 1}, "text"),
        ("DebertaV2ForSequenceClassification", {"num_labels": 3}, "text"),
        ("ModernBertForSequenceClassification", {"num_labels": 3, "classifier_pooling": "mean"}, "text"),
        ("AlbertForSequenceClassification", {"num_labels": 2, "embedding_size": 32}, "text"),
        ("Qwen3ForSequenceClassification", {"num_labels": 1}, "text"),
        ("LlamaForTokenClassification", {"num_labels": 3}, "tokens"),
        ("BertForQuestionAnswering", {}, "spans"),
    ],
)
def test_logits_are_what_the_whole_model_gives(
    tmp_path: Path, byte_tokenizer: Any, name: str, changes: dict[str, Any], gives: str
) -> None:
    made = model(name, **changes)
    found, ours = scored(folder(tmp_path / "m", made, byte_tokenizer, []))
    assert (found.purpose.gives, found.purpose.doubt) == (gives, "")
    # a reranker and what finds an answer take two texts
    assert len(found.ids) == 8 and found.purpose.pairs == (gives == "spans" or changes.get("num_labels") == 1)
    for ids, logits in zip(found.ids, ours, strict=True):
        with torch.no_grad():
            whole = made(input_ids=torch.tensor([ids]))
        expected = torch.stack(whole[:2], dim=-1) if gives == "spans" else whole.logits
        torch.testing.assert_close(torch.from_numpy(logits), expected[0], rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("changes", "measures"),
    [
        ({"num_labels": 3}, ["accuracy.top1_agreement", "accuracy.top1_agreement", "accuracy.kl"]),
        ({"num_labels": 1}, ["accuracy.top1_agreement", "accuracy.relative_error"]),
        ({"num_labels": 3, "problem_type": "regression"}, ["accuracy.cosine", "accuracy.relative_error"]),
        (
            {"num_labels": 3, "problem_type": "multi_label_classification"},
            ["accuracy.top1_agreement", "accuracy.top1_agreement", "accuracy.kl"],
        ),
    ],
)
def test_a_row_says_how_many_answers_are_the_original_s(
    tmp_path: Path, byte_tokenizer: Any, changes: dict[str, Any], measures: list[str]
) -> None:
    place = folder(tmp_path / "m", model("BertForSequenceClassification", **changes), byte_tokenizer, [])
    stream = StreamedModel(open_model(str(place)))
    found, ours = scored(place, pairs=False)
    after = [logits.copy() for logits in ours]
    # of the first text every answer is turned over
    after[0] = -after[0] if "multi" in changes.get("problem_type", "") else np.roll(after[0], 1)
    if changes["num_labels"] == 1:
        after[0] = 2 * ours[1] - ours[0]
    tokens = TokenSet(zoo.ids(4, 12), "set", "eval", "0" * 64)
    about = About("a" * 64, "b" * 64, "torch", Data(set="set", split="eval", sha256="0" * 64, items=1))
    rows = rows_of(stream, after, tokens, found, about)
    assert [row.name for row in rows] == measures and all(row.data and row.data.items == 4 for row in rows)
    if changes.get("problem_type") != "regression":
        # of 4 texts, of 2 times two, and of 12 labels
        assert rows[0].value == {3: 0.75, 1: 0.5}[changes["num_labels"]]


@pytest.mark.parametrize(
    ("name", "dtype", "changes"),
    [
        ("DistilBertForQuestionAnswering", torch.float32, {}),
        ("Qwen3ForSequenceClassification", torch.bfloat16, {"num_labels": 2}),
        pytest.param("RobertaForSequenceClassification", torch.bfloat16, {"num_labels": 1}, marks=pytest.mark.thorough),
        pytest.param("BertForTokenClassification", torch.float32, {"num_labels": 3}, marks=pytest.mark.thorough),
    ],
)
def test_a_graph_has_the_head_of_its_class(
    tmp_path: Path, name: str, dtype: torch.dtype, changes: dict[str, Any]
) -> None:
    model(name, dtype, **changes).save_pretrained(tmp_path / "m")
    source = open_model(str(tmp_path / "m"))
    stream, nothing = StreamedModel(source), Finished([], {})
    whole = getattr(transformers, name).from_pretrained(tmp_path / "m", dtype=torch.float32).eval()
    ids, mask = zoo.ids(2, 12), torch.ones(2, 12, dtype=torch.int64)
    ids[1, 7:], mask[1, 7:] = 0, 0
    with torch.no_grad():
        found = whole(input_ids=ids, attention_mask=mask)
    expected = torch.stack(found[:2], dim=-1) if "start_logits" in found else found.logits
    for place, runs in (("onnx", OnnxModel), ("openvino", OpenvinoModel)):
        export = load_exporter(place)
        assert write_as(export, tmp_path, source, stream, nothing, {}) == []
        checks = check_as(export, tmp_path, source, stream, nothing, {})
        (check,) = [each for each in checks if "reload" in each.name]
        assert check.ok
        # padding has no meaning
        logits = torch.from_numpy(runs(tmp_path / place, threads=1).logits(ids.numpy(), mask.numpy()))
        assert logits.shape == expected.shape
        logits, wanted = (each if each.ndim < 3 else each * mask[..., None] for each in (logits, expected))
        torch.testing.assert_close(logits, wanted, rtol=0, atol=1e-5 * float(wanted.abs().max()) + 1e-5)


def test_a_head_that_no_graph_has_is_a_decision(tmp_path: Path) -> None:
    for name, why in (("BertForMaskedLM", "of words"), ("BertForMultipleChoice", "cannot be traced")):
        model(name).save_pretrained(tmp_path / name)
        source = open_model(str(tmp_path / name))
        stream, nothing = StreamedModel(source), Finished([], {})
        (taken,) = write_as(load_exporter("onnx"), tmp_path / name, source, stream, nothing, {})
        assert taken.code == "head-left-out" and why in taken.reason
        assert not OnnxModel(tmp_path / name / "onnx", threads=1).headed


@pytest.mark.parametrize("dtype", beside([torch.bfloat16], [torch.float32, torch.bfloat16]))
def test_a_classifier_is_compiled_judged_and_loaded_with_its_head(
    tmp_path: Path, byte_tokenizer: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quantkit.pipeline.blocks.tokens.SCORED", 600)
    made = model("BertForSequenceClassification", dtype, num_labels=3)
    place = folder(tmp_path / "m", made, byte_tokenizer, [])
    changes = ["scheme.weights.group=32", "calibration.tokens=32", "gates={agreement_min: 0.5}"]
    changes.append("export=[{checkpoint: {}}, {onnx: {}}]")
    request = Request.of(str(place), recipe="rtn-int4", changes=changes, out=tmp_path / "out", speed=False)
    bundle = compile_model(request).bundle
    assert "gate.agreement_min" in {check.name for check in bundle.manifest.checks if check.ok}
    again = measure_bundle(Bundle.load(bundle.path), str(place), runtime="torch", speed=False)
    agreed = next(row for row in again if row.name == "accuracy.top1_agreement")
    # texts of 32 tokens, until 600 positions are scored
    assert agreed.shape == {"classes": 3} and agreed.n == 20
    found, _ = scored(place)
    session = LogitsAlone(bundle.path / "onnx", threads=1)
    logits = results(session, found.ids, found)
    assert all(
        np.allclose(session.logits(np.array([ids]))[0], one, atol=1e-4)
        for ids, one in zip(found.ids, logits, strict=True)
    )
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(bundle.path / "model", dtype=dtype)
    assert torch.equal(loaded.classifier.weight, made.classifier.weight)


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("embed") / "bert"
    zoo.tiny("bert").save_pretrained(path)  # type: ignore[operator]
    return path


def texts(n: int = 7) -> list[list[int]]:
    generator = np.random.default_rng(0)
    return [generator.integers(1, zoo.VOCABULARY, size=length).tolist() for length in ([5, 3, 9, 5, 1, 3, 5] * n)[:n]]


class Session:
    """A session's way to answer, with the whole model behind it."""

    together, headed = 32, False

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model

    def encode(self, ids: np.ndarray) -> np.ndarray:
        return zoo.outputs(self.model, torch.from_numpy(ids)).numpy()


@torch.no_grad()
def masked(model: torch.nn.Module, ids: list[list[int]]) -> np.ndarray:
    """All texts at once, padded, as sentence-transformers does it."""
    width = max(map(len, ids))
    padded = torch.tensor([text + [0] * (width - len(text)) for text in ids])
    mask = torch.tensor([[1] * len(text) + [0] * (width - len(text)) for text in ids])
    hidden = model(input_ids=padded, attention_mask=mask)[0]
    return ((hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)).numpy()


def test_equals_padding_with_a_mask(bert: Path) -> None:
    model, ids = zoo.tiny("bert"), texts()
    oracle = masked(model, ids)
    for side in (StreamedModel(open_model(str(bert))), Session(model)):
        found = embeddings(side, ids, ["mean"])  # type: ignore[arg-type]
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, oracle, atol=2e-5)
    assert embeddings(Session(model), [], ["mean"]).shape[0] == 0  # type: ignore[arg-type]


def test_the_tokenizer_cuts_where_the_model_ends() -> None:
    asked: dict[str, Any] = {}

    class Tokenizer:
        model_max_length = 64

        def __call__(self, texts: list[str], **options: Any) -> dict[str, list[list[int]]]:
            asked.update(options)
            return {"input_ids": [[len(text)] for text in texts]}

    assert (token_ids(["ab", "c"], Tokenizer()), asked) == ([[2], [1]], {"truncation": True, "max_length": 64})
    token_ids(["a"], Tokenizer(), 16)
    assert asked["max_length"] == 16


def test_rows_say_which_pairs_and_against_what(bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = texts(24)
    words = {f"left {i}": ids[i] for i in range(12)} | {f"right {i}": ids[i][::-1] for i in range(12)}

    def tokenizer(texts: list[str], **_: Any) -> dict[str, list[list[int]]]:
        return {"input_ids": [words[text] for text in texts]}

    pairs = PairSet([f"left {i}" for i in range(12)], [f"right {i}" for i in range(12)], "verses", "eval", "dd")
    monkeypatch.setattr(Source, "tokenizer", lambda source: tokenizer)
    stream, tokens = StreamedModel(open_model(str(bert))), TokenSet(torch.ones(1, 1), "x", "eval", "0", pairs=pairs)
    result, session = TextResults(stream, tokens), Session(zoo.tiny("bert"))
    rows = result_rows(stream, session, tokens, result, about())  # type: ignore[arg-type]
    assert [row.name for row in rows] == [
        *(f"accuracy.recall_at_{k}" for k in (1, 5, 10)),
        *("accuracy.ndcg_at_10", "accuracy.cosine"),
    ]
    for row in rows:
        assert row.data is not None
        assert (row.data.set, row.data.sha256, row.data.items, row.subject) == ("verses", "dd", 12, "aa")
    # a bag of words in another order is nearly the same vector: the partner is found, by both sides
    assert rows[0].baseline is not None
    assert (rows[0].baseline.difference, rows[-1].value) == (0, pytest.approx(1.0, abs=1e-6))
