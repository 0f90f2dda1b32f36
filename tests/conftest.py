"""Fixtures that more than one floor uses."""

from __future__ import annotations

import atexit
import copy
import functools
import gc
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

# the matrices are tiny: more threads would only wait for one another; read when torch is first imported
os.environ.setdefault("OMP_NUM_THREADS", "1")
# kernels run in Triton's interpreter, which has to be chosen before anything imports Triton
os.environ.setdefault("TRITON_INTERPRET", "1")
_CACHE = "QUANTKIT_CACHE"


# how long an example takes says how busy the machine is
hypothesis.settings.register_profile("quantkit", deadline=None)
hypothesis.settings.load_profile("quantkit")


def pytest_configure(config: pytest.Config) -> None:
    """A cache of the run's own, which all workers share: what tests measure and make is nothing to a user's."""
    if _CACHE not in os.environ:
        folder = tempfile.mkdtemp(prefix="quantkit-tests-")
        os.environ[_CACHE] = folder
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[Any]:
    """Without looking for garbage: every worker imports all files, and nothing of that is ever garbage."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_unconfigure() -> None:
    """What `_settled_heap` froze is garbage at the end: frozen, it is never freed, and DuckDB reports it as leaked.

    Not before Python ends: pytest looks through the heap before that, several times.
    """
    atexit.register(gc.unfreeze)


# of half a minute each: begun last, one worker would end alone
_LONG = ("test_readme.py", "test_golden.py", "test_one_file.py", "test_link.py", "test_onnx.py", "test_purpose.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first, which one worker runs while another runs all the rest."""
    items.sort(key=lambda item: _LONG.index(item.path.name) if item.path.name in _LONG else len(_LONG))


@pytest.fixture(autouse=True)
def _settled_heap() -> None:
    """A heap of many libraries takes a second to look through, and what is timed or compiled collects garbage first."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _language_once() -> Iterator[None]:
    """Triton's interpreter patches its language for a kernel, and goes through all of it again at each function call.

    What is patched is no builtin any more, so that the second time finds nothing.
    """
    if "triton.runtime.interpreter" not in sys.modules:
        yield  # nothing that was collected runs a kernel
        return
    from triton import language
    from triton.runtime import interpreter

    patched = interpreter._patch_lang

    def unless_done(function: Any) -> Any:
        named = [each for each in function.__globals__.values() if each is language or each is language.core]
        return (
            patched(function)
            if any(language.core.is_builtin(each.load) for each in named)
            else interpreter._LangPatchScope()
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", unless_done)
        yield


@pytest.fixture(scope="session", autouse=True)
def _shared_by_workers(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A folder for what one worker makes and all need (`small_onnx`)."""
    own = tmp_path_factory.getbasetemp()
    os.environ["QUANTKIT_TESTS_SHARED"] = str(own.parent if "PYTEST_XDIST_WORKER" in os.environ else own)


@pytest.fixture(scope="session", autouse=True)
def _operators_once() -> Iterator[None]:
    """torch makes the table of ONNX's operators anew for each export, in half a second: here once a process."""
    if not {"quantkit.model.to_onnx", "small_onnx"} & set(sys.modules):
        yield  # nothing that was collected exports
        return
    from torch.onnx._internal.exporter._constants import TORCHLIB_OPSET
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    made = functools.cache(ONNXRegistry.from_torchlib)

    def of_its_own(opset_version: int = TORCHLIB_OPSET) -> Any:
        found = copy.copy(made(opset_version))
        found.functions = {name: list(each) for name, each in found.functions.items()}
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ONNXRegistry, "from_torchlib", staticmethod(of_its_own))
        yield


@pytest.fixture(scope="session", autouse=True)
def _shapes_of_answers() -> Iterator[None]:
    """Whatever a command answers in a test has the shape in `--json` that it always had: see `golden/shapes.py`."""
    if "quantkit.cli.frame" not in sys.modules:
        yield  # nothing that was collected runs a command
        return
    from golden import shapes

    from quantkit.cli import frame

    printed = frame._print

    def checked(answer: Any, name: str, code: int, out: Any, *, as_json: bool) -> None:
        shapes.check(frame._envelope(answer, name, code))
        printed(answer, name, code, out, as_json=as_json)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frame, "_print", checked)
        yield
    shapes.keep()


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Whatever the environment says: threads would only wait for one another."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def fake_builder(monkeypatch: pytest.MonkeyPatch) -> None:
    """`import tensorrt` is `fake_build/tensorrt.py`, here and in processes that build."""
    folder = Path(__file__).parent / "fake_build"
    spec = importlib.util.spec_from_file_location("tensorrt", folder / "tensorrt.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "tensorrt", module)
    # whose loaders keep the library that they have met first
    for name in [name for name in sys.modules if name.partition(".")[0] == "polygraphy"]:
        monkeypatch.delitem(sys.modules, name)
    spec.loader.exec_module(module)
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=":")


def _tokenizer_of_bytes(around: str, merges: tuple[tuple[str, str], ...] = ()) -> Any:
    from zoo.shrink import tokenizer_of_bytes

    return tokenizer_of_bytes(around, merges)


@pytest.fixture(scope="session")
def byte_tokenizer() -> Any:
    """A transformers tokenizer with one token a byte: ids 0..255, then `<s>` 256 and `</s>` 257; 258 in all.

    It puts `<s>` before a text, and `</s>` after it.
    """
    return _tokenizer_of_bytes("<s> $A </s>")


@pytest.fixture(scope="session")
def bos_tokenizer() -> Any:
    """The same, with `<s>` before a text and nothing after it, as Llama's and Gemma's."""
    return _tokenizer_of_bytes("<s> $A")


@pytest.fixture(scope="session")
def merging_tokenizer() -> Any:
    """As `bos_tokenizer`, with two merges, without which llama.cpp takes none: 260 tokens in all."""
    return _tokenizer_of_bytes("<s> $A", (("t", "h"), ("th", "e")))


@pytest.fixture(scope="session")
def chat_tokenizer() -> Any:
    """As `bos_tokenizer`, with a chat template that writes `<s>` itself, as Llama's and Gemma's do."""
    tokenizer = _tokenizer_of_bytes("<s> $A")
    tokenizer.chat_template = (
        "{{ bos_token }}{% if messages[0].role != 'user' %}{{ raise_exception('a user begins') }}{% endif %}"
        "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"
    )
    return tokenizer


@pytest.fixture(scope="session")
def bare_tokenizer() -> Any:
    """The same, with nothing around a text, as SmolLM2's and Qwen's."""
    return _tokenizer_of_bytes("$A")
