"""Targets: what ships is valid and sourced; what is wrong is one clear line; measured figures come from the cache."""

import copy
import functools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from quantkit import content
from quantkit.errors import InputError
from quantkit.scheme import ActivationScheme, WeightScheme
from quantkit.target import Stored, Target, measured_path, read_measured, write_measured

pytestmark = pytest.mark.usefixtures("own_cache")

SHIPPED = content.names("export")


@functools.cache
def loaded(name: str) -> Target:
    """One that no doctor has measured anything of."""
    return Target.from_dict(shipped(name), name=name)


def shipped(name: str) -> dict[str, Any]:
    return copy.deepcopy(yaml.safe_load(content.find("export", name).read_text(encoding="utf-8")))


def test_no_shipped_target_is_lost() -> None:
    volta_to_hopper = ["v100", "t4", "a100", "a10", "rtx-3090", "l4", "rtx-4090", "h100", "h200"]
    blackwell, jetson = ["b200", "rtx-5090"], ["jetson-orin", "jetson-thor"]
    processors = ["apple-m3", "cpu-arm", "cpu-x86", "cpu-x86-avx2", "cpu-x86-vnni", "cpu-x86-amx"]
    assert set(SHIPPED) == {*volta_to_hopper, *blackwell, *jetson, *processors}


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_target_is_whole(name: str) -> None:
    target = Target.load(name)
    assert target.name == name
    assert set(target.formats) >= {"float32", "float16", "bfloat16", "int8", "int4", "fp8_e4m3", "nf4"}
    for format_, cells in target.formats.items():
        if format_ in {"float32", "int8", "int4"}:
            assert set(target.runtimes) <= set(cells), f"{format_} says nothing of a runtime of the target"
    stated = [figure for figure in target.figures().values() if figure.state == "stated"]
    assert all(figure.number for figure in stated)
    for compute, figure in target.compute.items():  # nothing with sparsity or in TFLOP slipped in
        assert figure.number is None or 1e12 < figure.number < (1e16 if compute == "fp4" else 5e15), compute
    assert (target.power is not None) == (target.kind == "gpu"), "every card's board power is in its datasheet"
    assert "4.0e9" not in json.dumps(target.as_dict()), "YAML read a number as text"


def test_a_card_holds_what_cuda_reports_not_what_it_is_sold_as() -> None:
    held = {name: Target.load(name).memory.capacity.number for name in ("h100", "a100", "t4")}
    assert held == {
        name: pytest.approx(gib * 2**30, rel=1e-3) for name, gib in (("h100", 79.11), ("a100", 79.25), ("t4", 14.56))
    }


@pytest.mark.parametrize("name", SHIPPED)
def test_as_dict_reads_back(name: str) -> None:
    target = Target.load(name)
    data = target.as_dict()
    assert next(iter(data)) == "schema"
    assert Target.from_dict({key: value for key, value in data.items() if key != "name"}, name=name) == target


def test_l4_is_the_contract_of_the_design() -> None:
    target = Target.load("l4")
    assert target.runtimes[0] == "tensorrt_rtx"
    assert target.arch.sm == "8.9"
    assert (target.memory.capacity.number, target.memory.read_bandwidth.number) == (24e9, 3e11)
    assert target.build["tensorrt_rtx"] == {"workspace": 4.0e9, "optimization_level": 3}
    assert target.batches == [1, 2, 4, 8, 16, 32, 64]
    assert target.supports("int4") == target.supports("int4", "tensorrt_rtx")
    assert target.supports("int4").symmetric_only
    assert target.supports("int4", "onnxruntime").state == "absent"
    assert target.supports("int3").state == "absent"
    assert target.power is not None
    assert (target.power.number, target.figures()["power"].unit) == (72, "W")


@pytest.mark.parametrize("name", SHIPPED)
def test_every_cell_says_how_it_is_known(name: str) -> None:
    vague = {"", "documentation", "source", "todo", "?"}
    for format_, cells in loaded(name).formats.items():
        for runtime, cell in cells.items():
            for part in ("weights", "inputs", "kv_cache", "experts"):
                use = cell.of(part)
                assert use is None or use.source.strip().lower() not in vague, (format_, runtime, part)
            if cell.state == "absent":  # what does not read the weights reads no inputs beside them
                assert cell.inputs is None or cell.inputs.state == "absent", (format_, runtime)


@pytest.mark.parametrize("name", SHIPPED)
def test_cells_of_what_changes_with_its_version_name_it(name: str) -> None:
    known = {"vllm": r"vLLM \d+\.\d+|vLLM documentation|vllm-bnb-plugin \d", "llama_cpp": "llama.cpp [0-9a-f]{9}"}
    for format_, cells in loaded(name).formats.items():
        for runtime in set(known) & set(cells):
            for use in (cells[runtime], *(cells[runtime].of(part) for part in ("inputs", "kv_cache", "experts"))):
                assert use is None or re.search(known[runtime], use.source), (format_, runtime, use.source)


def test_cards_of_one_compute_capability_agree() -> None:
    by_sm: dict[str, list[Target]] = {}
    for name in SHIPPED:
        if (sm := loaded(name).arch.sm) is not None:
            by_sm.setdefault(sm, []).append(loaded(name))
    assert [sm for sm, cards in sorted(by_sm.items()) if len(cards) > 1] == ["8.6", "8.9", "9.0"]
    for first, *others in by_sm.values():
        for other in others:
            assert other.formats == first.formats, (first.name, other.name)


def test_processors_differ_only_where_their_instructions_do() -> None:
    plain, vnni = loaded("cpu-x86"), loaded("cpu-x86-vnni")
    for format_, cells in plain.formats.items():
        for runtime, cell in cells.items():
            assert vnni.supports(format_, runtime).state == cell.state
    assert loaded("cpu-x86-amx").supports("bfloat16", "torch").state == "native"
    assert loaded("cpu-x86-avx2").supports("bfloat16", "torch").state == "emulated"


@pytest.mark.parametrize(
    ("change", "place", "says"),
    [
        ({"sumary": "x"}, "sumary", "did you mean 'summary'"),
        ({"memory": {"bandwidth": {}}}, "memory.bandwidth", "read_bandwidth"),
        ({"memory": {"read_bandwidth": {"unit": "GB/s"}}}, "memory.read_bandwidth.unit", "'B/s'"),
        ({"memory": {"read_bandwidth": {"unit": "B"}}}, "memory", "read_bandwidth is in B/s, not B"),
        ({"memory": {"capacity": {"value": "automatic"}}}, "memory.capacity.value", "automatic"),
        ({"memory": {"capacity": {"value": -1.0}}}, "memory.capacity.value", "greater than 0"),
        ({"memory": {"capacity": {"value": float("nan")}}}, "memory.capacity.value", "nan"),
        ({"power": {"unit": "B"}}, "", "power is in W, not B"),
        ({"formats": {"int8": {"torch": {"inputs": {"state": "fast"}}}}}, "torch.inputs.state", "'native'"),
        ({"memory": {"capacity": {"source": ""}}}, "memory.capacity.source", "at least 1 character"),
        ({"compute": {"int8": {"unit": "flop/s"}}}, "compute", "int8 is in op/s, not flop/s"),
        ({"compute": {"fp16": {"sauce": "x"}}}, "compute.fp16.sauce", "did you mean 'source'"),
        ({"compute": {"float16": {}}}, "compute.float16", "fp16"),
        ({"formats": {"in4": {}}}, "formats", "did you mean 'int4'"),
        ({"formats": {"int4": {"tensor_rt": {"state": "native", "source": "x"}}}}, "formats", "'tensorrt"),
        ({"formats": {"int4": {"torch": {"state": "fast"}}}}, "formats.int4.torch.state", "'native'"),
        ({"formats": {"int4": {"torch": {"symetric_only": True}}}}, "symetric_only", "did you mean 'symmetric_only'"),
        ({"runtimes": ["torhc"]}, "runtimes", "did you mean 'torch'"),
        ({"runtimes": ["torch", "torch"]}, "runtimes", "twice"),
        ({"runtimes": []}, "runtimes", "at least 1"),
        ({"build": {"torhc": {}}}, "build", "did you mean 'torch'"),
        ({"baseline": "fp64"}, "baseline", "'fp32'"),
        ({"batches": [8, 1]}, "batches", "rise"),
        ({"kind": "cpu"}, "", "`isa` goes with `kind: cpu`"),
        ({"arch": {"sm": None}}, "", "`sm` goes with `vendor: nvidia`"),
        ({"arch": {"sm": "sm_89"}}, "arch.sm", "pattern"),
        ({"schema": 2}, "schema", "1"),
    ],
)
def test_bad_input_is_one_clear_line(tmp_path: Path, change: dict[str, Any], place: str, says: str) -> None:
    def merge(into: dict[str, Any], part: dict[str, Any]) -> None:
        for key, value in part.items():
            if isinstance(value, dict) and isinstance(into.get(key), dict):
                merge(into[key], value)
            else:
                into[key] = value

    data = shipped("l4")
    merge(data, change)
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(data), encoding="utf-8")
    with pytest.raises(InputError) as caught:
        Target.load(str(path))
    assert caught.value.code == "target-invalid"
    assert place in caught.value.where
    assert says in caught.value.line()
    assert "\n" not in caught.value.line()


def test_a_profile_runs_from_minimum_to_maximum() -> None:
    data = shipped("l4")
    data["profiles"][0]["batch"] = [8, 1, 64]
    with pytest.raises(InputError, match=r"batch is \[minimum, optimum, maximum\]"):
        Target.from_dict(data, name="l4")


def test_unknown_target_is_guessed() -> None:
    with pytest.raises(InputError, match="did you mean 'cpu-x86'") as caught:
        Target.load("cpu-x68")
    assert caught.value.code == "unknown-target"


@pytest.mark.parametrize(
    ("text", "code"),
    [("- 1\n", "target-invalid"), ("a: [1\n", "yaml-invalid"), ("kind: gpu\nkind: cpu\n", "yaml-invalid")],
)
def test_a_file_that_is_no_target(tmp_path: Path, text: str, code: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError) as caught:
        Target.load(path)
    assert caught.value.code == code


def test_auto_stays_unmeasured_until_the_doctor_has_been() -> None:
    before = Target.load("cpu-x86")
    assert before.memory.read_bandwidth.state == "unmeasured"
    assert before.memory.read_bandwidth.number is None
    assert "memory.read_bandwidth" in before.unmeasured()

    figures = {"memory.read_bandwidth": 2.5e10, "compute.fp32": 1e11}
    write_measured("cpu-x86", {"source": "measured on a toy", "isa": ["avx2"], "figures": figures})
    after = Target.load("cpu-x86")
    assert after.memory.read_bandwidth.number == 2.5e10
    assert after.memory.read_bandwidth.state == "measured"
    assert after.memory.read_bandwidth.source == "measured on a toy"
    assert after.arch.isa == ["avx2"]
    assert after.compute["fp32"].number == 1e11
    assert after.unmeasured() == ["memory.capacity", "memory.last_level_cache", "compute.int8"]
    assert before.memory.read_bandwidth.value == "auto", "the first one must not have changed"


def test_vllm_computes_in_bfloat16_on_all_cores_but_one() -> None:
    figures = {"compute.bf16": 6e11, "compute.int8": 8e11, "memory.read_bandwidth": 3e10}
    measured = Target.load("cpu-x86").resolve({"figures": figures, "source": "the doctor, 4 cores"})
    assert measured.served_by("onnxruntime", 4) is measured
    served = measured.served_by("vllm", 4)
    assert (served.baseline, served.runtimes[-1]) == ("bf16", "vllm")
    assert (served.compute["bf16"].number, served.compute["int8"].number) == (4.5e11, 6e11)
    assert "3 of 4 cores" in served.compute["bf16"].source and served.compute["bf16"].state == "measured"
    # one core may read as fast as all; figures of another machine, or of a single core, stay
    assert served.memory.read_bandwidth.number == 3e10
    assert [measured.served_by("vllm", cores).compute["bf16"].number for cores in (None, 1)] == [6e11, 6e11]
    card = Target.load("h100")
    assert card.served_by("vllm", 4) is card


def test_a_stated_figure_is_never_replaced() -> None:
    write_measured("l4", {"source": "x", "figures": {"memory.read_bandwidth": 1.0}})
    assert Target.load("l4").memory.read_bandwidth.number == 3e11


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": 2}', '{"schema": 1, "figures": {"compute.fp32": "fast"}}'])
def test_a_broken_cache_counts_as_not_measured(text: str) -> None:
    path = measured_path("cpu-x86")
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert Target.load("cpu-x86").compute["fp32"].state == "unmeasured"


def test_the_cache_is_written_whole_or_not_at_all() -> None:
    write_measured("cpu-x86", {"figures": {"compute.fp32": 1.0}})
    with pytest.raises(ValueError, match="JSON"):
        write_measured("cpu-x86", {"figures": {"compute.fp32": float("nan")}})
    assert read_measured("cpu-x86")["figures"] == {"compute.fp32": 1.0}
    assert [path.name for path in measured_path("cpu-x86").parent.iterdir()] == ["cpu-x86.json"]


def test_a_cache_that_cannot_be_written_says_what_to_do(own_cache: Path) -> None:
    own_cache.write_text("a file where the folder should be")
    with pytest.raises(InputError, match="QUANTKIT_CACHE") as caught:
        write_measured("cpu-x86", {"figures": {}})
    assert caught.value.code == "cache-unwritable"


def test_check_passes_what_runs_and_what_is_emulated() -> None:
    target = Target.load("l4")
    assert target.check([("int4", True), ("float16", True), ("nf4", True)]) == [Stored("nf4", True)]
    assert target.check([("int4", False)], runtime="torch") == [Stored("int4", False)]
    Target.load("cpu-x86").check([("int4", False), ("int8", True)])


def test_weights_inputs_and_cache_of_one_format_are_three_things() -> None:
    older, newer = loaded("a100"), loaded("h100")
    weights, inputs, cache = (Stored("fp8_e4m3", True, part) for part in ("weights", "inputs", "kv_cache"))
    assert newer.check([weights, inputs, cache], "vllm") == []
    assert older.check([weights, inputs], "vllm") == [inputs]
    with pytest.raises(InputError, match="says nothing of fp8_e4m3 KV cache"):
        older.check([cache], "vllm")
    with pytest.raises(InputError, match=r"int8 inputs do not run in vllm; source: not from SM 10\.0 on"):
        loaded("b200").check([Stored("int8", True), Stored("int8", True, "inputs")], "vllm")


def test_a_runtime_may_take_weights_only_beside_inputs_of_some_granularity() -> None:
    target = loaded("cpu-x86")
    weights = WeightScheme(format="fp8_e4m3")
    target.demand_pair(weights, ActivationScheme(format="fp8_e4m3", granularity="token"), "vllm")
    target.demand_pair(WeightScheme(format="int4", granularity="group", group=64), None, "vllm")
    fixed = ActivationScheme(format="fp8_e4m3", granularity="tensor", dynamic=False)
    for inputs, words in ((None, "inputs in floats"), (fixed, "inputs by tensor")):
        with pytest.raises(InputError, match="weights by channel and inputs by token; source: W8A8") as caught:
            target.demand_pair(weights, inputs, "vllm")
        assert words in caught.value.value
    assert "pairs" not in target.as_dict()["formats"]["int4"]["vllm"]


@pytest.mark.parametrize(
    ("formats", "runtime", "says"),
    [
        ([("int2", True)], None, ["int2", "l4", "tensorrt_rtx", "not one of its types", "natively in float32"]),
        ([("int8", True), ("int4", False)], None, ["asymmetric int4", "zero point is refused", "symmetric=true"]),
        ([("int4", True)], "onnxruntime", ["runtime onnxruntime", "known:", "torch"]),
        ([("mxfp4", True)], None, ["mxfp4", "FP4 in blocks of 16 alone", "mxfp4 runs in torch, vllm, llama_cpp"]),
        ([("nf4", True)], "llama_cpp", ["nf4", "IQ4_NL", "nf4 runs in tensorrt_rtx, torch, vllm"]),
    ],
)
def test_check_refuses_with_format_target_runtime_source_and_remedy(
    formats: list[tuple[str, bool]], runtime: str | None, says: list[str]
) -> None:
    with pytest.raises(InputError) as caught:
        Target.load("l4").check(formats, runtime)
    assert caught.value.code == "target-cannot-run"
    assert caught.value.exit == 2
    for part in says:
        assert part in caught.value.line()
