"""How a program that was sent answers: one JSON document behind the mark that says where its answer begins."""

import errno
import json
from collections.abc import Callable
from typing import Any


def answer(main: Callable[[dict[str, Any]], Any], asked: dict[str, Any]) -> None:
    """Print what `main` answers, or what it met."""
    print(asked["mark"], flush=True)
    try:
        found = main(asked)
    except PermissionError as problem:
        found = {"error": "denied", "value": str(problem.filename)[:200]}
    except OSError as problem:
        full = problem.errno in (errno.ENOSPC, errno.EDQUOT)
        found = {"error": "no-space" if full else "failed", "value": str(problem)[:200]}
    except Exception as problem:
        found = {"error": "failed", "value": repr(problem)[:200]}
    if found is not None:
        print(json.dumps(found), flush=True)
