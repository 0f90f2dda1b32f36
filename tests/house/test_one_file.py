"""One file adds one thing: a pass, a format, an exporter and a runtime put into a copy of the package, and used.

They inherit from nothing of ours; the runtime reads a file of its own suffix, the format packs in a way of its own.

Nothing else of the copy is touched. What a machine can do with the new ones is content, so the target is a file.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import forked
import numpy as np
import pytest
import yaml
import zoo

from house.source import PACKAGE
from quantkit.pipeline.request import this_machine

# of classes that inherit from nothing
PLUG_INS = {
    "formats/six.py": '''"""6-bit integers a row, of which four lie in three bytes, the most significant bits first."""

from quantkit.formats import QuantTensor
from quantkit.lazy import torch
from quantkit.plugins import Rules


class Six:
    """Whole numbers from -32 to 31."""

    name, bits = "six", 6
    rules = Rules(granularities={"channel": None}, symmetric=(True,), scales=("float32",))

    def quantize(self, weight, scheme):
        """Round to nearest."""
        scale = (weight.float().abs().amax(1, keepdim=True) / 31).clamp(min=1e-12)
        return QuantTensor((weight.float() / scale).round().to(torch.int8), scale, None, scheme)

    def dequantize(self, tensor):
        """Multiply by the scale of the row."""
        return tensor.codes.float() * tensor.scale

    def pack(self, codes):
        """Put four codes into three bytes."""
        rows, columns = codes.shape
        whole = torch.nn.functional.pad(codes.int() + 32, (0, -columns % 4)).reshape(rows, -1, 4)
        word = whole[..., 0] << 18 | whole[..., 1] << 12 | whole[..., 2] << 6 | whole[..., 3]
        found = torch.stack([word >> 16, word >> 8 & 255, word & 255], -1).reshape(rows, -1)
        return found[:, : -(-columns * 6 // 8)].to(torch.uint8)

    def unpack(self, packed, columns):
        """Take them out."""
        parts = torch.nn.functional.pad(packed.int(), (0, -packed.shape[1] % 3)).reshape(len(packed), -1, 3)
        word = parts[..., 0] << 16 | parts[..., 1] << 8 | parts[..., 2]
        codes = torch.stack([word >> 18, word >> 12 & 63, word >> 6 & 63, word & 63], -1)
        return (codes.reshape(len(packed), -1)[:, :columns] - 32).to(torch.int8)

    def bits_per_weight(self, shape, scheme):
        """Count the codes, and 32 bits a row."""
        return 6 + 32 / shape[1]


FORMAT = Six()
''',
    "passes/simple.py": '''"""Each weight to the nearest code, by what its format says."""

from quantkit.content import Closed
from quantkit.formats import load_format
from quantkit.passes import Outcome


class Simple:
    """See the module."""

    name, paper, scope = "simple", "", "block"
    needs, requires, ensures = frozenset(), frozenset({"unassigned"}), frozenset({"codes"})
    on_graphs, for_blocks, Settings = "", False, Closed

    def needs_with(self, settings):
        """Need nothing."""
        return self.needs

    def run(self, block, stats, settings):
        """Assign codes to all linears."""
        outcome = Outcome(True)
        for linear in block.linears():
            scheme = block.schemes[linear]
            tensor = load_format(scheme.format).quantize(block.weight(linear), scheme)
            outcome.errors[linear] = block.assign(linear, tensor)
        return outcome

    def transform(self, model, settings, seed):
        """Have no such scope."""
        raise AssertionError

    def product(self, weight, moments, scheme, settings):
        """Round the product of a graph."""
        return load_format(scheme.format).quantize(weight, scheme)

    def accepts(self, columns, settings):
        """Take everything."""

    def brought(self, head, columns, settings):
        """Bring nothing."""
        return None


PASS = Simple()
''',
    "exporters/toy.py": '''"""One file, `model.toy`: arrays of numpy with packed codes, the config beside them."""

import io
import json

import numpy as np

from quantkit.bundle import Check
from quantkit.content import Closed
from quantkit.formats import load_format


class Toy:
    """See the module."""

    name, place, stores, weights = "toy", "toy", "file", (".toy",)
    runtimes, classes = ("toy",), ()
    fuses = moves = adds = reads_graphs = builds = False
    Options = Closed

    def accepts(self, options, asked):
        """Take everything."""

    def holds(self, options, runtime, asked):
        """Leave packed codes."""
        return "native"

    def storage(self, options, laid):
        """Count them as tensors."""
        return laid.tensors(None)

    def for_target(self, options, target, asked, trial=None):
        """Settle nothing."""
        return {}, ""

    def for_prompts(self, options, target, layers):
        """Know no setting."""
        return ""

    def for_floats(self, options):
        """Change nothing."""
        return options

    def caveat(self, options, runtime):
        """Warn of nothing."""
        return ""

    def export(self, folder, values, options):
        """Write the file."""
        arrays, schemes = {}, {}
        for name, _ in values.skeleton.named_parameters():
            linear = name.removesuffix(".weight")
            if linear in values.schemes:
                tensor = values.quantized(linear)
                schemes[name] = [tensor.shape[1], tensor.scheme.model_dump(mode="json")]
                arrays[f"{name}/codes"] = load_format(tensor.scheme.format).pack(tensor.codes).numpy()
                arrays[f"{name}/scale"] = tensor.scale.numpy()
            else:
                arrays[name] = values.tensor(name).float().numpy()
        about = json.dumps({"config": values.source.config, "schemes": schemes}).encode()
        folder.mkdir()
        with (folder / "model.toy").open("wb") as file:
            np.savez(file, about=np.frombuffer(about, np.uint8), **arrays)
        values.source.tokenizer().save_pretrained(folder)
        return []

    def held(self, values, options):
        """Change no value."""
        return values

    def check(self, bundle, values=None, options=None, *, inputs=None, blocks=None):
        """Hold each parameter against what was decided on."""
        from quantkit.runtimes.toy import read

        _, found = read(bundle / "toy" / "model.toy")
        names = found if values else ()
        apart = sum(float((found[name] - values.tensor(name)).abs().max()) for name in names)
        return [Check(name="toy.values", value=apart, limit=1e-6, ok=bool(found) and apart <= 1e-6)]

    def add_graph(self, graph, folder, options):
        """Read no graphs."""
        raise AssertionError

    def check_graph(self, graph, folder, feed):
        """Read no graphs."""
        raise AssertionError

    def build(self, bundle, options, progress=None):
        """Build nothing."""
        raise AssertionError


EXPORT = Toy()
''',
    "runtimes/toy.py": '''"""Runs `model.toy`: what the arrays hold, in a network of transformers."""

import copy
import json

import numpy as np

from quantkit import machine
from quantkit.errors import InputError
from quantkit.formats import QuantTensor, load_format
from quantkit.scheme import WeightScheme


def read(path):
    """Give the config of a file, and its parameters with codes expanded."""
    import torch

    with np.load(path) as file:
        arrays = {name: torch.from_numpy(file[name]) for name in file.files}
    about = json.loads(arrays.pop("about").numpy().tobytes())
    found = {name: array for name, array in arrays.items() if "/" not in name}
    for name, (columns, written) in about["schemes"].items():
        scheme = WeightScheme.model_validate(written)
        form = load_format(scheme.format)
        codes = form.unpack(arrays[f"{name}/codes"], columns)
        found[name] = form.dequantize(QuantTensor(codes, arrays[f"{name}/scale"], None, scheme))
    return about["config"], found


class Session:
    """A file that is open."""

    settings, ways, prompt_rows, together = {"kept": "toy"}, {}, 0, None
    headed, decoder, notes = False, True, ()

    def __init__(self, folder):
        import torch
        import transformers

        self.torch, self.bytes = torch, (folder / "model.toy").stat().st_size
        config, values = read(folder / "model.toy")
        network = getattr(transformers, config["architectures"][0])
        self.model = network(network.config_class.from_dict(config)).float().eval()
        missing, extra = self.model.load_state_dict(values, strict=False)
        self.model.tie_weights()
        assert not extra and set(missing) <= {"lm_head.weight"}
        self.where, self.context = machine.device(), config["max_position_embeddings"]

    def _run(self, ids, past=None):
        with self.torch.inference_mode():
            return self.model(input_ids=ids, past_key_values=past, use_cache=True)

    def scores(self, ids, at_once=None):
        """Answer for one sequence after another."""
        kept = {}

        def of(number, positions):
            if number not in kept:
                kept.clear()
                kept[number] = self._run(ids[number : number + 1]).logits[0].float()
            return kept[number][positions]

        return of

    def encode(self, ids, mask=None):
        """Be no encoder."""
        raise AssertionError

    def logits(self, ids, mask=None):
        """Be no encoder."""
        raise AssertionError

    def decode(self, batch, context):
        """Prepare a step."""
        ids = self.torch.ones(batch, context, dtype=self.torch.long)
        past = self._run(ids).past_key_values
        return lambda: self._run(ids[:, :1], copy.deepcopy(past))

    def prefill(self, batch, tokens):
        """Prepare a prompt."""
        ids = self.torch.ones(batch, tokens, dtype=self.torch.long)
        return lambda: self._run(ids)

    def work(self):
        """Say what is read."""
        return {"weight_bytes": float(self.bytes)}


class Toy:
    """See the module."""

    name = floats = "toy"
    engines, packages, installed, imports, own = False, (), ("torch",), ("torch",), None
    extra, order, graph = "compile", 7, ""

    def why_not_here(self, folder=None):
        """Run anywhere."""
        return None

    def demand(self, folder=None):
        """Demand nothing."""

    def folder(self, bundle):
        """Name the folder with the file."""
        if not (bundle.path / "toy" / "model.toy").is_file():
            raise InputError("bundle-without-toy", where=str(bundle.path), value="no toy/model.toy", rule="it is read")
        return bundle.path / "toy"

    def checked(self, bundle):
        """Name it once its files are whole."""
        bundle.demand_intact("toy/")
        return self.folder(bundle)

    def open(self, path, threads=None, *, built=None):
        """Open a bundle."""
        return Session(path / "toy")

    def opens(self, folder, threads=None):
        """Open the folder."""
        return Session(folder)

    def opens_graph(self, file, threads=None):
        """Run no graphs."""
        raise InputError("runtime-unsupported", where=str(file), value="toy", rule="it runs no graphs")

    def context(self, folder):
        """Read it from the file."""
        return int(read(folder / "model.toy")[0]["max_position_embeddings"])

    def load(self, bundle):
        """Open a bundle that is whole."""
        return Session(self.checked(bundle))

    def tokenizer(self, bundle):
        """Read the one that lies beside the file."""
        from quantkit.runtimes.text import Tokenizer

        return Tokenizer(self.folder(bundle))

    def generate(self, bundle, prompt, *, new_tokens=64, sample=False, seed=0, chat=False):
        """Continue a prompt by the likeliest token, without a cache."""
        words, session = self.tokenizer(bundle), self.load(bundle)
        ids = words.encode(prompt)
        for _ in range(new_tokens):
            logits = session._run(session.torch.tensor([ids])).logits
            ids.append(int(logits[0, -1].argmax()))
        return {"text": words.decode(ids[-new_tokens:]), "tokens": new_tokens, "seconds": 0.0}


RUNTIME = Toy()
''',
}


@pytest.mark.parametrize("everywhere", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_one_file_adds_one_thing(tmp_path: Path, byte_tokenizer: Any, everywhere: bool) -> None:
    """Compiled, verified, measured, continued and listed; `everywhere`, compared in one run and by night as well."""
    package = _house(tmp_path, byte_tokenizer, PLUG_INS)
    target = yaml.safe_load((PACKAGE.parent / "export" / "cpu-x86.yaml").read_text(encoding="utf-8"))
    target["arch"]["vendor"] = "arm" if this_machine() == "cpu-arm" else "x86"
    target["runtimes"] = ["torch", "toy"]
    target["formats"]["six"] = {"toy": {"state": "native", "source": "this test"}}
    recipe: dict[str, Any] = {"schema": 1, "summary": "a file of its own", "scheme": {"weights": {"format": "six"}}} | {
        "passes": ["simple"],
        "export": [{"toy": {}}],
    }
    night = {"schema": 1, "models": ["./model"], "recipes": ["./recipe.yaml"]} | {
        "targets": ["./target.yaml"],
        "budget": {"rounds": 2, "blocks": 2},
    }
    new = {"formats": "six", "passes": "simple", "exporters": "toy", "runtimes": "toy"}
    fewer = {**recipe, "overrides": [{"match": "*.o_proj", "weights": None}]}
    written = {"target": target, "recipe": recipe, "fewer": fewer, "nightly": night}
    for name, content in written.items():
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
    compiling = ["compile", "./model", "--target", "./target.yaml", "--no-speed", "--json", "--recipe"]
    timing = ["--batch", "1", "--seconds", "2", "--json"]
    asked = [
        [*compiling, "./recipe.yaml", "--out", "b"],
        ["verify", "b", "--json"],
        ["measure", "b", "--baseline", "./model", "--quick", *timing],
        ["generate", "b", "--prompt", "one", "--new-tokens", "2", "--json"],
        *(["list", kind, "--json"] for kind in new),
    ]
    if everywhere:
        asked += [
            [*compiling, "./fewer.yaml", "--out", "a"],
            ["compare", "a", "b", "--measure", *timing],
            ["nightly", "run", "nightly.yaml", "--json"],
        ]
    codes, lines, said = _run(tmp_path, package, asked)
    compiled, verified, measured, generated, *_ = (json.loads(line)["result"] for line in lines)
    assert all(name in line for name, line in zip(new.values(), lines[4:8], strict=True))
    # compiled for: the file holds three bytes for four weights of a linear
    assert codes[0] == 0, said
    layers = json.loads((tmp_path / "b" / "manifest.json").read_text(encoding="utf-8"))["layers"]
    assert layers and {layer["scheme"]["format"] for layer in layers} == {"six"}
    with np.load(tmp_path / "b" / "toy" / "model.toy") as file:
        sizes = {name.removesuffix(".weight/codes"): file[name].nbytes for name in file.files if name.endswith("codes")}
    assert sizes == {layer["name"]: np.prod(layer["shape"]) * 6 // 8 for layer in layers}
    # scored, and weighed
    rows = {row["name"]: row for row in compiled["measurements"]}
    assert rows["accuracy.kl"]["runtime"] == "toy" and 0 < rows["accuracy.kl"]["value"] < 0.1
    assert rows["size.bytes"]["value"] == (tmp_path / "b" / "toy" / "model.toy").stat().st_size
    # reloaded
    assert codes[1] == 0 and {check["name"]: check["ok"] for check in verified["checks"]}["toy.values"]
    # timed, against the float model in the same runtime
    assert codes[2] in (0, 3), said
    timed = {row["name"] for row in measured["measurements"] if row["runtime"] == "toy"}
    assert {"accuracy.kl", "latency.decode_step", "latency.prefill", "memory.peak"} <= timed
    assert codes[3] == 0 and generated["tokens"] == 2
    # on the page, and on the card
    page = (tmp_path / "b" / "report.html").read_text(encoding="utf-8")
    assert "toy, batch 1" in page and "toy/model.toy" in page and "six" in page
    if not everywhere:
        return
    *_, compared, nightly = (json.loads(line)["result"] for line in lines)
    # compared, in one run of both
    assert codes[-3] == 0 and codes[-2] in (0, 1, 3), said
    cells = {cell["what"]: cell for cell in compared["cells"] if cell["runtime"] == "toy"}
    assert {"accuracy", "latency"} <= set(cells)
    # and by night
    assert codes[-1] == 0, said
    assert [(cell["cell"].split("|")[3], cell["state"]) for cell in nightly["cells"]] == [("toy", "done")]
    assert {each["what"]: each["n"] for each in nightly["decisions"]}["latency"] > 0


def _house(folder: Path, tokenizer: Any, files: Mapping[str, str]) -> Path:
    """Copy the package, put files into the copy, and write a tiny model beside it."""
    package = folder / "tree" / "quantkit"
    shutil.copytree(PACKAGE, package)  # with its byte code, where there is some
    for content in ("recipes", "calibration", "export"):
        (package.parent / content).symlink_to(PACKAGE.parent / content)
    for name, text in files.items():
        (package / name).write_text(text, encoding="utf-8")
    zoo.save(folder / "model", tokenizer, "llama", vocab_size=len(tokenizer), max_position_embeddings=128)
    return package


# in a process that has torch and transformers: our own modules anew, from the copy; children the same
PROGRAM = """
import sys
for name in [name for name in sys.modules if name.partition(".")[0] == "quantkit"]:
    del sys.modules[name]
"""
IN_CHILDREN = """
import forked
from types import SimpleNamespace
from quantkit.runtimes import child
child.machine = SimpleNamespace(python=lambda kind, program: forked.python(kind, PROGRAM + program))
"""


def _run(folder: Path, package: Path, asked: Sequence[Sequence[str]]) -> tuple[list[int], list[str], str]:
    """Run commands of a copy in one process; return their exit codes, the line that each wrote, and all the output."""
    program = f"{PROGRAM}PROGRAM = {PROGRAM!r}{IN_CHILDREN}from quantkit.cli import run\n"
    program += f"assert child.__file__.startswith({str(package)!r})\nprint([run(each) for each in {asked!r}])"
    path = os.pathsep.join([str(package.parent), str(Path(forked.__file__).parent)])
    done = forked.run("-c", program, cwd=folder, env={**os.environ, "PYTHONPATH": path})
    said = done.stderr + done.stdout
    assert done.returncode == 0, said
    *lines, codes = done.stdout.splitlines()
    return json.loads(codes), lines, said
