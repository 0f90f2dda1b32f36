"""Environments of other toolkits, `.peers/NAME/`: their pins are not ours."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
REQUIREMENTS = ROOT / "benchmarks" / "peers" / "requirements"


def environment(peer: str) -> Path:
    """The peer's own interpreter, made by the first call from `peers/requirements/PEER.txt`.

    torch comes first, so that it is the build for processors. What `PEER.no-deps.txt` lists, if it is there, is
    installed last and as it stands, because what it declares cannot be met.
    """
    python = ROOT / ".peers" / peer / "bin" / "python"
    if not python.exists():
        print(f"making .peers/{peer} ...", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", python.parent.parent], check=True)
        install = [python, "-m", "pip", "install", "--quiet"]
        pins, loose = (REQUIREMENTS / f"{peer}{kind}.txt" for kind in ("", ".no-deps"))
        subprocess.run([*install, "-c", ROOT / "constraints.txt", "torch"], check=True)
        subprocess.run([*install, "-r", pins], check=True)
        if loose.exists():
            subprocess.run([*install, "--no-deps", "--no-build-isolation", "-r", loose], check=True)
    return python
