"""The examples of the README and of the guides in docs/, run as they stand.

A tiny model in bfloat16 has the embedded one's name; `make test-all` takes the embedded model. Compiles of it beyond
the first are given `--dry-run`. The first sees 2 short sequences, tries few scales and is scored on 512 positions. What
needs a network is left out. Nothing is timed (a test is no place for that), so `measure` runs once, the times of `tax`
are planted, and `doctor` looks once where it would 15 times. Everything else is executed to the letter, in a folder
that holds a small model and a text under the names the README uses.
"""

import gc
import hashlib
import json
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import networks
import planted_ops
import pytest
import torch
import transformers
import zoo

import quantkit
from quantkit import cli, content, machine
from quantkit.measurement import doctor
from quantkit.measurement.operators import run as ops_run
from quantkit.model.source import alias
from quantkit.pipeline.blocks import tokens
from quantkit.pipeline.request import DEFAULT_MODEL, takes_graph

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
GUIDES = "".join(
    path.read_text(encoding="utf-8")
    for path in sorted((ROOT / "docs").glob("*.md"))
    if path.name not in {"api.md", "devices.md", "tutorial.md"}
)
PYTHON = re.findall(r"```python\n(.*?)```", README + GUIDES, re.DOTALL)
COMMANDS = [
    shlex.split(line, comments=True)[1:]
    for block in re.findall(r"```bash\n(.*?)```", README + GUIDES, re.DOTALL)
    for line in block.splitlines()
    if line.startswith("quantkit ")
]

# words of commands for models of another kind, which run in `pipeline/test_compile_adapter.py` and its like
OTHERS = ("--adapter", "--audio", "--draft", "--image", "./granite-4", "./gpt-oss", "./whisper-tiny.en")


# the largest KL of the default recipe in each runtime: of the stand-in, and of the embedded model, which with so few
# sequences has 0.131 on a processor with AVX-512 VNNI, whose products sum in another order
LARGEST_KL = {False: 0.05, True: 0.14}
FEW = ["calibration.samples=2", "calibration.tokens=128", "awq.grid=4"]


@pytest.fixture
def place(tmp_path: Path, merging_tokenizer: Any) -> Path:
    folder = tmp_path
    sizes = {"num_hidden_layers": 2, "intermediate_size": 128, "max_position_embeddings": 128}
    zoo.save(folder / "my-model", merging_tokenizer, "llama", vocab_size=len(merging_tokenizer), **sizes)
    prose = content.find("calibration", "prose-en").parent / "tune.txt"
    shutil.copy(ROOT / "docs" / "nightly" / "nightly.yaml", folder)
    batch = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "scale.md").read_text(encoding="utf-8"), re.DOTALL)
    (folder / "jobs.yaml").write_text(batch[0], encoding="utf-8")
    (folder / "my-text.txt").write_text(prose.read_text(encoding="utf-8")[:60_000], encoding="utf-8")
    return folder


def test_it_shows_what_is_there() -> None:
    assert len(README.splitlines()) <= 130, "it is read in two minutes; more has a page of its own"
    assert len(PYTHON) == 4
    assert len(COMMANDS) >= 20
    recipes = (ROOT / "recipes" / "README.md").read_text(encoding="utf-8")
    for name in content.names("recipes"):
        assert f"| `{name}` |" in recipes, "every shipped recipe is in the table"
    links = re.findall(r"\]\(([^)#]+)", README)
    assert len(links) > 30
    assert not [link for link in links if not (ROOT / link).exists()]


def test_the_plan_from_python_says_what_the_command_line_says(capsys: pytest.CaptureFixture[str]) -> None:
    outlook = quantkit.plan_model("llama-3-8b", ["int4", "bf16"], "h100")
    assert cli.run(["plan", "llama-3-8b", "--compare", "int4,bf16", "--target", "h100", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)["result"]
    assert outlook.recommendation.label == said["recommendation"]["label"]
    assert outlook.candidates[0].memory.largest_batch == said["candidates"][0]["memory"]["largest_batch"]
    with pytest.raises(quantkit.QuantkitError, match="llama-3-8b"):
        quantkit.plan_model("llama-3-9b")


def stand_in(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    """Let a folder's model have the embedded one's name, in bfloat16."""

    def convert(_: Path, folder: Path) -> None:
        shutil.copytree(model, folder, dirs_exist_ok=True)
        transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).save_pretrained(folder)
        files = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}
        (folder / "provenance.json").write_text(json.dumps({"files": files}), encoding="utf-8")

    whole = alias.ALIASES[DEFAULT_MODEL]
    monkeypatch.setitem(alias.ALIASES, DEFAULT_MODEL, replace(whole, name="stand-in", convert=convert))


@pytest.mark.parametrize("embedded", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_the_examples_run(
    embedded: bool, place: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], one_thread: None
) -> None:
    monkeypatch.chdir(place)
    if not embedded:
        stand_in(monkeypatch, place / "my-model")
    monkeypatch.setattr(tokens, "SCORED", 512)
    measured = doctor.ceilings.measured
    monkeypatch.setattr(machine, "last_level_cache", lambda: 1 << 20)
    monkeypatch.setattr(doctor.ceilings, "measured", lambda *asked, **_: measured(*asked, runs=1, size=64))
    monkeypatch.setattr(ops_run, "run", lambda job, progress=None: planted_ops.rows_of_a_run(job))
    # from Python: compile, look at the rows, load
    space: dict[str, Any] = {}
    assert 'recipe="awq-int4")' in PYTHON[0]
    exec(
        PYTHON[0].replace('recipe="awq-int4")', f'recipe="awq-int4", speed=False, changes={FEW})'),
        space,
    )
    shown = capfd.readouterr().out
    assert "accuracy.kl" in shown
    assert (place / "smollm2-135m--awq-int4" / "manifest.json").is_file()
    kl = {row["runtime"]: row["value"] for row in space["bundle"].measurements if row["name"] == "accuracy.kl"}
    assert max(kl.values()) < LARGEST_KL[embedded], "the default recipe is as good as it is said to be, in each runtime"
    assert set(kl) == {"torch", "onnxruntime"}
    with torch.no_grad():
        logits = space["model"](input_ids=torch.arange(8)[None]).logits
    # the same bundle in anybody else's program
    exec(PYTHON[1], others := {})
    with torch.no_grad():
        assert torch.equal(others["model"](input_ids=torch.arange(8)[None]).logits, logits)
    # the command line
    networks.write(place / "model.onnx")
    networks.image_set(place / "images.npz", 60)
    assert 'npz"\n)' in PYTHON[2]
    given = PYTHON[2].replace("224, 224", f"{networks.SIDE}, {networks.SIDE}").replace('npz"\n)', 'npz", speed=False)')
    exec(given, {"module": networks.tiny(), "torch": torch, "quantkit": quantkit})
    assert quantkit.load(place / "Tiny--int8-network").manifest.model.source.ref == "module:Tiny"
    for stated in COMMANDS:
        gc.collect()
        gc.freeze()  # what is imported stays, and each command looks for garbage several times
        command = stated
        if "hf:org/name" in command or (command[0] == "measure" and "--quick" not in command):
            continue  # untimed, both of `measure` do the same
        if command[0] in ("device", "runtime") or {"--on", "--executor"} & set(command) or "vllm" in command:
            continue  # what needs another machine runs in `devices/test_asked.py`, vLLM in `runtimes/test_vllm.py`
        if set(OTHERS) & set(command):
            continue
        network = command[0] == "compile" and takes_graph(command[1])
        default = command[0] == "compile" and "./my-model" not in command and not network
        if command[0] == "measure" or (command[0] == "compile" and not default):
            command = [*command, "--no-speed"]
        with monkeypatch.context() as patch:
            if command[0] == "doctor":
                patch.setenv("QUANTKIT_CACHE", str(place / "cache"))
            look = (default or command[0] == "batch") and "--dry-run" not in command
            code = cli.run([*command, "--dry-run"] if look else command)
        captured = capfd.readouterr()
        # four bits are worse than the float model, within what the recipe allows: `compare` agrees with `compile`
        assert code == 0, (command, captured.err)
        assert command[0] != "tax" or (place / "tax.html").is_file()
        if command[0] == "generate" and embedded:
            assert "Paris" in captured.out
