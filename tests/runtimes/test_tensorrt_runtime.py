"""Engines: which are loaded, what is refused before anything runs, and prompts and steps through one, against
transformers. The library is a fake whose engines ONNX Runtime runs (`fake_tensorrt`)."""

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import fake_tensorrt
import numpy as np
import pytest
import small_onnx
import torch
from fake_tensorrt import GPU
from small_onnx import LAYERS, TEXT, Small, expected, export, relative

from quantkit.bundle import Bundle
from quantkit.errors import InputError
from quantkit.exporters import load_exporter
from quantkit.runtimes.tensorrt import TensorrtRuntime
from quantkit.runtimes.tensorrt.decode import EngineModel
from quantkit.runtimes.tensorrt.library import Library
from quantkit.scheme import WeightScheme
from quantkit.target import Profile

pytestmark = pytest.mark.usefixtures("one_thread")

# of float16, as `export._check_network` has it
LIMIT = 2.0**-6
DECODE = Profile(name="decode", batch=(1, 1, 2), length=(1, 1, 1), context=(1, 16, 60))
PREFILL = Profile(name="prefill", batch=(1, 1, 2), length=(2, 8, 16), context=(0, 0, 0))
PROFILES = [DECODE, PREFILL]


def runtime(library: Library | None = None, gpus: Any = (GPU,), why: str = "") -> TensorrtRuntime:
    return TensorrtRuntime(
        "tensorrt_rtx", library=library or fake_tensorrt.library(), gpus=lambda: (list(gpus), why), device="cpu"
    )


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory, byte_tokenizer: Any) -> Small:
    """A tiny llama in int4 with an engine for SM 8.9; its folder is a bundle."""
    made = export(
        tmp_path_factory.mktemp("engine"),
        "llama",
        WeightScheme(format="int4", granularity="group", group=32, symmetric=True),
        tokenizer=byte_tokenizer,
        changes=TEXT,
        exporter=load_exporter("tensorrt"),
        engine=False,
        profiles=[each.model_dump() for each in PROFILES],
    )
    fake_tensorrt.engine(made.folder / "engine", PROFILES, layers=[{"Name": "first"}, {"Name": "second"}])
    small_onnx.bundle(made.folder)
    return made


@pytest.fixture(scope="module")
def loaded(small: Small) -> EngineModel:
    return runtime().load(Bundle.load(small.folder))


@pytest.fixture
def own(small: Small, tmp_path: Path) -> Path:
    """A copy of the bundle, to be spoilt."""
    return Path(shutil.copytree(small.folder, tmp_path / "b"))


def tokens(rows: int, count: int) -> Any:
    return torch.randint(0, 258, (rows, count), generator=torch.Generator().manual_seed(rows + count))


# --- what is refused, before anything is loaded -----------------------------------------------------------------------


def test_a_tampered_engine_is_refused(own: Path) -> None:
    path = own / "engine" / "sm89.engine"
    path.write_bytes(path.read_bytes().replace(b"profiles", b"PROFILES"))
    with pytest.raises(InputError, match="hash-mismatch") as caught:
        runtime().load(Bundle.load(own))
    assert "sm89.engine" in str(caught.value.where)


def test_a_truncated_engine_is_refused(own: Path) -> None:
    path = own / "engine" / "sm89.engine"
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(InputError, match="hash-mismatch"):
        runtime().load(Bundle.load(own))


def test_a_changed_description_is_refused(own: Path) -> None:
    path = own / "engine" / "sm89.json"
    path.write_text(path.read_text().replace("8.9", "8.6"))
    with pytest.raises(InputError, match="hash-mismatch"):
        runtime(gpus=[{**GPU, "sm": "8.6"}]).load(Bundle.load(own))


def test_an_engine_that_no_manifest_lists_is_refused(own: Path) -> None:
    shutil.copy(own / "engine" / "sm89.engine", own / "engine" / "sm90.engine")
    with pytest.raises(InputError, match="hash-mismatch") as caught:
        runtime().load(Bundle.load(own))
    assert "sm90.engine" in str(caught.value.where)


def test_hashes_come_before_everything_else(own: Path) -> None:
    (own / "engine" / "sm89.engine").write_bytes(b"x")
    with pytest.raises(InputError, match="hash-mismatch"):
        runtime(gpus=[], why="no driver").load(Bundle.load(own))


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What the library was given to open."""
    found: list[bytes] = []
    opens = fake_tensorrt._Runtime.deserialize_cuda_engine

    def deserialize(self: Any, data: bytes) -> Any:
        found.append(data)
        return opens(self, data)

    monkeypatch.setattr(fake_tensorrt._Runtime, "deserialize_cuda_engine", deserialize)
    return found


@pytest.mark.parametrize("name", ["sm89.engine", "sm89.json"])
def test_a_file_that_changes_after_it_was_verified_is_not_used(
    own: Path, name: str, given: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    intact = Bundle.demand_intact

    def then_changed(self: Bundle, *entries: Any) -> None:
        intact(self, *entries)
        path = own / "engine" / name
        path.write_bytes(path.read_bytes() + b" ")

    monkeypatch.setattr(Bundle, "demand_intact", then_changed)
    with pytest.raises(InputError, match="hash-mismatch") as caught:
        runtime().load(Bundle.load(own))
    assert name in str(caught.value.where)
    assert given == []


def test_without_a_manifest_only_what_the_build_gave_out_is_opened(own: Path, given: list[bytes]) -> None:
    built = {path: entry.sha256 for entry in Bundle.load(own).manifest.files if (path := entry.path).startswith("eng")}
    (own / "manifest.json").unlink()
    with pytest.raises(InputError, match="not-a-bundle"):
        runtime().open(own)
    with pytest.raises(InputError, match="hash-mismatch"):
        runtime().open(own, built={**built, "engine/sm89.engine": "0" * 64})
    with pytest.raises(InputError, match="bundle-without-engine"):
        runtime().open(own, built={})
    assert given == []
    assert runtime().open(own, built=built).decoder
    assert given == [(own / "engine" / "sm89.engine").read_bytes()]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"gpus": [{**GPU, "sm": "8.6", "name": "NVIDIA A10"}]}, "SM 8.9"),
        ({"library": fake_tensorrt.library(version="1.8.0.1")}, "1.7.1.116, another version"),
        ({"library": fake_tensorrt.library("tensorrt")}, "tensorrt_rtx, another library"),
    ],
)
def test_a_foreign_engine_names_the_command_that_rebuilds_it(small: Small, change: Any, words: str) -> None:
    with pytest.raises(InputError, match="engine-foreign") as caught:
        runtime(**change).load(Bundle.load(small.folder))
    line = caught.value.line()
    assert words in line
    assert f"quantkit export {small.folder} --to tensorrt" in line
    assert "\n" not in line


def test_an_engine_of_another_card_of_the_same_kind(small: Small, tmp_path: Path) -> None:
    """TensorRT tunes for one card; TensorRT-RTX compiles for the kind."""
    folder = Path(shutil.copytree(small.folder, tmp_path / "b"))
    fake_tensorrt.engine(folder / "engine", PROFILES, library="tensorrt", gpu="NVIDIA L4")
    bundle = small_onnx.bundle(folder)
    with pytest.raises(InputError, match="NVIDIA L4, another GPU") as caught:
        runtime(fake_tensorrt.library("tensorrt")).load(bundle)
    assert "--set library=tensorrt" in caught.value.line()
    fake_tensorrt.engine(
        folder / "engine", PROFILES, library="tensorrt", gpu="NVIDIA L4", options={"hardware_compatible": True}
    )
    assert runtime(fake_tensorrt.library("tensorrt")).load(small_onnx.bundle(folder)).decoder


@pytest.mark.parametrize(
    ("described", "here", "ok"),
    [
        ({"options": {"version_compatible": True}}, {"version": "10.14.0"}, True),
        ({"options": {"version_compatible": True}}, {"version": "10.9.0"}, False),
        ({"options": {"hardware_compatible": True}}, {"sm": "8.6"}, True),
        ({"options": {"hardware_compatible": True}}, {"sm": "7.5"}, False),
        ({"options": {"hardware_compatible": True}, "library": "tensorrt_rtx"}, {"sm": "8.6"}, False),
    ],
)
def test_what_is_compatible_is_so_with_what_came_later(described: Any, here: dict[str, str], ok: bool) -> None:
    from quantkit.runtimes.tensorrt.file import Description, choose

    record = Description(**{"library": "tensorrt", "version": "10.13.0", "sm": ["8.9"], **described})
    library = fake_tensorrt.library(record.library, version=here.get("version", "10.13.0"))  # type: ignore[arg-type]
    engine, gpu = Path("b/engine/sm89.engine"), {**GPU, "sm": here.get("sm", "8.9")}
    if ok:
        assert choose(Path("b"), {engine: record}, library, gpu) == engine
        return
    with pytest.raises(InputError, match="engine-foreign"):
        choose(Path("b"), {engine: record}, library, gpu)


@pytest.mark.parametrize(("driver", "words"), [("570.86", "fastest there"), ("580.95", "which is older"), ("575", "")])
def test_another_driver_is_said(own: Path, driver: str, words: str) -> None:
    fake_tensorrt.engine(own / "engine", PROFILES, library="tensorrt", gpu=GPU["name"], driver=driver)
    bundle, here = small_onnx.bundle(own), runtime(fake_tensorrt.library("tensorrt"))
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        made = here.generate(bundle, "The state", new_tokens=1)
    said = [str(each.message) for each in heard]
    assert said == made.get("notes", [])
    assert len(said) == bool(words)
    if words:
        assert words in said[0] and f"quantkit export {own} --to tensorrt --set library=tensorrt" in said[0]
        # where the library refuses it, the driver may be why
        (own / "engine" / "sm89.engine").write_bytes(b"{")
        with pytest.raises(InputError, match=rf"magicTag.*under driver {driver}"):
            here.load(small_onnx.bundle(own))


def test_a_driver_that_is_too_old_can_be_updated(own: Path) -> None:
    (own / "engine" / "sm89.engine").write_bytes(b"old")
    with pytest.raises(InputError, match="old cuda driver") as caught:
        runtime().load(small_onnx.bundle(own))
    assert str(caught.value.remedy).startswith("update the driver, or build it again")


@pytest.mark.parametrize(("data", "words"), [(b"foreign", "unsupported cc"), (b"{", "magicTag")])
def test_what_the_library_cannot_open_is_one_line(own: Path, data: bytes, words: str) -> None:
    (own / "engine" / "sm89.engine").write_bytes(data)
    with pytest.raises(InputError, match="engine-unreadable") as caught:
        runtime().load(small_onnx.bundle(own))
    assert words in str(caught.value.value)
    assert "--to tensorrt" in str(caught.value.remedy)


def test_without_a_gpu_it_says_what_runs_instead(small: Small) -> None:
    here = runtime(gpus=[], why="no NVIDIA driver")
    with pytest.raises(InputError, match="gpu-absent") as caught:
        here.load(Bundle.load(small.folder))
    assert "no NVIDIA driver" in str(caught.value.value)
    assert "no NVIDIA driver" in str(here.why_not_here())


def test_a_gpu_that_the_library_does_not_list(small: Small) -> None:
    why = runtime(gpus=[{**GPU, "sm": "9.0", "name": "NVIDIA H200"}]).why_not_here()
    assert why is not None and "8.6, 8.9" in why and "9.0" in why
    assert runtime().why_not_here(small.folder) is None
    assert "engine-foreign" in str(runtime(gpus=[{**GPU, "sm": "8.6"}]).why_not_here(small.folder))


def test_a_bundle_without_an_engine(small: Small, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(small.folder, tmp_path / "b"))
    (folder / "engine" / "sm89.engine").unlink()
    with pytest.raises(InputError, match="bundle-without-engine"):
        runtime().load(small_onnx.bundle(folder))


# --- what it computes -------------------------------------------------------------------------------------------------


def test_a_prompt_longer_than_a_profile_goes_in_parts(small: Small, loaded: EngineModel) -> None:
    """37 tokens: two prompts of 16, one of 5, all into one cache."""
    ids = tokens(2, 37)
    state = loaded.state(2, 40)
    found = loaded.run(state, ids.numpy())
    assert relative(found, expected(small.model, ids)) < LIMIT
    assert state.length == 37
    again = loaded.run(loaded.state(2, 40), ids.numpy(), keep=7)
    np.testing.assert_array_equal(again, found[:, -7:])


def test_steps_go_on_where_the_prompt_ended(small: Small, loaded: EngineModel) -> None:
    ids = tokens(2, 20)
    state = loaded.state(2, 20)
    parts = [loaded.run(state, ids[:, :12].numpy())]
    parts += [loaded.run(state, ids[:, [at]].numpy()) for at in range(12, 20)]
    assert relative(np.concatenate(parts, axis=1), expected(small.model, ids)) < LIMIT
    # one buffer a layer: what an engine is given stays where it is
    assert (
        state.step is not None and state.step._inputs["past_key_values.0.key"] is state.caches["past_key_values.0.key"]
    )


def test_rows_are_padded_on_the_left(small: Small, loaded: EngineModel) -> None:
    ids, mask = tokens(2, 14), np.ones((2, 14), np.int64)
    mask[1, :4] = 0
    state = loaded.state(2, 16)
    first = loaded.run(state, ids[:, :13].numpy(), mask[:, :13])
    last = loaded.run(state, ids[:, 13:].numpy(), mask[:, 13:])
    found = np.concatenate([first, last], axis=1)
    assert relative(found[:1], expected(small.model, ids[:1])) < LIMIT
    assert relative(found[1:, 4:], expected(small.model, ids[1:, 4:])) < LIMIT


def test_two_states_do_not_meet(small: Small, loaded: EngineModel) -> None:
    ids = tokens(1, 10)
    one, two = loaded.state(1, 10), loaded.state(1, 10)
    loaded.run(one, ids[:, :8].numpy())
    loaded.run(two, (ids[:, :8].numpy() + 1) % 258)
    for state in (one, two):
        loaded.run(state, ids[:, [8]].numpy())
    found = loaded.run(one, ids[:, [9]].numpy())
    assert relative(found, expected(small.model, ids)[:, -1:]) < LIMIT


def test_a_prompt_or_batch_beyond_the_profiles_is_refused(loaded: EngineModel) -> None:
    with pytest.raises(InputError, match="prompt-too-long"):
        loaded.state(1, loaded.capacity + 1)
    with pytest.raises(InputError, match="shape-unsupported") as caught:
        loaded.state(5, 8)
    assert "batch 1 to 2 with 1 to 1 tokens" in str(caught.value.rule)
    state = loaded.state(1, loaded.capacity)
    with pytest.raises(InputError, match="prompt-too-long"):
        loaded.run(state, np.zeros((1, loaded.capacity + 1), np.int64))


def test_text_comes_out(small: Small) -> None:
    made = runtime().generate(Bundle.load(small.folder), "The state", new_tokens=4)
    assert 0 < made["tokens"] <= 4
    assert made["first_token_s"] >= 0


def test_latency_repeats_one_step(loaded: EngineModel) -> None:
    """The same step over and over: the cache does not grow, and what it timed is what `measure.latency` asks for."""
    step = loaded.decode(2, 30)
    assert step() is None and step() is None
    assert loaded.prefill(1, 16)() is None
    with pytest.raises(InputError, match="prompt-too-long"):
        loaded.prefill(1, 17)


def test_compiled_kernels_outlive_the_process(small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path))
    for expected_bytes in (b"kernels", b"kernelskernels"):
        runtime().load(Bundle.load(small.folder)).prefill(1, 8)
        (kept,) = tmp_path.rglob("tensorrt_rtx-*.cache")
        assert kept.read_bytes() == expected_bytes


def test_layers_are_timed_apart(loaded: EngineModel) -> None:
    taken = loaded.layer_times(1, 20, runs=4)
    assert {name: len(times) for name, times in taken.items()} == {"first": 4, "second": 4}
    assert taken["second"][0] == pytest.approx(2e-4)


def test_an_engine_of_a_graph_is_not_for_tokens(tmp_path: Path) -> None:
    import onnx
    from onnx import TensorProto, helper

    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 3]) for name in ("images", "classes")]
    graph = helper.make_graph([helper.make_node("Relu", ["images"], ["classes"])], "g", ends[:1], ends[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    (tmp_path / "engine").mkdir()
    onnx.save(model, tmp_path / "engine" / "network.onnx")
    fake_tensorrt.engine(tmp_path / "engine", PROFILES)
    with pytest.raises(InputError, match="engine-of-graph") as caught:
        runtime().load(small_onnx.bundle(tmp_path, "network"))
    assert "an engine of images" in caught.value.line()


def test_settings_are_plain(loaded: EngineModel) -> None:
    assert json.loads(json.dumps(loaded.settings))["library"] == "tensorrt_rtx 1.7.1.116"


def test_an_encoder_encodes(tmp_path: Path) -> None:
    exporter = load_exporter("tensorrt")
    made = export(tmp_path, "bert", changes=LAYERS, exporter=exporter, engine=False, profiles=[])
    profile = Profile(name="any", batch=(1, 2, 4), length=(1, 8, 32), context=(0, 0, 0))
    fake_tensorrt.engine(made.folder / "engine", [profile])
    model = runtime().load(small_onnx.bundle(made.folder, "encoder"))
    assert not model.decoder
    ids = torch.arange(12).reshape(2, 6)
    assert relative(model.encode(ids.numpy()), expected(made.model, ids)) < LIMIT
    with pytest.raises(InputError, match="not-a-decoder"):
        model.state(1, 4)
    assert model.prefill(2, 8)() is None
