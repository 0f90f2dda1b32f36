"""Where a device is: `ssh://pi@raspberrypi.local:2222`, or what `~/.ssh/config` calls it: `ssh://pi5`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from quantkit.errors import InputError

SCHEME = "ssh://"
# neither begins with a dash: OpenSSH would take it for an option
_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*|[0-9A-Fa-f]*:[0-9A-Fa-f:.]*(%[A-Za-z0-9_.-]+)?")
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@\\-]*")
_WORKDIR = re.compile(r"(~/|/)[A-Za-z0-9_@+,. -]+(/[A-Za-z0-9_@+,. -]+)*")
WORKDIR = "~/quantkit"


@dataclass(frozen=True)
class Address:
    """Where a device is.

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
        """Of `ssh://[USER@]HOST[:PORT]`. Raises InputError `address-invalid`."""

        def refused(rule: str) -> InputError:
            shown = re.sub(r"//[^@]*@", "//…@", text)[:80]  # there may be a password in it
            remedy = "ssh://pi@raspberrypi.local, or ssh://NAME of ~/.ssh/config"
            return InputError("address-invalid", where=where, value=shown, rule=rule, remedy=remedy)

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
        """What OpenSSH is told of it, the host last."""
        user = ["-l", self.user] if self.user else []
        return [*user, *(["-p", str(self.port)] if self.port else []), "--", self.host]


def as_workdir(text: str, *, where: str = "--workdir") -> str:
    """A folder on a device, as it is sent there. Raises InputError `workdir-invalid`."""
    if not _WORKDIR.fullmatch(text) or any(part in (".", "..") for part in text.split("/")):
        raise InputError(
            "workdir-invalid",
            where=where,
            value=text[:80],
            rule="a folder of its own on the device, from / or ~/ on, without '..'",
            remedy=WORKDIR,
        )
    return text
