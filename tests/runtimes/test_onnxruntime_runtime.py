"""The ONNX Runtime side: generation, sampling, padding, what it says it used, and what it refuses."""

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import small_onnx
import torch
import zoo
from small_onnx import TEXT, Small, export, scheme
from transformers import AutoTokenizer

from quantkit import machine
from quantkit.bundle import Bundle
from quantkit.errors import InputError, MissingDependency
from quantkit.runtimes import load_runtime
from quantkit.runtimes.generate import Sampling, stream
from quantkit.runtimes.onnxruntime.session import OnnxModel
from quantkit.runtimes.text import Tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")

RUNTIME = load_runtime("onnxruntime")
GREEDY = Sampling()


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory, byte_tokenizer: Any) -> Small:
    """A tiny llama in int4 with the tokenizer beside it, exact; its folder is a bundle."""
    found = export(
        tmp_path_factory.mktemp("runtime"), "llama", scheme(), tokenizer=byte_tokenizer, changes=TEXT, accuracy_level=0
    )
    small_onnx.bundle(found.folder)
    return found


@pytest.fixture(scope="module")
def loaded(small: Small) -> OnnxModel:
    return OnnxModel(small.onnx, threads=1)


@pytest.fixture
def own(small: Small, tmp_path: Path) -> Path:
    """A copy of the bundle, to be spoilt."""
    return Path(shutil.copytree(small.folder, tmp_path / "b"))


def by_transformers(small: Small, ids: Any, new_tokens: int, mask: Any = None) -> Any:
    """Greedy tokens [B, new] of transformers' own `generate`; no end of text."""
    given = torch.from_numpy(ids)
    with torch.no_grad():
        made = small.model.generate(  # type: ignore[operator]
            given,
            attention_mask=torch.ones_like(given) if mask is None else torch.from_numpy(mask),
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
        )
    return made[:, ids.shape[1] :].numpy()


def tokens(model: OnnxModel, ids: Any, new_tokens: int, sampling: Sampling = GREEDY, mask: Any = None) -> Any:
    return np.stack(list(stream(model, ids, new_tokens, sampling, mask)), axis=1)


# --- generation -------------------------------------------------------------------------------------------------------


def no_end(small: Small, ids: Any, count: int, mask: Any = None) -> Any:
    """transformers' tokens, and that none of them is the end, which `min_new_tokens` would have kept it from taking."""
    wanted = by_transformers(small, ids, count, mask)
    assert 257 not in wanted
    return wanted


def test_greedy_tokens_are_transformers_own(small: Small, loaded: OnnxModel) -> None:
    ids = zoo.ids(3, 11).numpy()
    wanted = no_end(small, ids, 24)
    assert len(set(wanted.reshape(-1))) > 8, "a model that says one thing only would show nothing"
    np.testing.assert_array_equal(tokens(loaded, ids, 24), wanted)


def test_a_padded_batch_generates_what_each_row_does_alone(small: Small, loaded: OnnxModel) -> None:
    ids, lengths = zoo.ids(3, 11).numpy(), (11, 4, 1)
    padded, mask = np.zeros_like(ids), np.zeros_like(ids)
    for row, length in enumerate(lengths):
        padded[row, 11 - length :], mask[row, 11 - length :] = ids[row, :length], 1
    together = tokens(loaded, padded, 12, mask=mask)
    for row, length in enumerate(lengths):
        np.testing.assert_array_equal(together[row], tokens(loaded, ids[[row], :length], 12)[0])
    np.testing.assert_array_equal(together, by_transformers(small, padded, 12, mask))
    # what stands in the padding makes no difference
    padded[mask == 0] = 77
    np.testing.assert_array_equal(tokens(loaded, padded, 12, mask=mask), together)


def test_text_in_text_out(small: Small) -> None:
    bundle = Bundle.load(small.folder)
    made = RUNTIME.generate(bundle, "The state of", new_tokens=8)
    tokenizer = Tokenizer(small.onnx)
    ids = np.array([tokenizer.encode("The state of")])
    assert ids[0, 0] == 256, "special tokens of the tokenizer's own template"
    wanted = by_transformers(small, ids, 8)[0].tolist()
    wanted = wanted[: wanted.index(257)] if 257 in wanted else wanted
    assert made["text"] == tokenizer.decode(wanted)
    assert made["tokens"] == len(wanted)
    assert 0 < made["first_token_s"] < made["seconds"]
    assert made["tokens_per_s"] is None or made["tokens_per_s"] > 0
    assert RUNTIME.generate(bundle, "The state of", new_tokens=8)["text"] == made["text"]
    assert RUNTIME.generate(bundle, "The", new_tokens=1)["tokens_per_s"] is None


def test_a_tokenizer_file_that_cuts_and_fills_gives_the_ids_of_transformers(tmp_path: Path, bos_tokenizer: Any) -> None:
    bos_tokenizer.save_pretrained(tmp_path)
    path = tmp_path / "tokenizer.json"
    stated = json.loads(path.read_text())
    stated["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    fill = {"pad_id": 257, "pad_type_id": 0, "pad_token": "</s>", "pad_to_multiple_of": None}
    stated["padding"] = {"strategy": {"Fixed": 16}, "direction": "Right", **fill}
    path.write_text(json.dumps(stated))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for text in ("The state of the art", "an"):
        assert Tokenizer(tmp_path).encode(text) == theirs(text)["input_ids"]


def test_generation_ends_where_the_model_says(own: Path) -> None:
    first = int(tokens(OnnxModel(own / "onnx", threads=1), np.array([Tokenizer(own / "onnx").encode("The")]), 1)[0, 0])
    for ends in (first, [257, first]):
        (own / "onnx" / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
        assert Tokenizer(own / "onnx").ends == ({ends} if isinstance(ends, int) else set(ends))
        made = RUNTIME.generate(small_onnx.bundle(own), "The", new_tokens=9)
        assert (made["tokens"], made["text"]) == (0, "")
    (own / "onnx" / "generation_config.json").unlink()
    assert Tokenizer(own / "onnx").ends == {257}, "what config.json says"


def test_drawing_is_repeatable_by_its_seed(small: Small) -> None:
    bundle = Bundle.load(small.folder)
    made = [RUNTIME.generate(bundle, "The", new_tokens=12, sample=True, seed=seed)["text"] for seed in (1, 1, 2)]
    assert made[0] == made[1]
    assert made[0] != made[2]


def test_chat_goes_through_the_model_s_template(own: Path) -> None:
    bundle = Bundle.load(own)
    with pytest.raises(InputError) as caught:
        RUNTIME.generate(bundle, "Hello", chat=True)
    assert caught.value.code == "no-chat-template"
    (own / "onnx" / "chat_template.jinja").write_text(
        "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
        "{% if add_generation_prompt %}<bot>{% endif %}"
    )
    bundle = small_onnx.bundle(own)
    assert Tokenizer(own / "onnx").chat("Hello") == "<user>Hello<bot>"
    assert RUNTIME.generate(bundle, "Hello", chat=True, new_tokens=2)["tokens"] <= 2
    (own / "onnx" / "chat_template.jinja").write_text("{{ bos_token }}{{ strftime_now('%Y') }}")
    text = Tokenizer(own / "onnx").chat("Hello")
    assert re.fullmatch(r"<s>20\d\d", text)
    assert Tokenizer(own / "onnx").encode(text, special=False).count(256) == 1
    for hostile in ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ raise_exception('no system') }}", "{{ x"):
        (own / "onnx" / "chat_template.jinja").write_text(hostile)
        with pytest.raises(InputError) as caught:
            Tokenizer(own / "onnx").chat("Hello")
        assert caught.value.code == "no-chat-template"


# --- sampling ---------------------------------------------------------------------------------------------------------


def drawn(logits: Any, count: int = 3000, **settings: Any) -> Any:
    """How often each of the tokens is drawn, as a share."""
    sampling = Sampling(sample=True, generator=np.random.default_rng(0), **settings)
    rows = np.tile(np.asarray(logits, np.float32), (count, 1))
    return np.bincount(sampling.choose(rows), minlength=rows.shape[1]) / count


LOGITS = np.log([0.1, 0.4, 0.2, 0.25, 0.05])


def test_draws_follow_the_distribution() -> None:
    # three standard deviations of 3000 draws are 0.027
    np.testing.assert_allclose(drawn(LOGITS, top_k=0), [0.1, 0.4, 0.2, 0.25, 0.05], atol=0.03)
    hot = np.sqrt([0.1, 0.4, 0.2, 0.25, 0.05])
    np.testing.assert_allclose(drawn(LOGITS, top_k=0, temperature=2.0), hot / hot.sum(), atol=0.03)
    assert drawn(LOGITS, temperature=1e-4).tolist() == [0, 1, 0, 0, 0]
    assert drawn(LOGITS, temperature=0.0).tolist() == [0, 1, 0, 0, 0]


@pytest.mark.parametrize(
    ("settings", "allowed"),
    [
        ({"top_k": 1}, {1}),
        ({"top_k": 2}, {1, 3}),
        ({"top_k": 3}, {1, 2, 3}),
        ({"top_k": 0}, {0, 1, 2, 3, 4}),
        ({"top_k": 99}, {0, 1, 2, 3, 4}),
        ({"top_p": 0.3}, {1}),
        ({"top_p": 0.6}, {1, 3}),  # 0.4 is not enough; with 0.25 it is
        ({"top_p": 0.8}, {1, 2, 3}),
        ({"top_p": 1e-9}, {1}),
        ({"top_p": 1.0}, {0, 1, 2, 3, 4}),
        ({"top_k": 2, "top_p": 0.6}, {1}),  # of the two that are left 0.4 is already 0.615
    ],
)
def test_top_k_and_top_p_leave_the_fewest_tokens(settings: dict[str, Any], allowed: set[int]) -> None:
    shares = drawn(LOGITS, **settings)
    assert set(np.flatnonzero(shares)) == allowed
    exact = np.array([np.exp(LOGITS[token]) if token in allowed else 0 for token in range(5)])
    np.testing.assert_allclose(shares, exact / exact.sum(), atol=0.03)


def test_transformers_leaves_the_same_tokens() -> None:
    from transformers import TopKLogitsWarper, TopPLogitsWarper

    scores = torch.randn(1, 40, generator=torch.Generator().manual_seed(0)) * 2
    for k, p in ((7, 1.0), (40, 0.9), (12, 0.55)):
        kept = TopPLogitsWarper(p)(None, TopKLogitsWarper(k)(None, scores))[0].isfinite()
        shares = drawn(scores[0].numpy(), top_k=k, top_p=p)
        assert not shares[~kept.numpy()].any()


def test_without_drawing_it_is_the_most_likely() -> None:
    logits = np.random.default_rng(0).standard_normal((5, 30)).astype(np.float32)
    np.testing.assert_array_equal(Sampling(temperature=9.0, top_k=3).choose(logits), logits.argmax(1))


def test_the_model_s_own_settings_hold(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from quantkit.runtimes import generate as _generate

    seen: list[Sampling] = []

    def watched(model: Any, ids: Any, new_tokens: int, sampling: Sampling) -> Any:
        seen.append(sampling)
        return iter([])

    monkeypatch.setattr(_generate, "stream", watched)
    settings: list[tuple[dict[str, Any], tuple[float, int, float]]] = [
        ({}, (1.0, 50, 1.0)),
        ({"temperature": 0.7, "top_k": 20, "top_p": 0.8}, (0.7, 20, 0.8)),
        ({"top_k": 0}, (1.0, 0, 1.0)),  # no limit, as transformers has it
    ]
    for given, wanted in settings:
        (own / "onnx" / "generation_config.json").write_text(json.dumps(given))
        made = RUNTIME.generate(small_onnx.bundle(own), "The", sample=True)
        assert made["tokens"] == 0
        assert (seen[-1].temperature, seen[-1].top_k, seen[-1].top_p) == wanted
        assert seen[-1].sample


# --- the cache --------------------------------------------------------------------------------------------------------


def test_logits_are_the_caller_s_own(loaded: OnnxModel) -> None:
    """The next step does not write over them."""
    ids = zoo.ids(1, 6).numpy()
    state = loaded.state(1, 6)
    loaded.run(state, ids[:, :3])
    first = loaded.run(state, ids[:, [3]])
    before = first.copy()
    loaded.run(state, ids[:, [4]])
    np.testing.assert_array_equal(first, before)


@pytest.mark.parametrize("batch", [1, 2])
def test_only_the_last_logits_where_no_more_are_wanted(loaded: OnnxModel, batch: int) -> None:
    ids = zoo.ids(batch, 9).numpy()
    everything = loaded.run(loaded.state(batch, 9), ids)
    assert everything.shape == (batch, 9, 258)
    for keep in (1, 4, 9, 30):
        found = loaded.run(loaded.state(batch, 9), ids, keep=keep)
        np.testing.assert_allclose(found, everything[:, -keep:], atol=1e-5)
    # in pieces, with a past
    state = loaded.state(batch, 9)
    loaded.run(state, ids[:, :4])
    np.testing.assert_allclose(loaded.run(state, ids[:, 4:], keep=2), everything[:, -2:], atol=1e-5)


def test_states_do_not_touch_one_another(loaded: OnnxModel) -> None:
    ids = zoo.ids(2, 8).numpy()
    alone = [loaded.run(loaded.state(1, 8), ids[[row]]) for row in (0, 1)]
    one, two = loaded.state(1, 8), loaded.state(1, 8)
    parts: list[list[Any]] = [[], []]
    for column in range(8):
        for row, state in enumerate((one, two)):
            parts[row].append(loaded.run(state, ids[[row]][:, [column]]))
    for row in (0, 1):
        np.testing.assert_allclose(np.concatenate(parts[row], axis=1), alone[row], atol=1e-5)


def test_room_that_is_left_over_changes_nothing(loaded: OnnxModel) -> None:
    ids = zoo.ids(2, 8).numpy()
    np.testing.assert_allclose(
        loaded.run(loaded.state(2, 8), ids), loaded.run(loaded.state(2, 100), ids), rtol=0, atol=1e-5
    )


def test_steps_that_latency_is_measured_on(loaded: OnnxModel) -> None:
    assert loaded.decode(2, 100)() is None
    assert loaded.prefill(3, 64)() is None
    assert loaded.cache_bytes == 2 * 2 * 2 * 16 * 4
    assert loaded.vocabulary == 258
    for ask in (lambda: loaded.decode(1, 128), lambda: loaded.prefill(1, 129)):
        with pytest.raises(InputError, match="prompt-too-long"):
            ask()


def test_the_profiler_names_provider_and_kernels(small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    model = OnnxModel(small.onnx, threads=1, profile=True)
    for _ in range(3):
        model.decode(2, 16)()
    used = model.used()
    assert set(used.providers) == {"CPUExecutionProvider"}
    kernels = {kind: count for kind, (count, _) in used.seconds.items()}
    # of one run, not of all three
    assert {kind: kernels[kind] for kind in ("MatMulNBits", "GroupQueryAttention")} == {
        "MatMulNBits": 8,
        "GroupQueryAttention": 2,
    }
    assert sum(used.providers.values()) == sum(kernels.values())
    assert all(seconds >= 0 for _, seconds in used.seconds.values())
    assert 0 < used.share <= 1
    assert not list(tmp_path.iterdir()), "the profile is removed"
    with pytest.raises(InputError, match="not-profiled"):
        model.used()


def test_there_is_no_profile_without_asking_or_running(small: Small, loaded: OnnxModel) -> None:
    with pytest.raises(InputError, match=r"not-profiled.*without `profile`"):
        loaded.used()
    with pytest.raises(InputError, match=r"not-profiled.*no run since"):
        OnnxModel(small.onnx, threads=1, profile=True).used()


def test_threads_are_what_one_asks_for(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    for threads in (1, 2):
        model = OnnxModel(small.onnx, threads=threads)
        assert model.session.get_session_options().intra_op_num_threads == threads
    monkeypatch.setattr(machine, "cores", lambda: 3)
    assert OnnxModel(small.onnx).session.get_session_options().intra_op_num_threads == 3


# --- what it refuses --------------------------------------------------------------------------------------------------


def test_a_prompt_longer_than_the_context(small: Small, loaded: OnnxModel) -> None:
    bundle = Bundle.load(small.folder)
    for prompt, new in (("x" * 127, 1), ("x", 126), ("x" * 500, 64)):
        with pytest.raises(InputError) as caught:
            RUNTIME.generate(bundle, prompt, new_tokens=new)
        assert caught.value.code == "prompt-too-long"
        assert "128" in caught.value.rule
        assert caught.value.remedy
    # what just fits does fit: <s>, 5 letters, </s>
    RUNTIME.generate(bundle, "x" * 5, new_tokens=121)
    state = loaded.state(1, 4)
    loaded.run(state, np.ones((1, 4), np.int64))
    with pytest.raises(InputError, match=r"prompt-too-long.*room for 4"):
        loaded.run(state, np.ones((1, 1), np.int64))


def test_a_batch_that_does_not_fit_memory(loaded: OnnxModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def need(batch: int) -> int:
        return batch * (128 * loaded.cache_bytes + 4 * 258 + 4 * 128)

    monkeypatch.setattr(machine, "memory_available", lambda: need(8) * 10 // 9 + 10)
    loaded.state(8, 128)
    made = pytest.fail
    monkeypatch.setattr(np, "zeros", lambda *_, **__: made("nothing is taken before it is known to fit"))
    for ask in (lambda: loaded.state(9, 128), lambda: loaded.decode(9, 127), lambda: loaded.prefill(9, 128)):
        with pytest.raises(InputError) as caught:
            ask()
        assert caught.value.code == "out-of-memory"
        assert "batch 9" in str(caught.value.where)
        assert "smaller batch" in caught.value.remedy


def refusal(folder: Path) -> InputError:
    with pytest.raises(InputError) as caught:
        OnnxModel(folder, threads=1)
    assert caught.value.code == "onnx-unreadable"
    assert "onnxruntime" in caught.value.rule
    assert caught.value.remedy
    return caught.value


def test_a_corrupt_graph_is_refused(own: Path) -> None:
    path = own / "onnx" / "model.onnx"
    whole = path.read_bytes()
    for data in (b"", b"not a graph", whole[: len(whole) // 2], bytes(100)):
        path.write_bytes(data)
        refusal(own / "onnx")
    path.unlink()
    refusal(own / "onnx")


def test_a_missing_or_cut_data_file(own: Path) -> None:
    path = own / "onnx" / "model.onnx.data"
    whole = path.read_bytes()
    for data in (whole[: len(whole) // 2], b""):
        path.write_bytes(data)
        assert "external data file is missing or damaged" in str(refusal(own / "onnx").value)
    path.unlink()
    assert "external data file is missing or damaged" in str(refusal(own / "onnx").value)


@pytest.mark.parametrize(
    ("domain", "kind", "reason"),
    [
        ("com.microsoft", "MatMulOfTheFuture", "an operator that this onnxruntime does not have"),
        ("com.example", "Custom", "an operator that this onnxruntime does not have"),
        ("", "NoSuchOperator", "an operator that this onnxruntime does not have"),
    ],
)
def test_an_onnxruntime_that_lacks_an_operator(tmp_path: Path, domain: str, kind: str, reason: str) -> None:
    values = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1]) for name in ("x", "y")]
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node(kind, ["x"], ["y"], domain=domain)], "g", *([v] for v in values)
    )
    imports = [onnx.helper.make_opsetid("", 21), onnx.helper.make_opsetid(domain or "com.microsoft", 1)]
    model = onnx.helper.make_model(graph, opset_imports=imports, ir_version=10)
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    problem = refusal(tmp_path)
    assert reason in str(problem.value)
    assert "update onnxruntime" in problem.remedy


def test_a_file_newer_than_the_onnxruntime(own: Path) -> None:
    path = own / "onnx" / "model.onnx"
    model = onnx.load(str(path), load_external_data=False)
    model.ir_version = 99
    path.write_bytes(model.SerializeToString())
    assert "a newer file format" in str(refusal(own / "onnx").value)


@pytest.mark.parametrize("name", ["model.onnx", "model.onnx.data", "tokenizer.json"])
def test_a_file_that_is_not_what_the_manifest_says(own: Path, name: str) -> None:
    path = own / "onnx" / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    changes: list[tuple[Any, str]] = [
        (lambda: path.write_bytes(bytes(data)), "files.sha256"),
        (lambda: path.write_bytes(bytes(data[:-1])), "files.size"),
        (path.unlink, "files.present"),
    ]
    for change, said in changes:
        bundle = Bundle.load(own)
        change()
        if (name, said) == ("model.onnx", "files.present"):
            continue  # then there is no export at all
        with pytest.raises(InputError) as caught:
            RUNTIME.load(bundle)
        assert (caught.value.code, caught.value.value) == ("hash-mismatch", said)
        assert name in str(caught.value.where)
        # generating reads the tokenizer first, which may find that it is none
        with pytest.raises(InputError, match=r"hash-mismatch|no-tokenizer"):
            RUNTIME.generate(bundle, "The", new_tokens=1)


def test_other_files_than_those_of_onnx_are_not_read(own: Path) -> None:
    """The edge box needs no checkpoint: a wrong one elsewhere is not this runtime's business."""
    (own / "model").mkdir()
    (own / "model" / "model.safetensors").write_text("weights")
    bundle = small_onnx.bundle(own)
    (own / "model" / "model.safetensors").write_text("others")
    assert RUNTIME.load(bundle, threads=1).decoder


def test_a_graph_that_the_manifest_does_not_list(own: Path) -> None:
    shutil.move(own / "onnx", own / "aside")
    (own / "manifest.json").unlink()
    bundle = small_onnx.bundle(own)
    shutil.move(own / "aside", own / "onnx")
    with pytest.raises(InputError) as caught:
        RUNTIME.load(bundle)
    assert (caught.value.code, caught.value.value) == ("hash-mismatch", "files.unlisted")


def test_a_bundle_without_onnx_says_how_to_get_it(tmp_path: Path) -> None:
    bundle = small_onnx.bundle(tmp_path)
    for use in (lambda: RUNTIME.load(bundle), lambda: RUNTIME.generate(bundle, "The")):
        with pytest.raises(InputError) as caught:
            use()
        assert caught.value.code == "bundle-without-onnx"
        assert f"quantkit export {bundle.path} --to onnx" in caught.value.remedy


def test_no_tokenizer(own: Path) -> None:
    path = own / "onnx" / "tokenizer.json"
    for change in (path.unlink, lambda: path.write_text("{}"), lambda: path.write_bytes(b"\xff\xfe")):
        change()
        with pytest.raises(InputError) as caught:
            RUNTIME.generate(small_onnx.bundle(own), "The")
        assert caught.value.code == "no-tokenizer"
        assert str(path) in str(caught.value.where)


def test_no_token_is_no_prompt(own: Path) -> None:
    path = own / "onnx" / "tokenizer.json"
    said = json.loads(path.read_text())
    path.write_text(json.dumps(said | {"post_processor": None}))
    with pytest.raises(InputError, match="prompt-empty"):
        RUNTIME.generate(small_onnx.bundle(own), "")


def test_an_encoder_generates_nothing_and_has_no_cache(tmp_path: Path) -> None:
    found = export(tmp_path, "bert")
    bundle = small_onnx.bundle(found.folder, kind="encoder")
    with pytest.raises(InputError, match="not-a-decoder"):
        RUNTIME.generate(bundle, "The")
    model = RUNTIME.load(bundle, threads=1)
    assert not model.decoder
    for ask in (lambda: model.state(1, 4), lambda: model.decode(1, 4)):
        with pytest.raises(InputError, match="not-a-decoder"):
            ask()
    model.prefill(2, 64)()
    with pytest.raises(InputError, match=r"prompt-too-long.*65 tokens"):
        model.prefill(1, 65)


@pytest.mark.parametrize("package", ["onnxruntime", "tokenizers"])
def test_a_missing_package_is_named(small: Small, monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingDependency, match=rf"{package}.*-e '\.\[onnx\]'"):
        RUNTIME.generate(Bundle.load(small.folder), "The")


# --- onnxruntime-genai ------------------------------------------------------------------------------------------------


def test_onnxruntime_genai_generates_the_same_tokens(small: Small, loaded: OnnxModel) -> None:
    import onnxruntime_genai as genai

    model = genai.Model(str(small.onnx))
    prompt = Tokenizer(small.onnx).encode("The state of the")
    parameters = genai.GeneratorParams(model)
    parameters.set_search_options(max_length=len(prompt) + 16, do_sample=False)
    generator = genai.Generator(model, parameters)
    generator.append_tokens(np.array([prompt], np.int32))
    made = []
    while not generator.is_done() and len(made) < 16:
        generator.generate_next_token()
        made.append(int(generator.get_next_tokens()[0]))
    wanted = tokens(loaded, np.array([prompt]), 16)[0].tolist()
    assert made == wanted[: len(made)]
    assert len(made) == 16 or made[-1] == 257
    # and it reads the tokenizer that stands there
    assert genai.Tokenizer(model).encode("The state").tolist()[-9:] == list(
        Tokenizer(small.onnx).encode("The state", special=False)
    )
