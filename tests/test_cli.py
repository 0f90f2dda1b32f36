"""The command line: every command, every way out, and stdout that holds the answer and nothing else."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import planted
import pytest

from quantkit import cli, registry
from quantkit.bundle import content_sha256, inventory
from quantkit.bundle.manifest import MANIFEST, MEASUREMENTS
from quantkit.measure.rows import write_rows
from quantkit.pipeline import DEFAULT_MODEL, Request
from quantkit.report import catalog

COMMANDS = ("compile", "measure", "verify", "list", "show", "doctor", "generate")
# a meta-path finder that makes these packages missing, then the command line
_WITHOUT = """
import sys
class Missing:
    names = {"torch", "transformers", "scipy", "datasets", "compressed_tensors", "pandas", "onnx", "accelerate", "gguf"}
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
import quantkit
from quantkit.cli import main
main()
"""


class Ran:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def envelope(self) -> dict[str, Any]:
        """What `--json` printed: one line, one object, nothing else."""
        assert self.out.count("\n") == 1
        found = json.loads(self.out)
        assert list(found) == ["schema", "command", "exit", "result", "decisions", "warnings", "error"]
        assert found["schema"] == "quantkit/1"
        assert found["exit"] == self.code
        assert isinstance(found, dict)
        return found


@pytest.fixture
def quantkit(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "100")

    def run(*arguments: object) -> Ran:
        capsys.readouterr()
        code = cli.run([str(argument) for argument in arguments])
        return Ran(code, *capsys.readouterr())

    return run


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """A bundle with planted figures; its weights are a text."""
    folder = tmp_path / "a bundle"
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "model.safetensors").write_text("weights")
    write_rows(folder / MEASUREMENTS, planted.rows())
    files = inventory(folder)
    manifest = planted.manifest(files=[file.model_dump(by_alias=True) for file in files])
    manifest = manifest.model_copy(update={"content_sha256": content_sha256(files)})
    (folder / MANIFEST).write_bytes(manifest.as_bytes())
    return folder


def without_packages(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", _WITHOUT, *arguments], capture_output=True, text=True, check=False, timeout=60
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ("--help",),
        ("--version",),
        *((command, "--help") for command in COMMANDS),
        ("list",),
        ("list", "--json"),
        ("show", "gptq"),
        ("show", "l4"),
        ("show", "prose-en"),
        ("show", "smollm2-135m"),
    ],
    ids=" ".join,
)
def test_works_where_torch_and_the_rest_are_not_installed(arguments: tuple[str, ...]) -> None:
    done = without_packages(*arguments)
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert not done.stderr


def test_what_needs_torch_says_what_to_install(tmp_path: Path, bundle: Path) -> None:
    for arguments in (("compile", "--out", str(tmp_path / "x")), ("generate", str(bundle), "--prompt", "x")):
        done = without_packages(*arguments)
        assert done.returncode == 2
        assert "error: [missing-dependency]" in done.stderr
        assert "pip install 'quantkit[compile]'" in done.stderr
        assert "Traceback" not in done.stderr


def test_verify_without_torch_checks_the_files_and_says_what_it_could_not(bundle: Path) -> None:
    done = without_packages("verify", str(bundle), "--json")
    assert done.returncode == 0, done.stderr
    envelope = json.loads(done.stdout)
    assert {check["name"] for check in envelope["result"]["checks"]} >= {"files.sha256", "content_sha256"}
    assert "not installed" in envelope["warnings"][0]


def test_help_is_quick() -> None:
    before = os.times()
    subprocess.run([sys.executable, "-m", "quantkit", "--help"], capture_output=True, check=True)
    after = os.times()
    assert after.children_user + after.children_system - before.children_user - before.children_system < 0.5


def test_help_names_every_command_and_every_exit_code(quantkit: Any) -> None:
    ran = quantkit("--help")
    assert ran.code == 0
    assert all(f"  {command}  " in ran.out for command in COMMANDS)
    assert all(f"{code} " in ran.out for code in (0, 1, 2, 3, 75))
    assert quantkit().out == ran.out


def test_version(quantkit: Any) -> None:
    import quantkit as package

    assert quantkit("--version").out == f"quantkit {package.__version__}\n"


def test_defaults_are_the_pipeline_s() -> None:
    import inspect

    assert inspect.signature(cli.compile).parameters["model"].default == DEFAULT_MODEL


@pytest.mark.parametrize(
    ("arguments", "code", "part"),
    [
        (["compil"], "usage", "'compile'"),
        (["compile", "--recip", "x"], "usage", "--recipe"),
        (["compile", "--recipe"], "usage", "--recipe"),
        (["generate", "x"], "usage", "--prompt"),
        (["generate", "x", "--prompt", "x", "--new-tokens", "0"], "usage", "new-tokens"),
        (["compile", "--recipe", "rtn-int5"], "unknown-recipe", "did you mean 'rtn-int4'"),
        (["compile", "--recipe", "./no.yaml"], "file-missing", "./no.yaml"),
        (["compile", "--recipe", "rtn-int4", "--target", "l5"], "unknown-target", "l4"),
        (["compile", "--recipe", "rtn-int4", "--set", "gtpq.x=1"], "set-invalid", "gtpq"),
        (["compile", "--recipe", "rtn-int4", "--set", "scheme.wieghts.group=1"], "recipe-invalid", "weights"),
        (["compile", "--recipe", "rtn-int4", "--calibration", "prose"], "unknown-calibration", "prose-en"),
        (["compile", "smollm", "--recipe", "rtn-int4"], "unknown-model", "smollm2-135m"),
        (["compile", "./nowhere", "--recipe", "rtn-int4"], "file-missing", "nowhere"),
        (["verify", "/nowhere"], "not-a-bundle", "/nowhere"),
        (["measure", "/nowhere"], "not-a-bundle", "/nowhere"),
        (["generate", "/nowhere", "--prompt", "x"], "not-a-bundle", "/nowhere"),
        (["list", "recipe"], "unknown-kind", "did you mean 'recipes'"),
        (["show", "gtpq"], "unknown-name", "did you mean 'gptq'"),
        (["show", "./nothing"], "file-missing", "nothing"),
        (["doctor", "--target", "l5"], "unknown-target", "l4"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_use_is_one_line_and_exit_2(arguments: list[str], code: str, part: str, quantkit: Any) -> None:
    ran = quantkit(*arguments)
    assert ran.code == 2
    assert not ran.out
    errors = [line for line in ran.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert ran.err.endswith(f"{errors[0]}\n")
    assert errors[0].startswith(f"error: [{code}] ")
    assert part in errors[0]
    found = quantkit(arguments[0], "--json", *arguments[1:]).envelope
    assert found["error"]["code"] == code
    assert found["result"] is None
    assert found["command"] == arguments[0]


def test_existing_out_is_refused_before_anything_is_opened(quantkit: Any, tmp_path: Path) -> None:
    assert quantkit("compile", "--recipe", "rtn-int4", "--out", tmp_path).err.startswith("error: [out-exists]")


def test_list_shows_every_kind_with_its_summaries(quantkit: Any) -> None:
    ran = quantkit("list")
    assert all(kind in ran.out for kind in catalog.KINDS)
    found = quantkit("list", "--json").envelope["result"]
    assert list(found) == list(catalog.KINDS)
    assert found["passes"] == registry.summaries("passes")
    assert all(summary for names in found.values() for summary in names.values())
    assert list(quantkit("list", "formats", "--json").envelope["result"]) == ["formats"]


@pytest.mark.parametrize("kind", catalog.KINDS)
def test_everything_that_is_listed_can_be_shown(kind: str, quantkit: Any) -> None:
    for name, summary in catalog.listing(kind)[kind].items():
        ran = quantkit("show", name)
        assert ran.code == 0, ran.err
        assert " ".join(summary.split()[:5]) in " ".join(ran.out.split())
    entry = quantkit("show", name, "--json").envelope["result"][0]
    assert entry["name"] == name


def test_show_says_a_pass_s_settings_with_defaults_and_paper(quantkit: Any) -> None:
    out = quantkit("show", "gptq").out
    assert "2210.17323" in out
    assert "gptq.damping" in out
    assert "0.01" in out


def test_show_says_a_target_s_figures_with_state_and_source(quantkit: Any) -> None:
    out = " ".join(quantkit("show", "l4").out.split())
    assert "300 GB/s (stated: NVIDIA L4 datasheet)" in out
    assert "not measured" in quantkit("show", "cpu-x86").out


def test_show_reads_a_user_s_own_files(quantkit: Any, tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("schema: 1\nsummary: my own\npasses: [rtn]\nscheme: {weights: {format: int8}}\n")
    assert "my own" in quantkit("show", recipe).out
    recipe.write_text("schema: 1\nsummary: my own\npases: [rtn]\n")
    assert "did you mean 'passes'" in quantkit("show", recipe).err


def test_show_of_a_folder_without_dot_says_how_it_is_written(
    quantkit: Any, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(bundle.parent)
    assert "a folder is written ./a bundle" in quantkit("show", "a bundle").err


def test_show_a_bundle(quantkit: Any, bundle: Path) -> None:
    ran = quantkit("show", bundle)
    assert ran.code == 0
    assert "19.53" in ran.out
    found = quantkit("show", bundle, "--json").envelope["result"]
    assert found["kind"] == "bundle"
    assert found["manifest"]["model"]["name"] == "a-model"
    assert len(found["measurements"]) == len(planted.rows())


def test_verify_fails_with_the_file_that_changed(quantkit: Any, bundle: Path) -> None:
    (bundle / "model" / "model.safetensors").write_text("Weights")
    ran = quantkit("verify", bundle)
    assert ran.code == 1
    assert "✗  files.sha256" in ran.out
    assert "model/model.safetensors" in ran.out
    assert ran.err.splitlines()[-1].startswith("error: [verify-failed] model/model.safetensors")
    found = quantkit("verify", bundle, "--json").envelope
    assert found["error"]["code"] == "verify-failed"
    assert [check["name"] for check in found["result"]["checks"] if not check["ok"]] == ["files.sha256"]


def test_doctor_of_a_target_that_states_its_figures(quantkit: Any) -> None:
    ran = quantkit("doctor", "--target", "l4")
    assert ran.code == 0
    assert "this machine" in ran.out
    assert quantkit("doctor", "--target", "l4", "--json").envelope["result"]["target"] == "l4"


@pytest.mark.parametrize(
    ("problem", "code", "exit_code"),
    [
        (KeyboardInterrupt(), "interrupted", 75),
        (RuntimeError("a bug"), "internal-error", 2),
        (PermissionError(13, "Permission denied", "/a/file"), "os-error", 2),
        (ModuleNotFoundError("No module named 'torch'", name="torch.nn"), "missing-dependency", 2),
        (ModuleNotFoundError("No module named 'quantkit.x'", name="quantkit.x"), "internal-error", 2),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_no_traceback_whatever_happens(
    problem: BaseException, code: str, exit_code: int, quantkit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(kind: object) -> object:
        print("chatter of a library")
        raise problem

    monkeypatch.setattr(catalog, "listing", fail)
    ran = quantkit("list")
    assert ran.code == exit_code
    assert not ran.out
    assert "Traceback" not in ran.err
    assert f"[{code}]" in ran.err
    assert quantkit("list", "--json").envelope["error"]["code"] == code
    monkeypatch.setenv("QUANTKIT_TRACEBACK", "1")
    assert ("Traceback" in quantkit("list").err) == (code == "internal-error")


@pytest.mark.parametrize("problem", [KeyboardInterrupt(), SystemExit(130)], ids=lambda problem: type(problem).__name__)
def test_an_interrupt_while_parsing_is_a_safe_stop(
    problem: BaseException, quantkit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> object:
        raise problem

    monkeypatch.setattr("typer.core.TyperGroup.invoke", fail)
    ran = quantkit("list", "--json")
    assert ran.code == 75
    assert ran.envelope["error"]["code"] == "interrupted"


def test_a_reader_that_has_enough_is_no_error() -> None:
    command = f"{sys.executable} -m quantkit list --json | head -c 1 > /dev/null; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout == "0\n"
    assert not done.stderr


# --- compile, on a tiny random model ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, byte_tokenizer: Any) -> Path:
    import zoo

    folder = tmp_path_factory.mktemp("models") / "tiny.model"
    zoo.tiny("llama", vocab_size=len(byte_tokenizer)).save_pretrained(folder)
    byte_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Small groups, a small calibration set, few scored positions."""
    monkeypatch.setattr("quantkit.pipeline.tokens.SCORED", 300)
    path = tmp_path / "small.yaml"
    path.write_text(
        "schema: 1\nsummary: small\ncalibration: {set: prose-en, samples: 4, tokens: 32}\n"
        "scheme: {weights: {format: int4, granularity: group, group: 32, symmetric: false}}\n"
        "passes: [rtn]\nexport: [{checkpoint: {layout: pack-quantized}}]\n"
    )
    return path


@pytest.mark.slow
def test_compile_verify_measure_generate(quantkit: Any, tiny: Path, recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    ran = quantkit("compile", tiny, "--recipe", recipe, "--out", out)
    assert ran.code == 0, ran.err
    assert ran.err.startswith(f"opening {tiny}; ")
    assert "Traceback" not in ran.err
    rows = {row["name"]: row for row in map(json.loads, (out / MEASUREMENTS).read_text().splitlines())}
    assert f"{rows['size.bits_per_weight']['value']:.2f}" in ran.out
    assert f"{rows['accuracy.top1_agreement']['value']:.1%}".replace("%", " %") in ran.out
    assert f"  {out}\n" in ran.out
    assert (out / "README.md").read_text().startswith("---\n")

    assert quantkit("verify", out).code == 0
    measured = quantkit("measure", out, "--baseline", tiny, "--json")
    assert measured.code == 0, measured.err
    again = {row["name"]: row["value"] for row in measured.envelope["result"]["measurements"]}
    assert again["accuracy.kl"] == pytest.approx(rows["accuracy.kl"]["value"], rel=1e-6)
    assert quantkit("measure", out).err.splitlines()[-1].startswith("error: [baseline-needed]")
    made = quantkit("generate", out, "--prompt", "ab", "--new-tokens", "3", "--json").envelope["result"]
    assert made["tokens"] <= 3
    assert quantkit("generate", out, "--prompt", "x", "--runtime", "torhc").err.count("did you mean 'torch'") == 1
    assert quantkit("verify", out).code == 0


def test_compile_json_has_result_and_error_of_a_failed_gate(
    quantkit: Any, tiny: Path, recipe: Path, tmp_path: Path
) -> None:
    ran = quantkit("compile", tiny, "--recipe", recipe, "--out", tmp_path / "o", "--set", "gates.kl_max=1e-9", "--json")
    assert ran.code == 1
    found = ran.envelope
    assert found["result"]["state"] == "gate_failed"
    assert {"bundle", "content_sha256", "verdict", "measurements", "seconds", "memory_peak_bytes"} <= set(
        found["result"]
    )
    assert found["error"]["code"] == "gate-failed"
    assert found["error"]["where"] == "gate.kl_max"
    assert found["error"]["rule"] == "at most 1e-09"
    assert ran.err.splitlines()[-1].startswith("error: [gate-failed] gate.kl_max: ")


def test_dry_run_writes_nothing(quantkit: Any, tiny: Path, recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    ran = quantkit("compile", tiny, "--recipe", recipe, "--out", out, "--dry-run")
    assert ran.code == 0, ran.err
    assert f"would write {out}" in ran.out
    assert "21 layers" in ran.out
    assert not list(tmp_path.glob("out*"))
    plan = quantkit("compile", tiny, "--recipe", recipe, "--out", out, "--dry-run", "--json").envelope["result"]
    assert plan["schemes"][0]["layers"] == 21
    assert plan["schemes"][0]["bits_per_weight"] == pytest.approx(4 + 20 / 32)
    assert plan["seconds"]["quantize"] > 0


def test_request_reaches_the_pipeline_whole(quantkit: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[Request] = []

    def stop(request: Request, progress: object) -> object:
        seen.append(request)
        raise KeyboardInterrupt

    monkeypatch.setattr("quantkit.pipeline.compile.compile_model", stop)
    out = tmp_path / "x"
    options = ["--recipe", "rtn-int4", "--target", "cpu-arm", "--calibration", "prose-en", "--out", str(out)]
    options += ["--set", "seed=5", "--set", "rtn.range=minmax", "--resume", "--strict", "--trust-remote-code"]
    assert quantkit("compile", "hf:org/name", *options).code == 75
    request = seen[0]
    assert (request.model, request.recipe.name, request.target.name, request.out) == (
        "hf:org/name",
        "rtn-int4",
        "cpu-arm",
        out,
    )
    assert (request.recipe.seed, request.recipe.passes[0].settings.range) == (5, "minmax")
    assert request.resume
    assert request.strict
    assert request.trust_remote_code


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_signals_stop_safely_with_75(number: signal.Signals, tmp_path: Path) -> None:
    script = "import quantkit.report.catalog as c, time\nc.listing = lambda kind: time.sleep(30)\n"
    script += "print('ready', flush=True)\nfrom quantkit.cli import main\nmain()"
    process = subprocess.Popen(
        [sys.executable, "-c", script, "list", "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(1.0)
    process.send_signal(number)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 75
    assert json.loads(out)["error"]["code"] == "interrupted"
    assert "Traceback" not in err
