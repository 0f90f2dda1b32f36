"""One way to do what every room needs: processes, atomic writes, randomness by resampling."""

import ast
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from house.source import PACKAGE, files, nodes

# what they read is the package's own, the cache's, the system's, or was hashed
OURS = {
    *("quantkit.limits", "quantkit.machine", "quantkit.plugins", "quantkit.pipeline.baseline", "quantkit.target"),
    *("quantkit.bundle.build", "quantkit.bundle.bundle", "quantkit.bundle.cached", "quantkit.model.source.files"),
    *("quantkit.exporters.tensorrt.timings", "quantkit.runtimes.tensorrt.engine", "quantkit.runtimes.tensorrt.file"),
    *("quantkit.measurement.timing.clocks", "quantkit.measurement.timing.speed", "quantkit.nightly.config"),
    *("quantkit.nightly.page", "quantkit.nightly.bundles", "quantkit.pipeline.engines"),
    *("quantkit.pipeline.reload", "quantkit.pipeline.measure", "quantkit.planning.support"),
    *("quantkit.planning.compiling", "quantkit.report.catalog"),
    *("quantkit.report.kit.html", "quantkit.runtimes.onnxruntime.session", "quantkit.tuning.answer"),
    # on a device, where nothing of ours is; and the programs that are sent there
    *("quantkit.devices.sent.work", "quantkit.devices.sent.files", "quantkit.devices.openssh"),
    *("quantkit.devices.probed", "quantkit.devices.link"),
    "quantkit.tuning.placement",
}


@cache
def calls(module: str) -> list[tuple[int, str]]:
    """(line, dotted name) of everything that a module calls by a dotted name."""
    called = (node for node in nodes(module) if isinstance(node, ast.Call))
    return [(node.lineno, ast.unparse(node.func)) for node in called if isinstance(node.func, ast.Attribute)]


@pytest.mark.parametrize(
    ("names", "homes", "instead"),
    [
        (
            {"subprocess.Popen", "multiprocessing.get_context", "multiprocessing.Process"},
            # the system's OpenSSH; and what starts a job, or a server, where there is nothing of ours
            {
                *("quantkit.runtimes.child", "quantkit.devices.openssh", "quantkit.devices.sent.work"),
                "quantkit.runtimes.vllm.inside",
            },
            "a process of its own is started by runtimes/child.py, which limits, cleans up and explains",
        ),
        (
            {"subprocess.run", "subprocess.call", "subprocess.check_output", "os.system", "os.popen", "os.execv"},
            # pip, compilers, and what asks a system how it is
            {
                *("quantkit.devices.probed", "quantkit.model.source.packaged", "quantkit.kernels.cpu.library"),
                *("quantkit.kernels.ahead", "quantkit.bundle.seal", "quantkit.devices.openssh"),
                *("quantkit.machine", "quantkit.measurement.timing.clocks", "quantkit.nightly.run"),
                *("quantkit.devices.sent.probe", "quantkit.runtimes.apart"),
            },
            "a program is run by one of these few modules",
        ),
        (
            {"os.replace", "os.rename", "os.fsync"},
            # a journal is appended to, weights are streamed
            {
                "quantkit.bundle.disk",
                "quantkit.bundle.build",
                "quantkit.model.source.weights",
                "quantkit.devices.sent.files",
            },
            "files are written by bundle/disk.py, which leaves the old state or the new one",
        ),
        (
            {"pickle.load", "pickle.loads", "torch.load"},
            {"quantkit.model.source.packaged"},  # with `weights_only`
            "nothing is unpickled",
        ),
        (
            # any object's: `AutoConfig.from_pretrained`, `model_class.from_pretrained`, `getattr(x, y).from_pretrained`
            {"*.from_pretrained"},
            {"quantkit.model.source.pretrained"},
            "models, configs and tokenizers are opened by model/source/pretrained.py, which runs none of their code",
        ),
        (
            {"*.read_text", "*.read_bytes"},
            OURS,
            "what others may have written is read by quantkit/limits.py, which takes no pipe and nothing too large",
        ),
    ],
)
def test_one_way(names: set[str], homes: set[str], instead: str) -> None:
    found = [
        f"{module}:{line}: {name}"
        for module in files()
        if module not in homes
        for line, name in calls(module)
        if name in names or f"*.{name.rpartition('.')[2]}" in names
    ]
    assert not found, instead


def test_no_child_of_ours_imports_from_the_current_folder() -> None:
    """`machine.python` starts a Python with `-P`; what is sent to a device, where nothing of ours is, by itself."""
    lists = [
        (module, [ast.unparse(each) for each in node.elts[:2]])
        for module in files()
        for node in nodes(module)
        if isinstance(node, ast.List | ast.Tuple) and node.elts and ast.unparse(node.elts[0]) == "sys.executable"
    ]
    assert {module for module, _ in lists} == {"quantkit.machine", "quantkit.devices.sent.work"}
    assert all(words[1] in ("'-P'", "'-I'") for _, words in lists)


@pytest.mark.parametrize(
    "words",
    [
        ("-m", "quantkit", "list", "formats"),
        ("-P", "-c", "from quantkit.model.source import packaged as p; p._pip_download('numpy==0', p.Path('.'))"),
    ],
)
def test_files_of_the_current_folder_are_not_run(words: tuple[str, ...], tmp_path: Path) -> None:
    for name in ("json", "pip", "random", "torch", "yaml"):
        (tmp_path / f"{name}.py").write_text("open('ran', 'a').close()")
    variables = {**os.environ, "PYTHONPATH": str(PACKAGE.parent), "PIP_NO_INDEX": "1"}
    command = [sys.executable, *words]
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False)
    assert not (tmp_path / "ran").exists(), done.stderr
    assert "q8_0" in done.stdout if "-m" in words else "No matching distribution" in done.stderr
