"""`nightly.yaml`: which cells it makes, and every way of getting it wrong."""

import hashlib
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
import yaml
from safetensors.torch import save_file

from quantkit.devices.named import NamedDevice
from quantkit.errors import InputError
from quantkit.nightly.config import BaselineChoice, Nightly
from quantkit.nightly.records import NightCell
from quantkit.nightly.run import dry_run

ONNX = "export=[{onnx: {dialect: onnxruntime}}]"
SHIPPED = Path(__file__).parents[2] / "docs" / "nightly" / "nightly.yaml"
SMALL: dict[str, Any] = {
    "models": ["smollm2-135m"],
    "recipes": ["rtn-int4"],
    "targets": ["cpu-x86"],
    "batches": [1, 8],
    "set": [ONNX],
}


def made(**changes: Any) -> Nightly:
    return Nightly.from_dict({**SMALL, **changes})


def named(config: Nightly) -> list[str]:
    return [f"{cell.recipe}:{cell.runtime}:{cell.batch}" for cell in config.cells()]


def test_the_shipped_example_is_whole() -> None:
    config = Nightly.load(SHIPPED)
    assert [cell.model for cell in config.cells()] == ["smollm2-135m"] * 2
    assert config.sha256 == hashlib.sha256(SHIPPED.read_bytes()).hexdigest()
    assert config.at(config.store) == SHIPPED.absolute().parent / "nightly" / "store"


def test_cells_are_the_product_in_the_file_s_order() -> None:
    config = made(recipes=["rtn-int4", "int8-weights"], batches=[8, 1])
    assert named(config) == [
        "rtn-int4:onnxruntime:8",
        "rtn-int4:onnxruntime:1",
        "int8-weights:onnxruntime:8",
        "int8-weights:onnxruntime:1",
    ]
    assert config.cells()[0] == NightCell("smollm2-135m", "rtn-int4", "cpu-x86", "onnxruntime", 8)


def test_a_model_with_an_adapter_is_a_model_of_its_own(tmp_path: Path) -> None:
    for number in range(2):
        (tmp_path / f"lora{number}").mkdir()
        (tmp_path / f"lora{number}" / "adapter_config.json").write_text('{"peft_type": "LORA"}')
        weights = {
            f"base_model.model.model.layers.0.self_attn.q_proj.lora_{part}.weight": torch.ones(2, 2) for part in "AB"
        }
        save_file(weights, tmp_path / f"lora{number}" / "adapter_model.safetensors")
    merged = "smollm2-135m + ./lora0 + ./lora1"
    config = Nightly.from_dict({**SMALL, "models": ["smollm2-135m", merged], "batches": [1]}, folder=tmp_path)
    assert [cell.model for cell in config.cells()] == ["smollm2-135m", merged]
    request = config.request(merged, "rtn-int4", "cpu-x86")
    assert request.model == "smollm2-135m"
    assert request.adapters == (str(tmp_path / "lora0"), str(tmp_path / "lora1"))
    for model, code in (
        ("smollm2-135m + ./lora2", "file-missing"),
        ("smollm2-135m + lora0", "adapter-invalid"),
        ("smollm2 + ./lora0", "unknown-model"),
    ):
        with pytest.raises(InputError, match=code):
            Nightly.from_dict({**SMALL, "models": [model]}, folder=tmp_path)


def test_without_runtimes_a_build_runs_in_the_one_that_computes_in_it() -> None:
    assert named(made(recipes=["rtn-int4"], set=[], batches=[1])) == ["rtn-int4:torch:1"]
    config = made(recipes=["awq-int4"], set=[], runtimes=["torch", "onnxruntime"], batches=[1])
    assert named(config) == ["awq-int4:torch:1", "awq-int4:onnxruntime:1"]
    network = made(models=["fashion-mnist-cnn"], recipes=["int8-network"], set=[], batches=[1])
    assert named(network) == ["int8-network:onnxruntime:1"]


def test_cells_are_left_out_and_added() -> None:
    config = made(
        recipes=["rtn-int4", "int8-weights", "int4-tensorrt"],
        exclude=[{"recipe": "int4-tensorrt"}, {"recipe": "int8-*", "batch": 8}, {"runtime": "onnx*", "batch": [2, 1]}],
        include=[{"model": "smollm2-135m", "recipe": "int4-fast", "target": "cpu-x86", "batches": [16]}],
    )
    assert named(config) == ["rtn-int4:onnxruntime:8", "int4-fast:onnxruntime:16"]


def test_margins_go_by_cell() -> None:
    config = made(gates={"latency": 0.03, "overrides": [{"batch": 8, "latency": 0.1}, {"recipe": "rtn-*", "kl": 0.5}]})
    first, second = (config.gates.of(cell) for cell in config.cells())
    assert (first.latency, second.latency) == (0.03, 0.1)
    assert (first.kl, second.kl) == (0.5, 0.5)
    assert first.accuracy == second.accuracy == 0.01


def test_baselines_go_by_model(tmp_path: Path) -> None:
    (tmp_path / "bundle").mkdir()
    (tmp_path / "bundle" / "manifest.json").write_text("{}")
    (tmp_path / "mine").mkdir()
    data = {
        **SMALL,
        "models": ["smollm2-135m", "./mine"],
        "release": ".",
        "baseline": "release",
        "baselines": {"./mine": {"bundle": "bundle"}},
    }
    config = Nightly.from_dict(data, folder=tmp_path)
    found = {cell.model: config.baseline_of(cell) for cell in config.cells()}
    assert found == {"smollm2-135m": BaselineChoice("release"), "./mine": BaselineChoice("bundle", "bundle")}
    assert config.at("bundle") == tmp_path / "bundle"
    assert config.reference("./mine") == str(tmp_path / "mine")
    assert config.reference("smollm2-135m") == "smollm2-135m"
    assert made().baseline_of(made().cells()[0]).kind == "accepted"


def test_paths_begin_at_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own.yaml").write_text("schema: 1\nsummary: mine\npasses: []\n")
    (tmp_path / "nightly.yaml").write_text(yaml.safe_dump({**SMALL, "recipes": ["./own.yaml"]}))
    monkeypatch.chdir("/")
    config = Nightly.load(tmp_path / "nightly.yaml")
    assert {cell.recipe for cell in config.cells()} == {"./own.yaml"}


def test_a_budget_is_blocks_or_seconds() -> None:
    assert made().budget.most == 40 and made(budget={"rounds": 6}).budget.most == 24
    assert made(budget={"blocks": 50}).budget.most == 50 and made(budget={"seconds": 20}).budget.most is None


@pytest.mark.parametrize(
    ("change", "code", "part"),
    [
        ({"recipies": ["x"]}, "nightly-invalid", "did you mean 'recipes'"),
        ({"gates": {"latencey": 0.1}}, "nightly-invalid", "did you mean 'latency'"),
        ({"gates": {"overrides": [{"batch": 1, "sise": 1}]}}, "nightly-invalid", "did you mean 'size'"),
        ({"gates": {"latency": 0}}, "nightly-invalid", "greater than 0"),
        ({"gates": {"latency": float("nan")}}, "nightly-invalid", "gates.latency"),
        ({"gates": {"alpha": 0.7}}, "nightly-invalid", "less than 0.5"),
        ({"gates": {"overrides": [{"latency": 0.1}]}}, "nightly-invalid", "needs at least one"),
        ({"gates": {"overrides": [{"batch": 3, "latency": 0.1}]}}, "nightly-invalid", "fits no cell"),
        ({"models": []}, "nightly-invalid", "models"),
        ({"models": ["smollm"]}, "unknown-model", "did you mean 'smollm2-135m'"),
        ({"models": ["./nowhere"]}, "file-missing", "nowhere"),
        ({"models": ["a|b"]}, "nightly-invalid", "pattern"),
        ({"recipes": ["rtn-int5"]}, "unknown-recipe", "did you mean 'rtn-int4'"),
        ({"recipes": ["rtn-int4", "rtn-int4"]}, "nightly-invalid", "rtn-int4 is listed twice"),
        ({"recipes": ["int8-network"]}, "model-kind", "is for network"),
        ({"targets": ["cpu-x85"]}, "unknown-target", "did you mean 'cpu-x86'"),
        ({"runtimes": ["onnxrunntime"]}, "target-cannot-run", "did you mean 'onnxruntime'"),
        (
            {"runtimes": ["torch"]},
            "target-cannot-run",
            "exclude: [{recipe: rtn-int4, target: cpu-x86, runtime: torch}]",
        ),
        ({"set": ["export=[{tensorrt: {}}]"]}, "target-cannot-run", "exclude: [{recipe: rtn-int4, target: cpu-x86}]"),
        ({"batches": [0]}, "nightly-invalid", "batches"),
        ({"batches": [1, 1]}, "nightly-invalid", "1 is listed twice"),
        ({"batches": "1,8"}, "nightly-invalid", "batches"),
        ({"exclude": [{}]}, "nightly-invalid", "needs at least one"),
        ({"exclude": [{"recipe": "int8"}]}, "nightly-invalid", "exclude.0: fits no cell"),
        ({"exclude": [{"batch": [1, 8]}]}, "nightly-invalid", "no cell remains"),
        ({"include": [{"model": "smollm2-135m"}]}, "nightly-invalid", "include"),
        (
            {"include": [{"model": "smollm2-135m", "recipe": "rtn-int4", "target": "cpu-x86"}]},
            "nightly-invalid",
            "include.0: adds no cell",
        ),
        ({"set": ["gtpq.x=1"]}, "set-invalid", "gtpq"),
        ({"calibration": "prose"}, "unknown-calibration", "prose-en"),
        ({"baseline": "last-acepted"}, "nightly-invalid", "did you mean 'last-accepted'"),
        ({"baseline": {"bundel": "x"}}, "nightly-invalid", "{bundle: PATH}"),
        ({"baseline": {"bundle": "nowhere"}}, "not-a-bundle", "nowhere holds no manifest.json"),
        ({"baseline": "release"}, "nightly-invalid", "release: PATH"),
        ({"release": "nowhere"}, "not-a-bundle", "release"),
        ({"baselines": {"smollm": "last-accepted"}}, "nightly-invalid", "did you mean 'smollm2-135m'"),
        ({"budget": {"blocks": 10, "seconds": 5}}, "nightly-invalid", "either `blocks` or `seconds`"),
        ({"budget": {"blocks": 4}}, "nightly-invalid", "10 rounds"),
        ({"budget": {"seconds": 0}}, "nightly-invalid", "greater than 0"),
        ({"schema": 2}, "nightly-invalid", "schema"),
    ],
    ids=str,
)
def test_what_is_wrong_is_one_line(change: dict[str, Any], code: str, part: str) -> None:
    with pytest.raises(InputError) as caught:
        made(**change)
    assert caught.value.code == code and part in caught.value.line() and "nightly.yaml" in caught.value.line()
    assert "\n" not in caught.value.line()


def test_a_file_of_code_is_to_be_a_package(tmp_path: Path) -> None:
    """The command has no --allow-code to send anybody to."""
    (tmp_path / "mine.yaml").write_text("schema: 1\nsummary: x\npasses: [./mine.py, rtn]\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"code-not-allowed.*docs/plugins\.md") as caught:
        made(recipes=[str(tmp_path / "mine.yaml")])
    assert "allow-code" not in caught.value.line() and "allow_code" not in caught.value.line()


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", "nightly-invalid"),
        ("[1]", "nightly-invalid"),
        ("models: [a", "yaml-invalid"),
        ("a: 1\na: 2", "yaml-invalid"),
    ],
)
def test_what_is_no_mapping_is_one_line(tmp_path: Path, text: str, code: str) -> None:
    place = tmp_path / "nightly.yaml"
    with pytest.raises(InputError, match=r"\[file-missing\]"):
        Nightly.load(place)
    place.write_text(text)
    with pytest.raises(InputError, match=rf"\[{code}\]"):
        Nightly.load(place)


def test_a_dry_run_says_the_cells_and_no_time() -> None:
    found = dry_run(made(batches=[1, 8]))
    assert [cell["batch"] for cell in found["cells"]] == [1, 8] and len(found["builds"]) == 1
    assert {cell["seconds"] for cell in found["cells"]} == {None} and found["total_seconds"] is None
    assert set(found["cells"][0]) == {
        "cell",
        "build",
        "model",
        "recipe",
        "target",
        "runtime",
        "batch",
        "baseline",
        "seconds",
    }
    assert any("known after the first cell" in note for note in found["notes"])


def test_it_is_read_without_what_is_heavy() -> None:
    program = (
        "import sys\nfrom quantkit.nightly.config import Nightly\nfrom quantkit.nightly import store\n"
        f"Nightly.load({str(SHIPPED)!r})\n"
        "print([each for each in ('torch', 'pyarrow', 'duckdb', 'scipy', 'onnx') if each in sys.modules])"
    )
    done = forked.run("-c", program, light=True, check=True)
    assert done.stdout == "[]\n"


def test_devices_multiply_the_cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    for name in ("pi5", "gpu-box"):
        NamedDevice(name=name, address=f"ssh://{name}").save()
    config = made(on=["here", "pi5", "gpu-box"], batches=[1], exclude=[{"on": "gpu-*"}])
    assert named(config) == ["rtn-int4:onnxruntime:1", "rtn-int4:onnxruntime@pi5:1"]
    here, there = config.cells()
    assert (here.on, here.program, there.on, there.program) == ("", "onnxruntime", "pi5", "onnxruntime")
    assert here.build != there.build
    # a runtime is the same one wherever it is
    assert named(made(on=["pi5"], batches=[1, 8], exclude=[{"runtime": "onnxruntime", "batch": 8}])) == [
        "rtn-int4:onnxruntime@pi5:1"
    ]
    with pytest.raises(InputError, match=r"unknown-device.*no device is called 'pi6'.*did you mean 'pi5'"):
        made(on=["pi6"])
    with pytest.raises(InputError, match="nightly-invalid"):
        made(on=["ssh://pi"])
