"""Run commands on a device with the system's `ssh`: one shared connection, checked host keys, no password prompt.

A command is a program of `devices.sent`, sent on standard input with its request and run by the device's own Python.
Its answer begins after a random mark, so that a login message is never taken for an answer.
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

# most bytes of an answer, of a shell's output before it, and of its kept standard error
MOST, _NOISE, _SAID = 1 << 22, 1 << 16, 1 << 13
# seconds: to connect; of silence until a connection is lost; of idleness that a shared one survives
_CONNECT, _SILENT, _KEPT = 20, 10, 30
# seconds before the first retry; each later retry waits twice as long
_PAUSE = 0.1
# names to look for there; the first recent enough Python is used
PYTHONS = ("python3", "python3.14", "python3.13", "python3.12", "python3.11", "python")
_NEEDED = "import sys; sys.exit(sys.version_info < (3, 11))"
_FIND = (
    'for p in "$@"; do if command -v "$p" >/dev/null 2>&1 && "$p" -ISc "$N" 2>/dev/null; '
    'then exec "$p" -I -c "$B"; fi; done; '
    # the version of the first, or the shell's message about it, without quotes and line feeds
    'echo "$M"; V=$("$1" --version 2>&1 | tr -cd "[:alnum:] ./:_+-" | head -c 60); '
    'echo "{\\"error\\": \\"no-python\\", \\"value\\": \\"$V\\"}"'
)
_RUN = "import sys; i = sys.stdin.buffer; exec(i.read(int(i.readline())))"
# messages of OpenSSH -> code, rule and remedy of the error
_SAYS: Mapping[tuple[str, ...], tuple[str, str, str]] = {
    ("Could not resolve hostname", "Name or service not known"): (
        *("no-such-host", "the host name has to resolve", "check the address, or name it in ~/.ssh/config"),
    ),
    ("REMOTE HOST IDENTIFICATION HAS CHANGED", "Offending"): (
        *("host-key-changed", "a device keeps its host key; this may be another machine"),
        "if it was reinstalled: ssh-keygen -R HOST, then ssh to it once",
    ),
    ("Host key verification failed", "host key is known"): (
        *("host-key-unknown", "host keys are checked"),
        "ssh to it once, compare its key, and accept it",
    ),
    ("Permission denied", "Too many authentication failures", "Unable to negotiate"): (
        *("key-refused", "OpenSSH has to log in without a prompt", "ssh-copy-id or ssh-add"),
    ),
    ("Connection refused", "No route to host", "Network is unreachable", "Connection timed out", "Host is down"): (
        *("device-unreachable", "the device is on and runs sshd", "check its power, network and port"),
    ),
    ("Bad configuration option", "percent_expand", "Could not request", "Bad owner or permissions", "bad port"): (
        *("ssh-config-invalid", "OpenSSH has to read its configuration", "correct ~/.ssh/config"),
    ),
}
# problems found by `devices.sent` -> code, value, rule and remedy of the error
_FINDS: Mapping[str, tuple[str, str, str, str]] = {
    "no-python": (
        *("wrong-python", "{value}", "a device needs Python 3.11 or later"),
        "install Python, or name one: --python PATH",
    ),
    "no-space": (
        *(
            "device-full",
            "{value}",
            "files and packages have to fit on its disk",
            "free space there, or use another --workdir",
        ),
    ),
    "workdir-foreign": (
        *("workdir-foreign", "other files are in it", "the workdir has to be quantkit's own", "use another --workdir"),
    ),
    "workdir-version": (
        *("workdir-version", "layout {value}", "files of another version are left alone"),
        "delete that folder there, or use another --workdir",
    ),
    "lock": (
        *("lock-foreign", "{value} is a link, not a regular file, has several names, or cannot be opened"),
        "a job holds the device's locks",
        "delete it there, or set QUANTKIT_LOCK=PATH there for another lock of the machine",
    ),
    "denied": ("workdir-unwritable", "{value}", "the workdir has to be writable", "use another --workdir"),
}
# errors of a known device that is restarting
_STARTING = ("no-such-host", "device-unreachable")


SCHEME = "ssh://"
# neither begins with a dash, which OpenSSH would take for an option
_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*|[0-9A-Fa-f]*:[0-9A-Fa-f:.]*(%[A-Za-z0-9_.-]+)?")
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@\\-]*")
_WORKDIR = re.compile(r"(~/|/)[A-Za-z0-9_@+,. -]+(/[A-Za-z0-9_@+,. -]+)*")
WORKDIR = "~/quantkit"


@dataclass(frozen=True)
class Address:
    """Address of a device.

    Args:
        host: host name, IP address, or alias in `~/.ssh/config`.
        user: user; None leaves it to OpenSSH.
        port: port; None leaves it to OpenSSH.
    """

    host: str
    user: str | None = None
    port: int | None = None

    @classmethod
    def read(cls, text: str, *, where: str = "address") -> Address:
        """Read `ssh://[USER@]HOST[:PORT]`. Raises InputError `address-invalid`."""

        def refused(rule: str) -> InputError:
            shown = re.sub(r"//[^@]*@", "//…@", text)[:80]  # it may contain a password
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
            raise refused("an address ends with the host or its port; --workdir names a folder")
        user, _, place = parts.netloc.rpartition("@")
        host = re.sub(r":\d*$", "", place) if not place.startswith("[") else place[1:].partition("]")[0]
        if not _HOST.fullmatch(host) or port == 0:
            raise refused("an address has a valid host name")
        if user and not _USER.fullmatch(user):
            raise refused("a user's name has letters, digits, '.', '_', '@' and '-'")
        return cls(host, user or None, port)

    def __str__(self) -> str:
        user = f"{self.user}@" if self.user else ""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{SCHEME}{user}{host}{f':{self.port}' if self.port else ''}"

    def words(self) -> list[str]:
        """Return its arguments for OpenSSH, the host last."""
        user = ["-l", self.user] if self.user else []
        return [*user, *(["-p", str(self.port)] if self.port else []), "--", self.host]


def as_workdir(text: str, *, where: str = "--workdir") -> str:
    """Check a folder on a device. Raises InputError `workdir-invalid`."""
    if not _WORKDIR.fullmatch(text) or any(part in (".", "..") for part in text.split("/")):
        rule = "a workdir is an absolute path or ~/..., without '..'"
        raise InputError("workdir-invalid", where, text[:80], rule, WORKDIR)
    return text


class Lost(Stopped):
    """The connection broke."""


class OpenSSH:
    """Runner of programs on a device.

    Args:
        address: its address.
        name: name of the device, for errors.
        python: path of its Python; None: one of `PYTHONS`.
        begin: command that runs its last argument in a shell there; None: `ssh`.
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
            # not TMPDIR, which may be long: a socket's path has at most a hundred characters
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
        variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in words.items())
        command = " ".join(["exec env", variables, "sh -c", shlex.quote(_FIND), "sh", *map(shlex.quote, self._pythons)])
        begin = list(self._begin) if self._begin is not None else self._ssh()
        try:
            process = subprocess.Popen(  # noqa: S603
                [*begin, command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C is for this process, which first ends the program there
            )
        except FileNotFoundError:
            rule, remedy = "devices need OpenSSH", "install it: apt install openssh-client"
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
        """Run a program and return its answer.

        Args:
            send: function that writes its data.
            seconds: time limit.

        Raises:
            Lost: the connection broke.
            InputError: OpenSSH fails, the device refuses, or the answer is invalid.
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
        """Read an answer of a program of `devices.sent`. Raises InputError `answer-invalid`, or its refusal."""
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
        """Return the error for an invalid answer."""
        rule = "a program there answers JSON of limited size"
        remedy = "ssh to the device and look; if it persists, something in between changes the output"
        return InputError("answer-invalid", self.name, repr(text[:80]), rule, remedy)

    def refused(self, code: str, value: str = "") -> QuantkitError:
        """Return the error for a program's refusal, by its short code."""
        if code == "cut":
            return self.lost("the transfer broke off")
        words, rule = f"{code}: {{value}}" if value else code, "the device's system has to work"
        unknown = ("device-failed", words, rule, "check the device, then run it again")
        code, words, rule, remedy = _FINDS.get(code, unknown)
        value = words.replace("{value}", value or "none")
        return InputError(code, self.name, value, rule, remedy)

    def lost(self, value: str) -> Lost:
        """Return the error for a broken connection."""
        rule, remedy = "a device stays reachable during a job", "run the command again, with --resume where available"
        return Lost("device-gone", where=self.name, value=value or "the connection broke", rule=rule, remedy=remedy)

    def explained(self, stderr: str, code: int) -> QuantkitError:
        """Return the error for a failed or broken connection, from OpenSSH's messages."""
        for patterns, (known, rule, remedy) in _SAYS.items():
            lines = [line for line in stderr.splitlines() if any(pattern in line for pattern in patterns)]
            if lines:
                value = lines[0].strip().strip("@").strip()[:200]
                if self._was_there and known in _STARTING:
                    return self.lost(value)
                return InputError(known, f"{self.name} ({self.address})", value, rule, remedy)
        last = next((line.strip() for line in reversed(stderr.splitlines()) if line.strip()), "")
        # 255 comes from OpenSSH, below 0 is a signal, anything else comes from the program
        return self.lost(last[:200]) if code < 0 or code == 255 else self.refused("failed", last)


class Conversation:
    """A program running on a device."""

    def __init__(self, shell: OpenSSH, process: subprocess.Popen[bytes], mark: str, sent: bytes) -> None:
        self._shell, self._process, self._mark = shell, process, mark
        self._said = b""
        # a shared connection opened here keeps standard error open: never wait for its end
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
        """Write to the program; if it no longer reads, the reader of its answer finds out."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError, ValueError):
            send(self._process.stdin)
            self._process.stdin.flush()

    def hush(self) -> None:
        """Close its standard input."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def lines(self, most: int, line_most: int | None = None) -> Iterator[bytes]:
        """Yield its answer after the mark, one line at a time without the line feed.

        Args:
            most: most bytes in all.
            line_most: most bytes of a line; None: `most`.

        Raises InputError: `answer-invalid`, it is longer.
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
            if line.endswith(b"\n"):  # otherwise it broke off here
                yield line[:-1]

    def rest(self, most: int) -> bytes:
        """Return its whole answer; see `lines`."""
        return b"\n".join(self.lines(most))

    def done(self) -> None:
        """Wait for its end. Raises the error of OpenSSH or of the program."""
        code = self._process.wait()
        if code != 0:
            self._listener.join(0.5)
            raise self._shell.explained(self._said.decode("utf-8", "replace"), code)

    def end(self) -> None:
        """Leave; the program there notices that its listener is gone."""
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
    """Describe the lock's owner and its job."""
    known = holder if isinstance(holder, dict) else {}
    return f"{str(known.get('who', 'somebody'))[:80]} has it, for: {str(known.get('what', 'a job'))[:40]}"


@cache
def source(name: str) -> str:
    """Read the source of a module of `devices.sent`."""
    return (files("quantkit.devices.sent") / f"{name}.py").read_text(encoding="utf-8")


def again(work: Callable[[], Any], patience: float, state: Callable[[], object] = lambda: None) -> Any:
    """Repeat a call while the connection breaks. Raises Lost.

    Args:
        patience: seconds without progress until it gives up.
        state: measure of progress; a change of it counts as progress.
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
