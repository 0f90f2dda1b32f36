"""A real sshd on the loopback address as two devices, behind a wire that can be cut and made slow.

    plain   as this machine is
    tiny    one core, and 1 GiB of memory for a process

Both run as this user, with keys and configuration of their own; nothing of the system's sshd or of `~/.ssh` is used.
"""

import contextlib
import getpass
import os
import select
import shutil
import socket
import subprocess
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue

SSHD = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin:/usr/bin:/sbin")
ABSENT = "no sshd here: apt install openssh-server (nothing needs to be started)"
# address space is what is limited, of which each of glibc's arenas takes 64 MiB that it does not use
_TINY = 'MALLOC_ARENA_MAX=1 taskset -c 0 sh -c "ulimit -v 1048576; exec sh -c \\"\\$SSH_ORIGINAL_COMMAND\\""'


class Wire:
    """A TCP proxy: what goes through it can be cut, made slow, and made late.

    Args:
        to: the port that is behind it.
    """

    def __init__(self, to: int) -> None:
        self.to = to
        self.fresh()
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def fresh(self) -> None:
        """As fast as it gets, and whole.

        `delay` is seconds that each byte is on its way, in both directions, however many are on it with it; `rate` is
        bytes a second to there; what is `off` takes no connection.
        """
        self.delay, self.rate, self.cuts, self.carried, self.off = 0.0, 0.0, 0, 0, False

    def cut(self) -> None:
        """Break all connections."""
        self.cuts += 1
        for pair in self._pairs:
            for each in pair:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
        self._pairs.clear()

    def close(self) -> None:
        self._server.close()
        self.cut()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                here, _ = self._server.accept()
                if self.off:
                    here.close()
                    continue
                there = socket.create_connection(("127.0.0.1", self.to))
                self._pairs.append((here, there))
                threading.Thread(target=self._carry, args=(here, there, True), daemon=True).start()
                threading.Thread(target=self._carry, args=(there, here, False), daemon=True).start()

    def _carry(self, read: socket.socket, write: socket.socket, counted: bool) -> None:
        # when it is to arrive, and what
        coming: SimpleQueue[tuple[float, bytes]] = SimpleQueue()
        threading.Thread(target=self._arrive, args=(coming, read, write), daemon=True).start()
        with contextlib.suppress(OSError, ValueError):
            while chunk := read.recv(1 << 14):
                if counted:
                    self.carried += len(chunk)
                    if self.rate:
                        time.sleep(len(chunk) / self.rate)
                coming.put((time.monotonic() + self.delay, chunk))
        coming.put((time.monotonic() + self.delay, b""))

    def _arrive(self, coming: SimpleQueue[tuple[float, bytes]], *both: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError):
            while True:
                due, chunk = coming.get()
                time.sleep(max(due - time.monotonic(), 0.0))
                if not chunk:
                    break
                both[1].sendall(chunk)
        for each in both:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)  # whoever waits for more hears of it
            with contextlib.suppress(OSError):
                each.close()


@dataclass
class Loopback:
    """Two devices.

    Args:
        folder: of keys and configuration.
        wires: to each.
        path: a folder with an `ssh` that reads the configuration here; first in PATH.
    """

    folder: Path
    wires: dict[str, Wire] = field(default_factory=dict)
    _servers: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def path(self) -> Path:
        return self.folder / "bin"

    def begin(self) -> None:
        with contextlib.suppress(OSError):
            Path("/run/sshd").mkdir(exist_ok=True)  # where sshd runs as root it separates its rights there
        for name in ("host", "key", "other"):
            self._run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / name))
        (self.folder / "authorized").write_text((self.folder / "key.pub").read_text())
        config = ""
        for name, forced in (("plain", None), ("tiny", _TINY)):
            self.wires[name] = Wire(self._serve(name, forced))
            config += self._host(name, self.wires[name])
        config += (
            f"Host *\n  HostName 127.0.0.1\n  User {getpass.getuser()}\n  IdentityFile {self.folder}/key\n"
            f"  IdentitiesOnly yes\n  IdentityAgent none\n  UserKnownHostsFile {self.folder}/known\n"
            "  GlobalKnownHostsFile none\n"
        )
        (self.folder / "config").write_text(config)
        self.path.mkdir()
        program = self.path / "ssh"
        program.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {self.folder}/config "$@"\n')
        program.chmod(0o755)

    def wire(self, name: str) -> None:
        """Another wire to the plain device, by a host's name of its own."""
        self.wires[name] = Wire(self.wires["plain"].to)
        config = self.folder / "config"
        config.write_text(self._host(name, self.wires[name]) + config.read_text())

    def _host(self, name: str, wire: Wire) -> str:
        with (self.folder / "known").open("a") as known:
            known.write(f"{name} {' '.join((self.folder / 'host.pub').read_text().split()[:2])}\n")
        return f"Host {name}\n  Port {wire.port}\n  HostKeyAlias {name}\n"

    def close(self) -> None:
        for wire in self.wires.values():
            wire.close()
        for server in self._servers:
            server.terminate()
            server.wait()

    def _serve(self, name: str, forced: str | None) -> int:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port: int = free.getsockname()[1]
        config = self.folder / f"sshd-{name}"
        config.write_text(
            f"ListenAddress 127.0.0.1\nPort {port}\nHostKey {self.folder}/host\nPidFile none\nUsePAM no\n"
            f"AuthorizedKeysFile {self.folder}/authorized\nPasswordAuthentication no\nStrictModes no\n"
            f"KbdInteractiveAuthentication no\nPermitRootLogin yes\nMaxStartups 100\nPrintMotd no\n"
            # two devices on one machine do not take turns
            "SetEnv QUANTKIT_LOCK=\n" + (f"ForceCommand {forced}\n" if forced else "")
        )
        assert SSHD is not None
        log = (self.folder / f"log-{name}").open("wb")
        server = subprocess.Popen([SSHD, "-D", "-e", "-f", str(config)], stderr=log, stdin=subprocess.DEVNULL)
        self._servers.append(server)
        for _ in range(200):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                return port
            assert server.poll() is None, (self.folder / f"log-{name}").read_text()
            time.sleep(0.05)
        raise AssertionError("sshd does not listen")

    def _run(self, *command: str) -> None:
        subprocess.run(command, check=True, capture_output=True)


def left(workdir: Path) -> list[str]:
    """The command lines of processes that are at work in a workdir; of those that end just now, none."""
    for _ in range(40):
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                line = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
                inside = str(workdir) in line or str((path / "cwd").readlink()).startswith(str(workdir))
                if inside and int(path.name) != os.getpid():
                    found.append(f"{path.name} {line[:200]}")
        if not found:
            return []
        select.select([], [], [], 0.1)
    return found
