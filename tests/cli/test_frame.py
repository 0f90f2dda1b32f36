"""What all commands share: help, every way out, and stdout that holds the answer and nothing else."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked
import pytest

from quantkit.errors import Rebuilt
from quantkit.report import catalog

COMMANDS = ("compile", "recommend", "measure", "compare", "tax", "tune", "verify", "list", "show", "doctor", "generate")
COMMANDS += ("nightly",)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--help",),
        ("--version",),
        *((command, "--help") for command in COMMANDS),
        ("nightly",),
        *(("nightly", command, "--help") for command in ("run", "gate", "page", "query")),
        ("list",),
        ("list", "--json"),
        ("recommend", "llama-3-8b", "--target", "h100"),
        ("show", "gptq"),
        ("show", "l4"),
        ("show", "prose-en"),
        ("show", "smollm2-135m"),
    ],
    ids=" ".join,
)
def test_works_where_torch_and_the_rest_are_not_installed(
    arguments: tuple[str, ...], without_packages: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    done = without_packages(*arguments)
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert not done.stderr


def test_what_needs_torch_says_what_to_install(
    tmp_path: Path, bundle: Path, without_packages: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    for arguments in (("compile", "--out", str(tmp_path / "x")), ("generate", str(bundle), "--prompt", "x")):
        done = without_packages(*arguments)
        assert done.returncode == 2
        assert "error: [missing-dependency]" in done.stderr
        assert "pip install -e '.[compile]'" in done.stderr
        assert "Traceback" not in done.stderr


def test_help_is_quick() -> None:
    """Of what it must import, whatever the processor: no more than as much again and a half."""

    def cpu(*arguments: str) -> float:
        before = os.times()
        subprocess.run([sys.executable, *arguments], capture_output=True, check=True)
        after = os.times()
        return after.children_user + after.children_system - before.children_user - before.children_system

    needed = min(cpu("-c", "import typer.main, typer.rich_utils, pydantic.fields, yaml") for _ in range(2))
    assert min(cpu("-m", "quantkit", "--help") for _ in range(2)) < 2.5 * needed


def test_help_names_every_command_and_every_exit_code(quantkit: Any) -> None:
    ran = quantkit("--help")
    assert ran.code == 0
    assert all(f"  {command}  " in ran.out for command in COMMANDS)
    assert all(f"{code} " in ran.out for code in (0, 1, 2, 3, 75))
    assert quantkit().out == ran.out


def test_recommend_ranks_recipes_on_a_target(quantkit: Any) -> None:
    ran = quantkit("recommend", "llama-3-8b", "--target", "h100")
    assert ran.code == 0
    lines = ran.out.splitlines()
    assert "  by bounds: take int4-best" in lines
    recipes = quantkit("recommend", "llama-3-8b", "--target", "h100", "--json").envelope["result"]["recipes"]
    rows = [line.split()[0] for line in lines if line.split()[2:3] in (["yes"], ["no"])]
    assert rows == [one["recipe"] for one in recipes], "a line each"
    assert lines[-2].startswith("  quantkit compile hf:meta-llama/Meta-Llama-3-8B --recipe int4-best --target h100")
    untimed = quantkit("recommend", "smollm2-135m", "--target", "cpu-x86-amx").out
    assert "`quantkit doctor --write --target cpu-x86-amx` on that machine" in " ".join(untimed.split())
    first = quantkit("recommend", "smollm2-135m", "--target", "cpu-x86", "--json").envelope["result"]
    assert [one["recipe"] for one in first["refused"]] == ["fp8-block"]
    assert quantkit("recommend", "llama-3-80b", "--json").envelope["error"]["code"] == "unknown-model"


def test_recommend_refuses_what_it_cannot_rank(quantkit: Any, bundle: Path) -> None:
    assert "quantkit recommend hf:org/a-model@main --target" in quantkit("recommend", bundle).err
    network = quantkit("recommend", "fashion-mnist-cnn").err
    assert "no config.json to read sizes from" in network
    assert "quantkit compile fashion-mnist-cnn --recipe int8-network" in network
    models = bundle.parent / "models"
    (models / "one").mkdir(parents=True)
    (models / "one" / "config.json").write_text("{}")
    assert f"1 model below it; sizes are read from config.json; give one of them: {models / 'one'}" in (
        quantkit("recommend", models).err
    )


def test_version_prints_the_package_version(quantkit: Any) -> None:
    import quantkit as package

    assert quantkit("--version").out == f"quantkit {package.__version__}\n"


def test_a_shell_completes_commands(quantkit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "--install-completion" in quantkit("--help").out
    for name, value in (("_QUANTKIT_COMPLETE", "complete_bash"), ("COMP_WORDS", "quantkit com"), ("COMP_CWORD", "1")):
        monkeypatch.setenv(name, value)
    ran = quantkit()
    assert (ran.code, ran.err, ran.out.split()) == (0, "", ["compile", "compare"])


@pytest.mark.parametrize(
    ("arguments", "code", "part"),
    [
        (["compil"], "usage", "'compile'"),
        (["compile", "--recip", "x"], "usage", "--recipe"),
        (["compile", "--recipe"], "usage", "--recipe"),
        (["compile", "--recipe", "float", "--recipe=int4-best"], "usage", "--recipe: given twice"),
        (["tax", "--format", "int4", "--format", "int8"], "usage", "all in one: --format F,F"),
        (["compare", "a", "b", "--batch", "1", "--batch", "8"], "usage", "all in one: --batch N,N"),
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
        (["compile", "./no.gguf", "--recipe", "rtn-int4"], "file-missing", "./no.gguf: no such file or folder;"),
        (["verify", "/nowhere"], "not-a-bundle", "/nowhere"),
        (["measure", "/nowhere"], "not-a-bundle", "/nowhere"),
        (["compare", "/nowhere", "/nor/here"], "not-a-bundle", "/nowhere"),
        (["compare", "x", "y", "--latency-margin", "nan"], "margin-invalid", "--latency-margin"),
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


@pytest.mark.parametrize(
    ("problem", "code", "exit_code"),
    [
        (KeyboardInterrupt(), "interrupted", 75),
        (RuntimeError("a bug"), "internal-error", 2),
        (MemoryError(), "out-of-memory", 2),
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


def _quantkit() -> str:
    return shlex.join(forked.python("-m", "quantkit", light=True))


def test_a_reader_that_has_enough_is_no_error() -> None:
    command = f"{sys.executable} -m quantkit list --json | head -c 1 > /dev/null; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout == "0\n"
    assert not done.stderr


def test_what_a_library_prints_past_python_is_not_on_stdout() -> None:
    script = "import os, quantkit.report.catalog as c\nfound = c.listing\n"
    script += "c.listing = lambda *a, **k: (os.write(1, b'a solver speaks\\n'), found(*a, **k))[1]\n"
    script += "from quantkit.cli import main\nmain()"
    done = forked.run("-c", script, "list", "--json", light=True, check=True)
    assert json.loads(done.stdout)["exit"] == 0
    assert "a solver speaks" in done.stderr


def test_without_a_stdout_nothing_is_printed() -> None:
    command = f"{_quantkit()} list >&-; echo $? >&2"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert done.stderr == "0\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_signals_stop_safely_with_75(number: signal.Signals, tmp_path: Path) -> None:
    script = "import quantkit.report.catalog as c, time\nc.listing = lambda kind: time.sleep(30)\n"
    script += "print('ready', flush=True)\nfrom quantkit.cli import main\nmain()"
    # where these tests are a shell's background job, SIGINT is ignored, and children inherit that
    script = f"import signal\nsignal.signal({int(number)}, signal.SIG_DFL)\n" + script
    process = subprocess.Popen(
        forked.python("-c", script, "list", "--json", light=True),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(1.0)
    process.send_signal(number)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 75
    assert json.loads(out)["error"]["code"] == "interrupted"
    assert "Traceback" not in err


@pytest.mark.parametrize("form", ["", "--json"])
def test_a_full_disk_behind_stdout_is_said(form: str) -> None:
    command = f"{_quantkit()} list {form} > /dev/full; echo $?"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout == "75\n"
    assert done.stderr.startswith("error: [disk-full] stdout:") and done.stderr.count("\n") == 1


def test_without_a_stderr_the_answer_is_whole() -> None:
    command = f"{_quantkit()} show nothing-of-this-name --json 2>&-; echo $?"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    envelope, code = done.stdout.splitlines()
    assert json.loads(envelope)["error"] and code == "2"


class PanicException(BaseException):
    """What pyo3 makes of a panic in Rust."""


def test_a_panic_of_a_library_is_an_envelope(quantkit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def panic(kind: object) -> object:
        raise PanicException("index out of bounds")

    monkeypatch.setattr(catalog, "listing", panic)
    ran = quantkit("list", "--json")
    assert (ran.code, ran.envelope["error"]["code"]) == (2, "internal-error")


def test_what_is_no_number_is_null(quantkit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "listing", lambda kind: {"passes": {"a": float("nan"), "b": float("inf"), "c": 1.0}})
    monkeypatch.setattr("quantkit.report.terminal.listing", lambda listed: [])
    found = quantkit("list", "--json")
    assert found.code == 0 and found.envelope["result"] == {"passes": {"a": None, "b": None, "c": 1.0}}


def test_what_was_made_again_is_a_warning(quantkit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    listing = catalog.listing

    def rebuilt(kind: Any) -> Any:
        warnings.warn(Rebuilt("states/x is made again"), stacklevel=1)
        warnings.warn("a library's own", stacklevel=1)
        return listing(kind)

    monkeypatch.setattr(catalog, "listing", rebuilt)
    ran = quantkit("list", "--json")
    assert ran.envelope["warnings"] == ["states/x is made again"]
    assert ran.err == "! states/x is made again\n"


def test_a_terminal_obeys_nothing_that_a_bundle_says(quantkit: Any, bundle: Path) -> None:
    path = bundle / "manifest.json"
    data = json.loads(path.read_text(encoding="utf-8"))
    data["model"]["name"] = "\x1b[2Jgone"
    data["decisions"] = [{"pass": "rtn", "code": "note", "where": "a\x9bb", "reason": "\x1b]0;title\x07"}]
    path.write_text(json.dumps(data), encoding="utf-8")
    for arguments in (("show", bundle), ("verify", bundle), ("show", bundle, "--json")):
        ran = quantkit(*arguments)
        assert not {"\x1b", "\x9b", "\x07"} & set(ran.out + ran.err)
    assert "␛[2Jgone" in quantkit("show", bundle).out
