"""Where a compile computes: chosen before work begins, and the same content with what runs beside it."""

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fake_gpu
import pytest
import torch
import zoo
from safetensors.torch import save_file

import quantkit
from quantkit.bundle import Decision
from quantkit.calibrate.statistics.collected import Doubt
from quantkit.errors import InputError
from quantkit.kernels.cpu import columns
from quantkit.model.device import ComputeDevice, Lane, demand_name, put, spread
from quantkit.model.source.open import open_model
from quantkit.model.source.weights import Weights
from quantkit.model.streaming.stream import CachedAhead, LoadedModel, ReadAhead, StreamedModel
from quantkit.passes import Outcome, Pass
from quantkit.pipeline import Request, compile_model
from quantkit.pipeline.blocks import prepared, quantize
from quantkit.pipeline.blocks.prepared import Prepared, fingerprint
from quantkit.pipeline.blocks.work import PassRun, work
from quantkit.pipeline.compile import opened
from quantkit.planning.compiling import CompileSpec
from quantkit.planning.fit import USABLE, fit
from quantkit.recipe import Recipe

pytestmark = pytest.mark.usefixtures("own_cache")

GIB = 2**30
FEW = ["calibration.samples=3", "calibration.tokens=48", "scheme.weights.group=32", "export=[{checkpoint: {}}]"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, byte_tokenizer: Any) -> Path:
    folder = tmp_path_factory.mktemp("models") / "llama"
    return zoo.save(folder, byte_tokenizer, "llama", vocab_size=len(byte_tokenizer), num_hidden_layers=4)


def sizes(**changes: Any) -> CompileSpec:
    from quantkit.model.sizes import configs
    from quantkit.planning.compiling import described

    found = described(configs.read("llama-3-8b"), Recipe.load("gptq-int4"))
    return replace(found, **changes)


def test_a_large_card_takes_all_at_once_and_a_small_one_what_fits() -> None:
    large, small = fit(sizes(), 140 * GIB), fit(sizes(), 13 * GIB)
    assert (large.chunk, large.resident) == (sizes().sequences, True)
    assert small.fits and small.chunk < large.chunk
    # what is said to be needed is what decides
    assert not fit(sizes(), large.needed / USABLE * 0.999).fits
    assert fit(sizes(), large.needed / USABLE * 1.001).fits
    many = fit(sizes(sequences=4096), 40 * GIB)
    assert many.fits and not many.resident, "hidden states of many sequences lie in memory"


def test_forwards_that_stand_still_are_counted() -> None:
    once, live = fit(sizes(), 140 * GIB), fit(sizes(live=True), 140 * GIB)
    assert (live.chunk, live.resident) == (1, True)
    count, tokens = sizes().sequences, sizes().length
    outside = 2 * 128256 * 4096 + 4096  # embedding, head, the last norm
    assert live.parts["suspended"] == pytest.approx(4 * (outside + count * tokens * (3 * 4096 + tokens)), rel=1e-3)
    solved = [sum(each.parts[name] for name in ("blocks", "solving", "searching", "sequence")) for each in (once, live)]
    assert live.needed >= solved[1] + live.parts["suspended"] + live.parts["hidden"] > solved[0]


def test_the_widest_hessian_decides_of_an_8b() -> None:
    parts = fit(sizes(), 80 * GIB).parts
    assert parts["solving"] == pytest.approx(4 * (8 * 14336**2 + 6 * 4096 * 14336))
    assert parts["blocks"] == pytest.approx(3 * 4 * (4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14336))


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:-1", "CUDA", "0", "cuda:0 ", "mps"])
def test_what_is_no_device_is_refused(name: str) -> None:
    with pytest.raises(InputError, match="unknown-device") as caught:
        Request.of("./nothing", device=name)
    assert "cuda:N" in str(caught.value)


def test_a_processor_has_no_tf32() -> None:
    with pytest.raises(InputError, match="--tf32"):
        Request.of("./nothing", tf32=True)


def test_a_gpu_that_is_not_here(model: Path, tmp_path: Path) -> None:
    assert demand_name("cuda:7") == "cuda:7"
    with pytest.raises(InputError, match="device-absent"):
        quantkit.compile(model, "rtn-int4", changes=FEW[2:], device="cuda:7", out=tmp_path / "out")
    assert not list(tmp_path.glob("out*"))
    taken = opened(Request.of(str(model), recipe="rtn-int4", changes=FEW[2:], device="auto")).decisions
    assert any(each.pass_ == "device" and "sees 0 GPUs" in each.reason for each in taken)


def planted_gpu(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    monkeypatch.setattr(prepared, "present", lambda name: ("cuda:0", "Planted", free))


def test_a_card_that_is_too_small(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planted_gpu(monkeypatch, 1000)
    asked = Request.of(str(model), recipe="gptq-int4", changes=FEW, device="auto")
    chosen = prepared.prepare(asked)
    assert chosen.device == ComputeDevice()
    assert any("on the processor: on Planted" in each.reason for each in chosen.decisions)
    with pytest.raises(InputError, match="device-memory"):
        prepared.prepare(replace(asked, device="cuda"))


def test_a_card_that_is_large_enough(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planted_gpu(monkeypatch, 8 * GIB)
    asked = Request.of(str(model), recipe="gptq-int4", changes=FEW, device="cuda", tf32=True)
    chosen = prepared.prepare(asked)
    assert (chosen.device.name, chosen.device.chunk, chosen.device.resident) == ("cuda:0", 3, True)
    assert chosen.stream.device == torch.device("cuda:0")
    monkeypatch.setattr(columns, "ready", lambda: None)
    assert fingerprint(chosen)["solvers"] == "torch", "codes that are as good may differ from those of the loops in C"
    keys = fingerprint(chosen)
    assert (keys["device"], keys["products"]) == ("Planted", "tf32"), "another card, or other products: another build"
    said = next(each for each in chosen.decisions if each.pass_ == "device")
    assert "3 sequences at once" in said.reason and "tf32" in said.reason


def test_graphs_stay_on_the_processor(tmp_path: Path) -> None:
    import networks

    networks.write(tmp_path / "model.onnx")
    networks.image_set(tmp_path / "images.npz", 60)
    with pytest.raises(InputError, match="device-unsupported"):
        quantkit.compile(tmp_path / "model.onnx", "int8-network", calibration=tmp_path / "images.npz", device="cuda")


def test_products_are_float32_unless_tf32_is_asked_for() -> None:
    before = torch.get_float32_matmul_precision()
    with ComputeDevice("cpu:0", tf32=True).arithmetic():
        assert torch.get_float32_matmul_precision() == "high"
        with ComputeDevice("cpu:0", tf32=True).strict.arithmetic():
            assert torch.get_float32_matmul_precision() == "highest"
            assert not torch.backends.cudnn.allow_tf32
    assert torch.get_float32_matmul_precision() == before


# --- what runs beside --------------------------------------------------------------------------------------------


class Slow:
    """A stream that notes what is loaded, and fails at one block."""

    def __init__(self, fails: int = -1) -> None:
        self.real, self.loaded, self.fails = LoadedModel(zoo.tiny("llama")), list[int](), fails
        self.block_names, self.visits = self.real.block_names, self.real.visits

    def load(self, index: int) -> torch.nn.Module:
        self.loaded.append(index)
        if index == self.fails:
            raise InputError("planted", where=str(index))
        return self.real.load(index)

    def begin(self, ids: torch.Tensor, chunk: int) -> Any:
        return self.real.begin(ids, chunk)


def test_the_next_block_is_on_its_way() -> None:
    stream = Slow()
    with Lane(torch.device("cpu")) as lane:
        ahead = ReadAhead(stream, lane)
        count = len(ahead.block_names)
        assert count > 2
        for index in range(count):
            assert ahead.load(index) is stream.real.load(index)
            if index == 1:  # it is done again: what comes after it is not read anew
                assert ahead.load(index) is stream.real.load(index)
        assert ahead.load(0) is stream.real.load(0), "a block may be asked for again"
    assert stream.loaded[:4] == [0, 1, 2, 1]
    assert stream.loaded.count(2) == 1


def test_what_fails_on_its_way_is_said_when_it_is_asked_for() -> None:
    with Lane(torch.device("cpu")) as lane:
        ahead = ReadAhead(Slow(fails=1), lane)
        ahead.load(0)
        with pytest.raises(InputError, match="planted"):
            ahead.load(1)


def _bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="counts what a process reads, on Linux")
def test_on_a_processor_the_next_block_is_read_from_the_disk_but_not_held(tmp_path: Path) -> None:
    zoo.tiny("llama", num_hidden_layers=3, hidden_size=256, intermediate_size=1024).save_pretrained(tmp_path)  # type: ignore[operator]
    stream = StreamedModel(open_model(str(tmp_path)))
    block = 4 * sum(value.numel() for value in stream.load(0).parameters())
    for index, blocks in ((0, 2), (2, 1)):
        before = _bytes_read()
        with Lane(torch.device("cpu")) as lane:
            CachedAhead(stream, lane).load(index)
        assert 0 <= _bytes_read() - before - blocks * block < block / 10


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compiles that read ahead and write behind, as on a GPU, with the processor for the device."""

    def chosen(of: Prepared) -> tuple[ComputeDevice, str]:
        return ComputeDevice("cpu:0", "a processor", chunk=3), "planted"

    monkeypatch.setattr(prepared, "chosen_device", chosen)
    return None


def compiled(model: Path, out: Path, **settings: Any) -> Any:
    request = Request.of(str(model), recipe="gptq-int4", changes=FEW, out=out, speed=False, **settings)
    return compile_model(request).bundle.manifest


@pytest.mark.usefixtures("beside", "one_thread")
def test_written_behind_and_resumed_it_has_the_same_content(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = compiled(model, tmp_path / "plain")
    assert "compiled_on" not in plain.device
    whole = compiled(model, tmp_path / "whole", device="auto")
    assert whole.content_sha256 == plain.content_sha256
    assert whole.device["compiled_on"] == {
        "device": "a processor",
        "products": "float32",
        "sequences_at_once": 3,
    }
    assert any(isinstance(each, Decision) and each.reason == "planted" for each in whole.decisions)
    # killed behind the third block, with the hidden states of none, or of the first alone
    for every in (3600.0, 0.0):
        out = tmp_path / f"killed-{every:g}"
        monkeypatch.setattr(quantize, "_EVERY", every)
        commit, done = quantize._commit, list[int]()

        def dies(*args: Any, commit: Any = commit, done: list[int] = done) -> None:
            if len(done) == 3:
                raise KeyboardInterrupt
            commit(*args)
            done.append(args[2].block.index)
            monkeypatch.setattr(quantize, "_EVERY", 3600.0)

        monkeypatch.setattr(quantize, "_commit", dies)
        with pytest.raises((quantkit.QuantkitError, KeyboardInterrupt)):
            compiled(model, out, device="auto")
        monkeypatch.setattr(quantize, "_commit", commit)
        assert done == [0, 1, 2]
        assert compiled(model, out, device="auto", resume=True).content_sha256 == plain.content_sha256


# --- what is looked at once a block ------------------------------------------------------------------------------


class Doubtful(Pass):
    """Has no factor until its damping was raised so often."""

    name = "doubtful"

    def __init__(self, needed: int, again: bool = True) -> None:
        self.needed, self.again, self.seen = needed, again, list[int]()

    def run(self, block: Any, stats: Any, settings: Any) -> Outcome:
        raised = stats.raised.get("first", 0)
        self.seen.append(raised)
        missing = torch.tensor([torch.nan if raised < self.needed else 1.0])
        stats.doubts.append(Doubt(missing, "first", self.again))
        return Outcome(False)


def worked(step: Pass) -> int:
    stream = LoadedModel(zoo.tiny("llama"))
    ids = zoo.ids(2, 8)
    found = work(stream, [PassRun(step, None)], {}, None, probe_ids=ids, widest=64, dtype=torch.float32)
    return len(list(found))


def test_a_block_is_done_again_with_more_damping() -> None:
    step = Doubtful(needed=2)
    blocks = worked(step)
    assert step.seen == [0, 1, 2] * blocks


def test_in_the_end_it_is_given_up() -> None:
    with pytest.raises(InputError, match="hessian-not-positive"):
        worked(Doubtful(needed=100))
    with pytest.raises(InputError, match="activations-nonfinite"):
        worked(Doubtful(needed=100, again=False))


def test_a_large_tensor_goes_to_a_gpu_in_pieces_and_a_small_one_at_once() -> None:
    with fake_gpu.gpu() as watch:
        large, small = torch.empty(3000, 5000, dtype=torch.bfloat16), torch.empty(7, 3)
        found = put(large, fake_gpu.CUDA)
        assert (found.device, found.shape, found.dtype) == (fake_gpu.CUDA, large.shape, large.dtype)
        assert watch.operators["copy_"] == 2, "30 MB, by 16"
        assert put(small, fake_gpu.CUDA).device == fake_gpu.CUDA
        assert watch.operators["copy_"] == 2
    here = torch.ones(3)
    assert put(here, torch.device("cpu")) is here


def test_nan_is_found_on_the_device_that_a_weight_is_read_onto(tmp_path: Path) -> None:
    save_file({"a": torch.tensor([1.0, float("nan")]), "b": torch.ones(2)}, tmp_path / "model.safetensors")
    weights = Weights.open(tmp_path)
    assert weights.read("b", torch.device("cpu")).tolist() == [1.0, 1.0]
    with pytest.raises(InputError, match="1 NaN and 0 infinite of 2 values"):
        weights.read("a", torch.device("cpu"))


def test_the_first_part_that_fails_is_named_and_nothing_begins_after_it() -> None:
    begun: list[int] = []

    def work(number: int) -> bool:
        begun.append(number)
        time.sleep(0.01)
        if number in (1, 2):
            raise ValueError(number)
        return torch.is_grad_enabled()

    with torch.no_grad():
        for threads in (2, 3):
            begun.clear()
            with pytest.raises(ValueError, match="1"):
                spread(work, range(20), threads)
            assert len(begun) < 9
        assert spread(lambda number: (number, torch.is_grad_enabled()), range(9), 3) == [(n, False) for n in range(9)]
