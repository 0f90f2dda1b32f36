"""Programs in processes forked from one that has imported what they need: a start takes 0.1 s, not 1 or 5.

    python forked.py SOCKET                     two servers for a run of tests; each imports at its first request:
                                                LIGHT, and HEAVY too (on SOCKET.heavy, a fork of the first)
    python -I -S forked.py SOCKET -c PROGRAM …  stands for the process: streams, folder, variables, path, exit code

A server has one thread. A signal to the client reaches the program; the program's process group ends with the client.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from importlib.machinery import ModuleSpec
from typing import Any

SOCKET = "QUANTKIT_TESTS_FORKED"
CLI = "from quantkit.cli import main\nmain()"
# what a command line without torch imports; none that a test replaces
LIGHT = (
    *("quantkit.cli", "quantkit.report.catalog", "quantkit.report.terminal", "quantkit.pipeline.verdict"),
    *("quantkit.pipeline.plan", "quantkit.bundle", "quantkit.nightly.run"),
)
HEAVY = (
    *("torch", "transformers.models.llama.modeling_llama", "transformers.models.auto.modeling_auto"),
    *("transformers.models.auto.tokenization_auto", "compressed_tensors", "scipy.optimize", "onnx", "onnxruntime"),
    *("quantkit.pipeline.compile", "quantkit.pipeline.blocks.work", "quantkit.graph.fuse", "quantkit.model.device"),
    *("quantkit.measurement.accuracy.score", "quantkit.measurement.timing.speed", "quantkit.graph.codes.solve"),
    *("quantkit.report.bundle.document", "quantkit.pipeline.graphs.subject"),
)
# to the client -> to the program
_FORWARDED = {
    **{number: number for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)},
    signal.SIGUSR1: signal.SIGKILL,
}


def python(*arguments: str, light: bool = False) -> list[str]:
    """Return a command for a program that has everything imported, as `machine.python` returns one for a fresh Python.

    Args:
        arguments: `-c PROGRAM …` or `-m MODULE …`.
        light: whether the program imports torch and the rest itself, if at all.
    """
    return [sys.executable, "-I", "-S", __file__, os.environ[SOCKET] + ("" if light else ".heavy"), *arguments]


def run(*arguments: object, light: bool = False, check: bool = False, **how: Any) -> subprocess.CompletedProcess[str]:
    """Run a program of `python`, and return what it printed."""
    command = python(*map(str, arguments), light=light)
    return subprocess.run(command, capture_output=True, text=True, check=check, **how)


def without(names: tuple[str, ...], program: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a program where packages of these names are not installed; its `missing.names` can be changed."""
    begin = f"import sys\nfrom forked import Missing\nsys.meta_path.insert(0, missing := Missing({names!r}))\n"
    return run("-c", begin + program, *arguments, light=True)


def kill(process: subprocess.Popen[Any]) -> None:
    """Kill a program by SIGKILL; it has ended, and not its client alone."""
    process.send_signal(signal.SIGUSR1)
    process.wait()


class Missing:
    """Meta-path finder that hides packages of these names."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = frozenset(names)
        assert not self.names & set(sys.modules), "it was imported already"

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None


class Server:
    """Servers of a run of tests; they end with this process.

    Args:
        path: of the socket.
    """

    def __init__(self, path: str) -> None:
        os.environ[SOCKET] = path
        command = [sys.executable, "-P", __file__, path]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        assert self._process.stdout is not None
        self._process.stdout.readline()  # it listens

    def close(self) -> None:
        del os.environ[SOCKET]
        self._process.communicate(timeout=60)


# --- the client -------------------------------------------------------------------------------------------------------


def _ask(path: str, arguments: list[str]) -> int:
    """Have the program run; return its status, as of `waitpid`."""
    streams = [number for number in range(3) if _is_open(number)]
    for _ in range(len(streams), 3):
        os.open(os.devnull, os.O_RDWR)  # else the connection would get the number of a closed stream
    asked = {"arguments": arguments, "streams": streams}
    asked |= {"folder": os.getcwd(), "environment": dict(os.environ)}  # noqa: PTH109 (imports little)
    asked["ignored"] = [number for number in _FORWARDED if signal.getsignal(number) == signal.SIG_IGN]
    data = json.dumps(asked).encode()
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(path)
        # a signal that came earlier would stand in the middle of the request
        signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
        for number in _FORWARDED:
            signal.signal(number, lambda number, _: server.send(bytes([_FORWARDED[signal.Signals(number)]])))
        socket.send_fds(server, [len(data).to_bytes(8, "big")], streams)
        server.sendall(data)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
        for number in range(2):  # closed when the program closes them
            os.close(number)
        answer = server.recv(8)
    if not answer:
        raise ConnectionError("the server of forked processes has died")
    return int.from_bytes(answer, "big")


def _is_open(number: int) -> bool:
    with contextlib.suppress(OSError):
        os.fstat(number)
        return True
    return False


def _end_as(status: int) -> None:
    if os.WIFSIGNALED(status):
        _die(os.WTERMSIG(status))
    os._exit(os.WEXITSTATUS(status))


def _die(number: int) -> None:
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


# --- the servers ------------------------------------------------------------------------------------------------------


def _serve(listener: socket.socket, modules: tuple[str, ...], second: socket.socket | None = None) -> None:
    """Serve until standard input ends; another server begins at the first request to `second`."""
    import selectors

    clients, imported = dict[int, socket.socket](), False
    ended, wake = socket.socketpair()
    for end in (ended, wake):
        end.setblocking(False)
    signal.set_wakeup_fd(wake.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    selector = selectors.DefaultSelector()
    for watched in filter(None, (sys.stdin, ended, listener, second)):
        selector.register(watched, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            stream: Any = key.fileobj
            if stream is sys.stdin:
                for child in clients:
                    _signal(child, b"")
                while _reaped(selector, clients, 0):
                    pass
                return
            if stream is ended:
                ended.recv(4096)
                while _reaped(selector, clients, os.WNOHANG):
                    pass
            elif stream in (listener, second):
                if not imported:
                    imported = True
                    _import(modules)
                client, asked, streams = _request(listener) if stream is listener else (None, {}, [])
                child = os.fork()
                if child == 0:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    for end in filter(None, (selector, ended, wake, listener, client, *clients.values())):
                        end.close()
                    if client is not None:
                        _be(asked, streams)
                    assert second is not None
                    _serve(second, (*LIGHT, *HEAVY))
                    os._exit(0)
                if client is None:
                    selector.unregister(stream)
                    stream.close()
                    second = None
                else:
                    clients[child] = client
                    selector.register(client, selectors.EVENT_READ, child)
                for number in streams:
                    os.close(number)
            elif stream.fileno() >= 0:
                try:
                    numbers = stream.recv(64)
                except ConnectionResetError:
                    numbers = b""
                _signal(key.data, numbers)
                if not numbers:
                    selector.unregister(stream)


def _request(listener: socket.socket) -> tuple[socket.socket, dict[str, Any], list[int]]:
    client = listener.accept()[0]
    length, streams, *_ = socket.recv_fds(client, 8, 3)
    left, parts = int.from_bytes(length, "big"), list[bytes]()
    while left and (part := client.recv(left)):
        parts.append(part)
        left -= len(part)
    if left:  # the client was killed meanwhile: it gets a program that ends at once
        return client, {}, streams
    return client, json.loads(b"".join(parts)), streams


def _signal(child: int, numbers: bytes) -> None:
    """Pass signals on; a client that has ended takes the program with it."""
    with contextlib.suppress(ProcessLookupError):
        for number in numbers:
            os.kill(child, number)
        if not numbers:
            os.killpg(child, signal.SIGKILL)


def _reaped(selector: Any, clients: dict[int, socket.socket], options: int) -> bool:
    try:
        child, status = os.waitpid(-1, options)
    except ChildProcessError:
        return False
    client = clients.pop(child, None)
    if client is not None:
        with contextlib.suppress(KeyError, OSError):  # it was killed
            selector.unregister(client)
            client.send(status.to_bytes(8, "big"))
        client.close()
    return child != 0


def _import(modules: tuple[str, ...]) -> None:
    import gc
    from importlib import import_module

    gc.disable()
    for module in modules:
        import_module(module)
    os.fsync = os.fstat  # type: ignore[assignment]  # as in `conftest._disk_without_waits`
    from quantkit.runtimes import child

    # a program's own children begin so too
    child.machine = sys.modules["forked"] = sys.modules["__main__"]
    gc.collect()
    gc.freeze()
    gc.enable()


def _be(asked: dict[str, Any], streams: list[int]) -> None:
    """Be the program, to its end."""
    import atexit
    import runpy
    import tempfile
    import threading
    import traceback
    import types

    os.setsid()
    if not asked:
        os._exit(1)
    for number, received in zip(asked["streams"], streams, strict=True):
        os.dup2(received, number)
        os.close(received)
    # anew: they know what the server's were, such as a file that can be sought in
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream: Any = None
        if number in asked["streams"]:
            errors = "backslashreplace" if number == 2 else None
            stream = os.fdopen(number, "w" if number else "r", 1 if number == 2 else -1, errors=errors, closefd=False)
        else:
            os.close(number)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    for number in asked["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    os.chdir(asked["folder"])
    before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ.clear()
    os.environ.update(asked["environment"])
    tempfile.tempdir = None
    kind, program, *rest = (word for word in asked["arguments"] if word not in ("-P", "-u"))
    ahead = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    ahead[:0] = [] if "-P" in asked["arguments"] else [""] if kind == "-c" else [asked["folder"]]
    sys.path[:] = [*ahead, *(entry for entry in sys.path if entry not in before)]
    sys.argv = [kind, *rest]
    code = 0
    try:
        if kind == "-m":
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            sys.modules["__main__"] = main = types.ModuleType("__main__")
            exec(compile(program, "<string>", "exec"), main.__dict__)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if stop.code is not None and not isinstance(stop.code, int):
            print(stop.code, file=sys.stderr)
    except BaseException as problem:
        code = 1
        with contextlib.suppress(Exception):
            traceback.print_exc()
        if isinstance(problem, KeyboardInterrupt):
            _die(signal.SIGINT)
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        for out in filter(None, (sys.stdout, sys.stderr)):
            out.flush()
    finally:
        os._exit(code)


def _main(path: str, *arguments: str) -> None:
    if arguments:
        _end_as(_ask(path, list(arguments)))
    first, second = (socket.socket(socket.AF_UNIX) for _ in range(2))
    for listener, name in ((first, path), (second, f"{path}.heavy")):
        listener.bind(name)
        listener.listen(64)
    print(flush=True)
    _serve(first, LIGHT, second)


if __name__ == "__main__":
    _main(*sys.argv[1:])
