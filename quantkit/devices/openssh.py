"""Commands on a device, by the system's `ssh`: one shared connection, host keys checked, no password asked.

A command is a program of `devices.sent`, for the device's own Python. It is sent on standard input, with what it is
asked; its answer begins behind a mark that this side has drawn by lot, so that what a shell says at login is none.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import shlex
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import IO, Any
from urllib.parse import urlsplit

from quantkit.errors import InputError, QuantkitError, Stopped

# bytes of an answer, and of what a shell may say before it; of what is kept of the errors
MOST, _NOISE, _SAID = 1 << 22, 1 << 16, 1 << 13
# seconds: for a connection; until a silent one counts as lost; that a shared one waits for the next command
_CONNECT, _SILENT, _KEPT = 20, 10, 30
# seconds before the first new trial; each later one waits twice as long
_PAUSE = 0.1
# names of the Python that is looked for there; the first that is recent enough is used
PYTHONS = ("python3", "python3.14", "python3.13", "python3.12", "python3.11", "python")
_NEEDED = "import sys; sys.exit(sys.version_info < (3, 11))"
_FIND = (
    'for p in "$@"; do if command -v "$p" >/dev/null 2>&1 && "$p" -ISc "$N" 2>/dev/null; '
    'then exec "$p" -I -c "$B"; fi; done; '
    # of the first what it says of itself, or the shell of it: no quotes and no line feeds, whatever it is
    'echo "$M"; V=$("$1" --version 2>&1 | tr -cd "[:alnum:] ./:_+-" | head -c 60); '
    'echo "{\\"error\\": \\"no-python\\", \\"value\\": \\"$V\\"}"'
)
_RUN = "import sys; i = sys.stdin.buffer; exec(i.read(int(i.readline())))"
# what OpenSSH says -> the code of the error, its rule, its remedy
_SAYS: Mapping[tuple[str, ...], tuple[str, str, str]] = {
    ("Could not resolve hostname", "Name or service not known"): (
        *("no-such-host", "its name is found", "check the address, or name it in ~/.ssh/config"),
    ),
    ("REMOTE HOST IDENTIFICATION HAS CHANGED", "Offending"): (
        *("host-key-changed", "a device keeps its host key; another may stand in its place"),
        "if it was installed anew: ssh-keygen -R HOST, then ssh to it once",
    ),
    ("Host key verification failed", "host key is known"): (
        *("host-key-unknown", "host keys are checked"),
        "ssh to it once, compare the key that it shows, and accept it",
    ),
    ("Permission denied", "Too many authentication failures", "Unable to negotiate"): (
        *("key-refused", "OpenSSH gets in without asking", "ssh-copy-id, or ssh-add the key that it knows"),
    ),
    ("Connection refused", "No route to host", "Network is unreachable", "Connection timed out", "Host is down"): (
        *("device-unreachable", "it is on, and its sshd listens", "check that it is on, and the port"),
    ),
    ("Bad configuration option", "percent_expand", "Could not request", "Bad owner or permissions", "bad port"): (
        *("ssh-config-invalid", "OpenSSH reads its configuration", "mend ~/.ssh/config"),
    ),
}
# what a program of `devices.sent` finds wrong -> the code of the error, its value, its rule, its remedy
_FINDS: Mapping[str, tuple[str, str, str, str]] = {
    "no-python": (
        *("wrong-python", "{value}", "a device needs Python 3.11 or later"),
        "install it, or name one: --python PATH",
    ),
    "no-space": (
        *("device-full", "{value}", "files and packages fit on its disk", "make room there, or another --workdir"),
    ),
    "workdir-foreign": (
        *("workdir-foreign", "it holds something else", "the workdir is quantkit's own", "another --workdir"),
    ),
    "workdir-version": (
        *("workdir-version", "layout {value}", "another version's files are not touched"),
        "delete that folder there, or another --workdir",
    ),
    "lock": (
        *("lock-foreign", "{value} is a link, no regular file, one of several names, or may not be opened"),
        "who works on a device holds its locks",
        "delete it there; a lock of the machine goes by another name with QUANTKIT_LOCK=PATH there",
    ),
    "denied": ("workdir-unwritable", "{value}", "the workdir can be written", "another --workdir"),
}
# so a device answers that was there, and starts again
_STARTING = ("no-such-host", "device-unreachable")


SCHEME = "ssh://"
# neither begins with a dash: OpenSSH would take it for an option
_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*|[0-9A-Fa-f]*:[0-9A-Fa-f:.]*(%[A-Za-z0-9_.-]+)?")
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@\\-]*")
_WORKDIR = re.compile(r"(~/|/)[A-Za-z0-9_@+,. -]+(/[A-Za-z0-9_@+,. -]+)*")
WORKDIR = "~/quantkit"


@dataclass(frozen=True)
class Address:
    """The address of a device.

    Args:
        host: a name, an address, or what `~/.ssh/config` calls it.
        user: None: as OpenSSH decides.
        port: None: as OpenSSH decides.
    """

    host: str
    user: str | None = None
    port: int | None = None

    @classmethod
    def read(cls, text: str, *, where: str = "address") -> Address:
        """Read `ssh://[USER@]HOST[:PORT]`. Raises InputError `address-invalid`."""

        def refused(rule: str) -> InputError:
            shown = re.sub(r"//[^@]*@", "//…@", text)[:80]  # there may be a password in it
            remedy = "ssh://pi@raspberrypi.local, or ssh://NAME of ~/.ssh/config"
            return InputError("address-invalid", where, shown, rule, remedy)

        if not text.startswith(SCHEME) or not text.isprintable():
            raise refused("an address begins with ssh://")
        try:
            parts = urlsplit(text)
            port = parts.port
        except ValueError as problem:
            raise refused(str(problem)) from None
        if parts.password is not None:
            raise refused("an address has no password: OpenSSH asks its agent and ~/.ssh/config")
        if parts.path not in ("", "/") or parts.query or parts.fragment:
            raise refused("an address ends with the host or its port; a folder is said by --workdir")
        user, _, place = parts.netloc.rpartition("@")
        host = re.sub(r":\d*$", "", place) if not place.startswith("[") else place[1:].partition("]")[0]
        if not _HOST.fullmatch(host) or port == 0:
            raise refused("no host, or one that is no name")
        if user and not _USER.fullmatch(user):
            raise refused("a user's name is of letters, digits, '.', '_', '@' and '-'")
        return cls(host, user or None, port)

    def __str__(self) -> str:
        user = f"{self.user}@" if self.user else ""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{SCHEME}{user}{host}{f':{self.port}' if self.port else ''}"

    def words(self) -> list[str]:
        """List what OpenSSH is told of it, the host last."""
        user = ["-l", self.user] if self.user else []
        return [*user, *(["-p", str(self.port)] if self.port else []), "--", self.host]


def as_workdir(text: str, *, where: str = "--workdir") -> str:
    """Check a folder on a device. Raises InputError `workdir-invalid`."""
    if not _WORKDIR.fullmatch(text) or any(part in (".", "..") for part in text.split("/")):
        rule = "a folder of its own on the device, from / or ~/ on, without '..'"
        raise InputError("workdir-invalid", where, text[:80], rule, WORKDIR)
    return text


class Lost(Stopped):
    """The connection broke."""


class OpenSSH:
    """Runs programs on a device.

    Args:
        address: where it is.
        name: of the device, for errors.
        python: the path of its Python; None: one of `PYTHONS`.
        begin: what runs a shell's command there, its last word; None: `ssh`.
    """

    def __init__(
        self, address: Address, *, name: str, python: str | None = None, begin: Sequence[str] | None = None
    ) -> None:
        self.address, self.name, self._begin = address, name, begin
        self._pythons = [python] if python else list(PYTHONS)
        self._shared: str | None = None
        self._was_there = False

    def __enter__(self) -> OpenSSH:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the shared connection."""
        if self._shared is not None and self._begin is None:
            subprocess.run([*self._ssh()[:-2], "-O", "exit", *self._ssh()[-2:]], capture_output=True, check=False)  # noqa: S603
            shutil.rmtree(self._shared, ignore_errors=True)
            self._shared = None

    def _ssh(self) -> list[str]:
        if self._shared is None:
            # not TMPDIR, which may be long: the path of a socket has a hundred characters
            self._shared = tempfile.mkdtemp(prefix="quantkit-", dir="/tmp")
        options = {
            "BatchMode": "yes",
            "ConnectTimeout": _CONNECT,
            "ServerAliveInterval": _SILENT,
            "ServerAliveCountMax": 3,
            "ControlMaster": "auto",
            "ControlPersist": _KEPT,
            "ControlPath": f"{self._shared}/c",
        }
        return ["ssh", "-T", *(f"-o{key}={value}" for key, value in options.items()), *self.address.words()]

    def open(self, program: str, asked: Mapping[str, Any]) -> Conversation:
        """Start a program of `devices.sent`. Raises InputError `missing-ssh`."""
        mark = f"quantkit-{secrets.token_hex(16)}"
        told = {**asked, "mark": mark}
        sent = f"{source(program)}\n{source('__init__')}\nanswer(main, {told!r})\n".encode()
        words = {"N": _NEEDED, "B": _RUN, "M": mark}
        said = " ".join(f"{name}={shlex.quote(value)}" for name, value in words.items())
        command = " ".join(["exec env", said, "sh -c", shlex.quote(_FIND), "sh", *map(shlex.quote, self._pythons)])
        begin = list(self._begin) if self._begin is not None else self._ssh()
        try:
            process = subprocess.Popen(  # noqa: S603
                [*begin, command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C here is for us: we end what runs there first
            )
        except FileNotFoundError:
            rule, remedy = "devices are reached by OpenSSH", "install it: apt install openssh-client"
            raise InputError("missing-ssh", self.name, "no ssh", rule, remedy) from None
        return Conversation(self, process, mark, sent)

    def call(
        self,
        program: str,
        asked: Mapping[str, Any],
        *,
        send: Callable[[IO[bytes]], None] | None = None,
        seconds: float = 120.0,
    ) -> dict[str, Any]:
        """Run a program to its answer.

        Args:
            send: writes its data.
            seconds: after which it is ended.

        Raises:
            Lost: the connection broke.
            InputError: OpenSSH does not get there, the device refuses, or its answer is none.
        """
        with self.open(program, asked) as talk:
            timer = threading.Timer(seconds, talk.end)
            timer.start()
            try:
                if send is not None:
                    talk.say(send)
                talk.hush()
                text = talk.rest(MOST)
            finally:
                timer.cancel()
            talk.done()
        return self.read(text)

    def read(self, text: bytes) -> dict[str, Any]:
        """Read the answer of a program of `devices.sent`. Raises InputError `answer-invalid`, and what it refused."""
        answer = None
        with contextlib.suppress(ValueError, RecursionError):
            answer = json.loads(text)
        if not isinstance(answer, dict):
            raise self.invalid(text)
        self._was_there = True
        if "error" in answer:
            raise self.refused(str(answer["error"])[:64], str(answer.get("value", ""))[:200])
        return answer

    def invalid(self, text: bytes) -> InputError:
        """Make the error for what is no answer."""
        rule = "what is sent there answers JSON, of a limited size"
        remedy = "look with: ssh to it; if it stays, something stands between"
        return InputError("answer-invalid", self.name, repr(text[:80]), rule, remedy)

    def refused(self, code: str, value: str = "") -> QuantkitError:
        """Make the error for what a program there refused, by its word for it."""
        if code == "cut":
            return self.lost("what was sent broke off")
        words, rule = f"{code}: {{value}}" if value else code, "its system does what it is asked"
        unknown = ("device-failed", words, rule, "look at the device, then run it again")
        code, words, rule, remedy = _FINDS.get(code, unknown)
        value = words.replace("{value}", value or "none")
        return InputError(code, self.name, value, rule, remedy)

    def lost(self, value: str) -> Lost:
        """Make the error for a connection that broke."""
        rule, remedy = "a device stays on while it works", "run the same command again, with --resume where it has one"
        return Lost("device-gone", where=self.name, value=value or "the connection broke", rule=rule, remedy=remedy)

    def explained(self, said: str, code: int) -> QuantkitError:
        """Make the error for a connection that did not come about, or broke, by what OpenSSH says."""
        for patterns, (known, rule, remedy) in _SAYS.items():
            lines = [line for line in said.splitlines() if any(pattern in line for pattern in patterns)]
            if lines:
                value = lines[0].strip().strip("@").strip()[:200]
                if self._was_there and known in _STARTING:
                    return self.lost(value)
                return InputError(known, f"{self.name} ({self.address})", value, rule, remedy)
        last = next((line.strip() for line in reversed(said.splitlines()) if line.strip()), "")
        # 255 is OpenSSH's own, and less than 0 a signal; else the program's
        return self.lost(last[:200]) if code < 0 or code == 255 else self.refused("failed", last)


class Conversation:
    """A program that runs on a device."""

    def __init__(self, shell: OpenSSH, process: subprocess.Popen[bytes], mark: str, sent: bytes) -> None:
        self._shell, self._process, self._mark = shell, process, mark
        self._said = b""
        # a shared connection that this one opened keeps its standard error: nobody waits for the end of it
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        self.say(lambda stream: stream.writelines([b"%d\n" % len(sent), sent]))

    def __enter__(self) -> Conversation:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def _listen(self) -> None:
        assert self._process.stderr is not None
        with contextlib.suppress(ValueError, OSError):
            while chunk := self._process.stderr.read1(1 << 12):  # type: ignore[attr-defined]
                self._said = (self._said + chunk)[-_SAID:]

    def say(self, send: Callable[[IO[bytes]], None]) -> None:
        """Write to the program; what it no longer takes is found by whoever reads its answer."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError, ValueError):
            send(self._process.stdin)
            self._process.stdin.flush()

    def hush(self) -> None:
        """Say nothing more to it."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def lines(self, most: int, line_most: int | None = None) -> Iterator[bytes]:
        """Give its answer, a line at a time without the line feed, from the mark on.

        Args:
            most: bytes of all of it.
            line_most: of a line; None: the same.

        Raises:
            InputError: `answer-invalid`, more than that.
        """
        out = self._process.stdout
        assert out is not None
        heard, mark = 0, self._mark.encode() + b"\n"
        while (line := out.readline(_NOISE)) != mark:
            heard += len(line)
            if not line:
                self.done()
                raise self._shell.invalid(b"")
            if heard > _NOISE:
                raise self._shell.invalid(line)
        longest = (line_most or most) + 1
        while line := out.readline(longest + 1):
            most -= len(line)
            if len(line) > longest or most < 0:
                raise self._shell.invalid(line)
            if line.endswith(b"\n"):  # else it broke off here
                yield line[:-1]

    def rest(self, most: int) -> bytes:
        """Read all of its answer; see `lines`."""
        return b"\n".join(self.lines(most))

    def done(self) -> None:
        """End after its last word. Raises what OpenSSH or the program ended with."""
        code = self._process.wait()
        if code != 0:
            self._listener.join(0.5)
            raise self._shell.explained(self._said.decode("utf-8", "replace"), code)

    def end(self) -> None:
        """Leave it; the program there finds that nobody listens."""
        if self._process.poll() is None:
            self.hush()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(1.0)
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()


def held(holder: Any) -> str:
    """Say who has a device, and for what, by what its lock says."""
    known = holder if isinstance(holder, dict) else {}
    return f"{str(known.get('who', 'somebody'))[:80]} has it, for: {str(known.get('what', 'a job'))[:40]}"


@cache
def source(name: str) -> str:
    """Read a module of `devices.sent`, as it is sent."""
    return (files("quantkit.devices.sent") / f"{name}.py").read_text(encoding="utf-8")


def again(work: Callable[[], Any], patience: float, state: Callable[[], object] = lambda: None) -> Any:
    """Do a work, again while the connection breaks. Raises Lost.

    Args:
        patience: seconds without success until it is given up.
        state: of the work; where it has changed there was success.
    """
    until, pause, before = time.monotonic() + patience, _PAUSE, state()
    while True:
        try:
            return work()
        except Lost:
            if state() != before:
                until, pause, before = time.monotonic() + patience, _PAUSE, state()
            if time.monotonic() + pause > until:
                raise
            time.sleep(pause)
            pause = min(2 * pause, 10.0)
