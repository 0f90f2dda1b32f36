"""Every shipped recipe on every shipped target is taken, taken with a warning, or refused with what is taken."""

import json
import re
import shlex
from functools import cache
from pathlib import Path

import pytest

from quantkit import content
from quantkit.errors import InputError
from quantkit.kinds import Kind
from quantkit.planning.support import Reader, ask, caveats, stored_formats
from quantkit.recipe import Recipe
from quantkit.target import Stored, Target

RECIPES, TARGETS = content.names("recipes"), content.names("export")


@cache
def recipe(name: str) -> Recipe:
    return Recipe.load(name)


@cache
def target(name: str) -> Target:
    return Target.load(name)


def changed(name: str, *changes: str) -> Recipe:
    return Recipe.load(name, changes)


def asked_for(remedy: str, asked: Recipe, where: Target) -> list[tuple[Recipe, Target]]:
    """What the command lines in a remedy ask for."""
    found = []
    for part in remedy.split("; or: "):
        words = shlex.split(re.sub(r" \((native|computed).*\)$", "", part).replace("`", ""))
        if words[0] in ("--recipe", "--target"):
            named = dict(zip(words[::2], words[1::2], strict=True))
            chosen = recipe(named["--recipe"]) if "--recipe" in named else asked
            found.append((chosen, target(named["--target"]) if "--target" in named else where))
        elif words[0] == "--set":
            data = {key: value for key, value in asked.as_dict().items() if key != "name"}
            found.append((Recipe.from_dict(data, name=asked.name, changes=words[1:2]), where))
        elif words[0] == "leave":
            kept = [step for step in asked.export if step.name != words[1]]
            found.append((asked.model_copy(update={"export": kept}), where))
    return found


@pytest.mark.parametrize("name", TARGETS)
def test_what_is_refused_is_refused_with_something_that_is_taken(name: str) -> None:
    where = target(name)
    for asked in map(recipe, RECIPES):
        for kind in asked.models:
            try:
                found = ask(asked, where, kind)
            except InputError as problem:
                others = asked_for(problem.remedy, asked, where)
                assert others, problem.line()
                for other, there in others:
                    assert ask(other, there, kind).readers, problem.line()
                continue
            words = found.slower(kind)
            assert bool(words) == (found.best.state == "emulated"), (asked.name, kind)
            if words and "--" in words:
                for other, there in asked_for(words[words.index("--") :], asked, where):
                    assert ask(other, there, kind).best.state == "native", words


def test_every_recipe_is_computed_in_somewhere() -> None:
    for name in RECIPES:
        states = set()
        for where in TARGETS:
            try:
                states.add(ask(recipe(name), target(where), recipe(name).models[0]).best.state)
            except InputError:
                states.add("absent")
        assert "native" in states, name


def state(name: str, where: str, kind: Kind | None = None) -> Reader:
    return ask(recipe(name), target(where), kind).best


@pytest.mark.parametrize(
    ("name", "where", "kind", "runtime", "expected"),
    [
        ("awq-int4", "cpu-x86", None, "onnxruntime", "native"),  # its graph, whatever becomes of its checkpoint
        ("gptq-int4", "cpu-x86", None, "torch", "emulated"),
        ("gptq-int4", "l4", None, "vllm", "native"),
        ("int8-dynamic", "h100", None, "vllm", "native"),
        ("int8-dynamic", "b200", None, "torch", "emulated"),  # INT8 products left vLLM with Blackwell
        ("int8-weights", "b200", None, "vllm", "native"),  # its weights did not
        ("fp8", "h100", None, "vllm", "native"),
        ("fp8", "a100", None, "vllm", "emulated"),  # the weights are read, nothing multiplies in FP8
        ("fp8", "v100", None, "torch", "emulated"),
        ("kv-fp8", "l4", None, "vllm", "native"),
        ("kv-fp8", "a100", None, "torch", "emulated"),
        ("nvfp4", "rtx-5090", None, "vllm", "native"),
        ("int3", "h100", None, "vllm", "native"),  # Humming takes what Marlin does not
        ("int3", "v100", None, "torch", "emulated"),
        ("int2", "cpu-x86", None, "onnxruntime", "native"),  # 2 bits have kernels, 3 bits none
        ("int2", "h100", None, "vllm", "native"),
        ("nf4", "l4", None, "torch", "native"),
        ("nf4", "cpu-x86-vnni", None, "torch", "emulated"),
        ("int4-tensorrt", "rtx-4090", "network", "tensorrt_rtx", "native"),
        ("int8-tensorrt", "t4", "network", "tensorrt", "native"),  # of two libraries, the one that computes in it
        ("int8", "cpu-x86", "network", "onnxruntime", "native"),
        ("float", "v100", None, "torch", "native"),
    ],
)
def test_a_target_names_the_runtime_and_its_support(
    name: str, where: str, kind: Kind | None, runtime: str, expected: str
) -> None:
    found = state(name, where, kind)
    assert (found.runtime, found.state) == (runtime, expected)


@pytest.mark.parametrize(
    ("asked", "where", "kind", "code", "says"),
    [
        (
            ["int4-tensorrt"],
            "t4",
            None,
            "target-cannot-run",
            ["below SM 8.0", "leave `tensorrt` out", "int4-symmetric"],
        ),
        (["int8-network"], "v100", "network", "target-cannot-run", ["runtime onnxruntime", "--target apple-m3"]),
        (
            ["gptq-int4", "export=[checkpoint, onnx]", "scheme.kv_cache={format: fp8_e4m3}"],
            "cpu-x86",
            None,
            "target-cannot-run",
            ["KV cache does not run", "leave `onnx` out of `export`: --set 'export=[{checkpoint: {}}]'"],
        ),
        (
            ["gptq-int4", "export=[{onnx: {}}]", "scheme.weights.format=int3"],
            "cpu-x86",
            None,
            "target-cannot-run",
            ["2, 4"],
        ),
        (
            ["int8-dynamic", "export=[{tensorrt: {}}]"],
            "l4",
            None,
            "layout-unsupported",
            ["as the model runs", "dynamic=false"],
        ),
        (
            ["gptq-int4", "export=[{tensorrt: {}}]"],
            "l4",
            None,
            "target-cannot-run",
            ["symmetric=true", "int4-tensorrt"],
        ),
        (
            ["nf4", "export=[{onnx: {}}]"],
            "cpu-x86",
            None,
            "layout-unsupported",
            ["MatMulNBits supports", "--recipe int4-cpu"],
        ),
        (
            ["int4-best", "models=[network]"],
            "cpu-x86",
            "network",
            "scheme-unsupported",
            ["a graph is", "--recipe int8"],
        ),
        (["int8-encoder", "export=[{checkpoint: {}}]"], "cpu-x86", "encoder", "layout-unsupported", ["center moves"]),
    ],
)
def test_refusals_say_why_and_what_instead(
    asked: list[str], where: str, kind: Kind | None, code: str, says: list[str]
) -> None:
    chosen = changed(*asked)
    with pytest.raises(InputError) as caught:
        ask(chosen, target(where), kind)
    assert caught.value.code == code
    for part in says:
        assert part in caught.value.line()


def test_a_dense_checkpoint_holds_floats_whatever_was_rounded() -> None:
    dense = changed("gptq-int4", "export=[{checkpoint: {layout: dense}}]")
    found = ask(dense, target("h100")).best
    assert found.state == "emulated"
    assert "dequantized values" in found.taken[0].source


def test_vllm_reads_a_layout_only_where_it_has_a_kernel() -> None:
    """Marlin has no groups of 16, and symmetric codes alone in the layout of GPTQ."""
    odd = changed("gptq-int4", "scheme.weights.group=16")
    assert ask(odd, target("h100")).best.runtime == "torch"
    assert ask(recipe("gptq-int4"), target("h100")).best.runtime == "vllm"


@pytest.mark.parametrize(
    ("name", "where", "says"),
    [
        ("nf4", "l4", "vllm-bnb-plugin"),
        ("mxfp4", "b200", "rounds inputs too"),
        ("nf4", "cpu-x86", ""),  # vLLM does not read it there at all
        ("nf4", "v100", ""),
        ("gptq-int4", "l4", ""),
        ("float", "l4", ""),
    ],
)
def test_what_a_runtime_needs_beside_itself_is_said(name: str, where: str, says: str) -> None:
    found = caveats(recipe(name), target(where))
    assert len(found) == bool(says) and all(says in each for each in found)
    assert caveats(recipe(name), target(where), ["torch"]) == []


def test_overrides_are_stored_too() -> None:
    mixed = changed(
        "int8-dynamic", "overrides=[{match: '*.down_proj', weights: {format: fp8_e4m3}, activations: null}]"
    )
    assert stored_formats(mixed) == [Stored("int8", True), Stored("int8", True, "inputs"), Stored("fp8_e4m3", True)]


def test_each_export_is_judged_alone() -> None:
    found = ask(recipe("awq-int4"), target("cpu-x86")).readers
    assert [(each.export, each.state) for each in found] == [("checkpoint", "emulated"), ("onnx", "native")]


def test_vllm_on_this_processor_takes_what_was_seen_to_run_and_refuses_the_rest() -> None:
    record = sorted((Path(__file__).parents[2] / "benchmarks" / "results").glob("vllm-cells-*.json"))[-1]
    rows = [row for row in json.loads(record.read_text())["rows"] if "recipe" in row]
    assert len(rows) > 20
    served = target("cpu-x86-vnni").model_copy(update={"runtimes": ["vllm"]})
    for row in rows:
        refused = False
        try:
            ask(Recipe.from_dict(row["recipe"], name="cell"), served, "decoder")
        except InputError as problem:
            refused = True
            assert problem.code == "layout-unsupported" or "measured on x86-64 with vLLM" in problem.line()
        assert refused == (row["result"] not in ("right", "theirs")), row["cell"]
