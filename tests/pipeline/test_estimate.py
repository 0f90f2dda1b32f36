"""What is expected of a compile before it begins, of models that are open.

What a stage took: its own share of the clock, and none of the next one's.

What a plan says of a bundle's weights is what the bundle holds: real compiles, read back by their manifest.
"""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from pipeline.conftest import recipe

from quantkit.bundle import Bundle
from quantkit.errors import InputError
from quantkit.measurement.size import folder_of, weight_bytes
from quantkit.model.sizes import configs
from quantkit.model.sizes.storage import Storage
from quantkit.pipeline import Request, compile_model
from quantkit.pipeline.blocks.prepared import Prepared, architecture, estimate, prepare, spec
from quantkit.pipeline.blocks.subject import TransformerSubject
from quantkit.pipeline.estimate import demand_disk, line
from quantkit.pipeline.progress import Stages
from quantkit.planning.compiling import described
from quantkit.planning.memory import storage
from quantkit.recipe import Recipe


def prepared(name: str, byte_tokenizer: Any, tmp_path: Path, **changes: Any) -> Prepared:
    folder = tmp_path / name
    model = zoo.mixture(name, vocab_size=258) if name in zoo.MIXTURES else zoo.tiny(name, vocab_size=258)
    model.save_pretrained(folder)  # type: ignore[operator]
    byte_tokenizer.save_pretrained(folder)
    chosen = recipe("checkpoint", **{"on_indivisible": "keep", **changes})
    chosen = chosen.model_copy(
        update={"export": [chosen.export[0].model_copy(update={"options": {"layout": "dense"}})]}
    )
    return prepare(Request.of(str(folder), recipe=chosen, out=tmp_path / "out", speed=False), whole=False)


@pytest.mark.parametrize("name", ["llama-tied", "gpt2", "bert", "deepseek", "gemma2"])
def test_every_linear_counts_once(name: str, byte_tokenizer: Any, tmp_path: Path) -> None:
    """Whether its config is known or not, whether its weights lie [N, K] or [K, N], experts or none."""
    found = prepared(name, byte_tokenizer, tmp_path)
    model = architecture(found)
    shapes = found.layers.inside
    assert sum(matrix.count for matrix in model.inside()) == len(shapes)
    assert sum(matrix.count * matrix.N * matrix.K for matrix in model.inside()) == sum(
        n * k for n, k in shapes.values()
    )
    # whatever the files hold is in it
    assert model.parameters == pytest.approx(found.source.weights.total_bytes() / 4, rel=0.02)
    asked = spec(found)
    stored = {matrix.name: matrix.count for matrix in model.inside() if matrix.name in asked.schemes}
    assert sum(stored.values()) == len(found.layers.schemes)
    assert estimate(found).peak > 1e8


def test_it_is_what_a_plan_says_of_the_config(byte_tokenizer: Any, tmp_path: Path) -> None:
    found = prepared("llama-tied", byte_tokenizer, tmp_path, passes=("gptq",))
    mine, plans = spec(found), described(architecture(found), found.request.recipe)
    assert (mine.sequences, mine.length, mine.schemes) == (plans.sequences, plans.length, plans.schemes)
    assert (mine.scored, mine.scored_length) == (plans.scored, plans.scored_length)


def test_the_line_says_memory_and_disk_and_when_time_is_known(byte_tokenizer: Any, tmp_path: Path) -> None:
    found = prepared("llama-tied", byte_tokenizer, tmp_path)
    said = line(estimate(found))
    assert said.startswith("expected: ") and "of memory" in said and "while at it" in said
    assert said.endswith("its time is known after the first block")


def test_a_disk_that_does_not_hold_it_is_refused(
    byte_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = prepared("llama-tied", byte_tokenizer, tmp_path)
    expected = estimate(found)
    free = [expected.disk.most - 1]
    monkeypatch.setattr(
        "quantkit.pipeline.estimate.shutil.disk_usage", lambda _: type("Usage", (), {"free": free[0]})()
    )
    with pytest.raises(InputError) as refused:
        demand_disk(expected, tmp_path / "out")
    assert refused.value.code == "disk-space"
    free[0] += 2
    demand_disk(expected, tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("gptq-int4", ["scheme.weights.group=64"]),
        ("int8-weights", []),
        pytest.param("gguf-q4_k_m", [], marks=pytest.mark.thorough),
    ],
)
def test_the_work_folder_is_as_large_as_was_forecast(
    name: str, changes: list[str], merging_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Codes of 4 bits take half a byte there, except in formats with offsets."""
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 2, "max_position_embeddings": 64}
    zoo.tiny("llama", vocab_size=len(merging_tokenizer), **sizes).save_pretrained(tmp_path / "m")  # type: ignore[operator]
    merging_tokenizer.save_pretrained(tmp_path / "m")
    monkeypatch.setattr("quantkit.pipeline.blocks.quantize._EVERY", 0.0)
    kept: list[int] = []
    real = TransformerSubject.export

    def export(subject: TransformerSubject) -> None:
        kept.append(sum(path.stat().st_size for path in subject.build.steps.glob("*.safetensors")))
        real(subject)

    monkeypatch.setattr(TransformerSubject, "export", export)
    few = ["calibration.samples=2", "calibration.tokens=32", *changes]
    request = Request.of(str(tmp_path / "m"), recipe=name, out=tmp_path / "out", changes=few, speed=False)
    expected = estimate(prepare(request)).disk.work
    compile_model(request)
    assert kept == [pytest.approx(expected, rel=0.08)]


def test_tables_for_each_block_are_given_beside_hidden_states(byte_tokenizer: Any, tmp_path: Path) -> None:
    from quantkit.pipeline.blocks.prepared import _beside

    found = prepared("llama-tied", byte_tokenizer, tmp_path)
    assert spec(found).beside == 0
    found.stream.skeleton.add_module("tables", torch.nn.Embedding(258, 3 * 96, device="meta"))
    assert _beside(found.stream, 64) == 3 * 96


def test_each_stage_has_its_own_share() -> None:
    stages = Stages("open")
    time.sleep(0.02)
    stages.begin("quantize")
    stages.begin("export")
    opened, quantized, exported = stages.end()
    assert [each.name for each in (opened, quantized, exported)] == ["open", "quantize", "export"]
    assert opened.seconds >= 0.02 > quantized.seconds >= 0
    assert opened.cpu_seconds < 0.02  # asleep
    assert 0 < opened.memory_peak_bytes <= exported.memory_peak_bytes


def test_processes_that_were_waited_for_count() -> None:
    import subprocess
    import sys

    stages = Stages()
    program = "import time\nwhile time.process_time() < 0.1: pass"
    subprocess.run([sys.executable, "-S", "-c", program], check=True)
    (only,) = stages.end()
    assert only.cpu_seconds >= 0.05  # the clock ticks in hundredths


def planned(path: Path, export: str) -> tuple[Storage, int]:
    """What its config and its recipe come to, and what its files are."""
    manifest = Bundle.load(path).manifest
    recipe = Recipe.from_dict({k: v for k, v in manifest.recipe.items() if k != "name"}, name="x")
    return storage(configs.read(str(path)), recipe, export), weight_bytes(manifest.files, folder=folder_of(export))


@pytest.mark.parametrize("which", ["packed", "both"])
def test_the_predicted_bytes_of_a_checkpoint_are_right(made: Any, which: str) -> None:
    found, real = planned(getattr(made, which), "checkpoint")
    assert found.total == pytest.approx(real, rel=0.005)


@pytest.mark.parametrize("which", ["both", "floating"])
def test_a_graph_with_its_data(made: Any, which: str) -> None:
    """All tensors of the graph; the graph itself is a few kB, which are much beside a model this small."""
    import onnx

    path = getattr(made, which)
    found, real = planned(path, "onnx")
    graph = onnx.load(str(path / "onnx" / "model.onnx"))
    tensors = sum(onnx.numpy_helper.to_array(each).nbytes for each in graph.graph.initializer)
    assert found.total - found.files == pytest.approx(tensors, rel=0.005)
    assert found.files == pytest.approx(real - tensors, abs=3_000)
