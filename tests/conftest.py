"""Fixtures for the tests of several packages."""

import atexit
import copy
import fcntl
import functools
import gc
import hashlib
import importlib.util
import marshal
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import forked
import hypothesis
import pytest
from _pytest.assertion import rewrite

# the matrices are tiny, so more threads would wait for one another; torch reads this at its first import
os.environ.setdefault("OMP_NUM_THREADS", "1")
# kernels run in Triton's interpreter, which must be chosen before the first import of Triton
os.environ.setdefault("TRITON_INTERPRET", "1")
_CACHE = "QUANTKIT_CACHE"


# an example's duration depends on how busy the machine is
hypothesis.settings.register_profile("quantkit", deadline=None)
hypothesis.settings.load_profile("quantkit")


def pytest_configure(config: pytest.Config) -> None:
    """Give the run a cache of its own, shared by all workers; tests neither read nor change the user's."""
    if _CACHE not in os.environ:
        folder = tempfile.mkdtemp(prefix="quantkit-tests-")
        os.environ[_CACHE] = folder
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    if forked.SOCKET not in os.environ:
        home = tempfile.mkdtemp(prefix="quantkit-forked-")
        config.add_cleanup(lambda: shutil.rmtree(home, ignore_errors=True))
        config.add_cleanup(forked.Server(f"{home}/socket").close)
        # workers begin with everything imported too
        config.option.tx = [f"popen//python={shlex.join(forked.python())}" for _ in getattr(config.option, "tx", [])]
    if hasattr(config, "workerinput"):
        rewrite._rewrite_test = _once_for_all(rewrite._rewrite_test)


def _once_for_all(rewritten: Callable[..., tuple[bytes, CodeType]]) -> Callable[..., tuple[bytes, CodeType]]:
    """Rewrite the assertions of a file in one worker for all: all files take 6 s, in a fresh clone in each worker."""

    def shared(file: Path, config: pytest.Config) -> tuple[bytes, CodeType]:
        name = hashlib.sha256(bytes(file)).hexdigest()
        with (Path(os.environ[forked.SOCKET]).parent / name).open("a+b") as store:
            fcntl.flock(store, fcntl.LOCK_EX)
            store.seek(0)
            if found := store.read():
                return marshal.loads(found)  # type: ignore[no-any-return]
            made = rewritten(file, config)
            store.write(marshal.dumps(made))
            return made

    return shared


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[Any]:
    """Collect no garbage meanwhile: every worker imports all files, and none of that becomes garbage."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_unconfigure() -> None:
    """Unfreeze what `_settled_heap` froze: frozen objects are never freed, and DuckDB reports them as leaks.

    Only when Python ends, because pytest walks the heap several times before.
    """
    atexit.register(gc.unfreeze)


# files of half a minute each; if one began last, its worker would end alone
_LONG = ("test_readme.py", "test_golden.py", "test_one_file.py", "test_link.py", "test_onnx.py", "test_purpose.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first: one worker runs them while the others run the rest."""
    items.sort(key=lambda item: _LONG.index(item.path.name) if item.path.name in _LONG else len(_LONG))


@pytest.fixture(scope="session", autouse=True)
def _no_runtimes_of_the_user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Hide runtimes that the user has added: a compile would load its checkpoint in them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_DATA_HOME", str(tmp_path_factory.mktemp("data")))
        yield


@pytest.fixture(autouse=True)
def _settled_heap() -> None:
    """Freeze the heap: with many libraries a collection takes a second, and timings and compiles begin with one.

    Not where few objects have come since the last freeze: a walk takes longer than most tests.
    """
    new, young, old = gc.get_count()
    if new > 5000 or young > 5 or old:  # after the collection of tests all are new
        gc.collect()
        gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _disk_without_waits() -> None:
    """Wait for no disk: what a killed process has written is there, and `faults/test_power.py` plays power cuts.

    What is no descriptor still fails. Forked children do the same; a fresh Python waits.
    """
    os.fsync = os.fstat


@pytest.fixture(scope="session", autouse=True)
def _language_once() -> Iterator[None]:
    """Patch Triton's language once. Its interpreter walks through all of it at each function call.

    A patched function is no longer a builtin, so a second walk would change nothing.
    """
    if "triton.runtime.interpreter" not in sys.modules:
        yield  # no collected test runs a kernel
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
    """Name a folder for results that one worker makes and all read (`small_onnx`)."""
    own = tmp_path_factory.getbasetemp()
    os.environ["QUANTKIT_TESTS_SHARED"] = str(own.parent if "PYTEST_XDIST_WORKER" in os.environ else own)


@pytest.fixture(scope="session", autouse=True)
def _operators_once() -> Iterator[None]:
    """Make torch's table of ONNX operators once a process; torch makes it for each export, in half a second."""
    if not {"quantkit.model.to_onnx", "small_onnx"} & set(sys.modules):
        yield  # no collected test exports
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
def _traces_once(_shared_by_workers: None) -> Iterator[None]:
    """Trace equal transformers once for all workers: see `traces`; `fresh_traces` undoes it."""
    if not {"quantkit.exporters.trace.transformer", "quantkit.pipeline"} & set(sys.modules):
        yield  # no collected test exports
        return
    import traces

    from quantkit.exporters.trace import transformer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformer, "_traced", traces.once(transformer._traced))
        yield


@pytest.fixture(scope="module")
def fresh_traces() -> Iterator[None]:
    """Trace in this process, as a user's does."""
    import traces

    from quantkit.exporters.trace import transformer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformer, "_traced", traces.own(transformer._traced))
        yield


@pytest.fixture(scope="session", autouse=True)
def _frozen_heap() -> Iterator[None]:
    """Count no frozen objects: each compile asks whether there are some, and the walk takes 0.08 s."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "get_freeze_count", lambda: 1)
        yield


@pytest.fixture(scope="session", autouse=True)
def _shapes_of_answers() -> Iterator[None]:
    """Compare the `--json` shape of every command's answer with its recorded shape: see `golden/shapes.py`."""
    if "quantkit.cli.frame" not in sys.modules:
        yield  # no collected test runs a command
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


@pytest.fixture(scope="session", autouse=True)
def _forked_children() -> Iterator[None]:
    """Work in child processes begins with everything imported; `fresh_children` undoes it."""
    if "quantkit.runtimes.child" not in sys.modules:
        yield
        return
    from quantkit.runtimes import child

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(child, "machine", forked)
        yield


@pytest.fixture
def fresh_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in child processes begins in a new Python, as a user's does."""
    from quantkit import machine
    from quantkit.runtimes import child

    monkeypatch.setattr(child, "machine", machine)


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a cache that no other test has."""
    monkeypatch.setenv(_CACHE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def few_scored(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Score 300 positions, in a cache of one's own."""
    monkeypatch.setattr("quantkit.pipeline.blocks.tokens.SCORED", 300)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Set torch to one thread, whatever the environment says: more threads would wait for one another."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def fake_builder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `import tensorrt` give `fake_build/tensorrt.py`, here and in processes that build."""
    folder = Path(__file__).parent / "fake_build"
    spec = importlib.util.spec_from_file_location("tensorrt", folder / "tensorrt.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "tensorrt", module)
    # Polygraphy's loaders keep the first library that they import
    for name in [name for name in sys.modules if name.partition(".")[0] == "polygraphy"]:
        monkeypatch.delitem(sys.modules, name)
    spec.loader.exec_module(module)
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=":")


def _tokenizer_of_bytes(around: str, merges: tuple[tuple[str, str], ...] = ()) -> Any:
    from zoo.shrink import tokenizer_of_bytes

    return tokenizer_of_bytes(around, merges)


@pytest.fixture(scope="session")
def byte_tokenizer() -> Any:
    """Return a transformers tokenizer with one token a byte: ids 0..255, `<s>` 256, `</s>` 257; 258 in all.

    It puts `<s>` before a text and `</s>` after it.
    """
    return _tokenizer_of_bytes("<s> $A </s>")


@pytest.fixture(scope="session")
def bos_tokenizer() -> Any:
    """Return the same with only `<s>` before a text, like Llama's and Gemma's."""
    return _tokenizer_of_bytes("<s> $A")


@pytest.fixture(scope="session")
def merging_tokenizer() -> Any:
    """Return `bos_tokenizer` with two merges, 260 tokens in all; llama.cpp takes no tokenizer without merges."""
    return _tokenizer_of_bytes("<s> $A", (("t", "h"), ("th", "e")))


@pytest.fixture(scope="session")
def chat_tokenizer() -> Any:
    """Return `bos_tokenizer` with a chat template that writes `<s>` itself, like Llama's and Gemma's."""
    tokenizer = _tokenizer_of_bytes("<s> $A")
    tokenizer.chat_template = (
        "{{ bos_token }}{% if messages[0].role != 'user' %}{{ raise_exception('a user begins') }}{% endif %}"
        "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"
    )
    return tokenizer


@pytest.fixture(scope="session")
def bare_tokenizer() -> Any:
    """Return the same with nothing around a text, like SmolLM2's and Qwen's."""
    return _tokenizer_of_bytes("$A")
