"""Mutants that coverage guides: what reaches a line of quantkit that none reached before is mutated further (atheris).

python -m fuzz.guided NAME SECONDS     a worker, which answers as `campaign.work` does
"""

import json
import os
import random
import resource
import signal
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from fuzz.campaign import MEMORY, classed, late


def main(name: str, seconds: str) -> None:
    """Fuzzes one target until its time is over."""
    import atheris

    out = os.fdopen(os.dup(1), "w")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    signal.signal(signal.SIGALRM, late)
    folder, corpus = Path(tempfile.mkdtemp()), Path(tempfile.mkdtemp())
    with atheris.instrument_imports(include=["quantkit"]):
        from fuzz import mutate
        from fuzz.targets import BY_NAME
        from quantkit.errors import QuantkitError

        target = BY_NAME[name]
        file = target.seed(folder)
        with suppress(QuantkitError):
            target.read(folder)  # imports what it reads with, for longer than a mutant may take
    (corpus / "honest").write_bytes(file.read_bytes())
    number = 0

    def one(data: bytes) -> None:
        nonlocal number
        number += 1
        file.write_bytes(data)
        print(json.dumps({"at": number}), file=out, flush=True)
        kind, said = classed(target, folder)
        if kind != "clean":
            # the mutant itself: a number does not make it again
            print(
                json.dumps({"outcome": kind, "number": number, "said": said, "data": data.hex()}), file=out, flush=True
            )

    def changed(data: bytes, size: int, seed: int) -> bytes:
        try:
            return target.mutate(data, random.Random(seed))[:size]
        except (ValueError, RecursionError, LookupError, TypeError):  # no JSON any more
            return mutate.of_bytes(data, random.Random(seed))[:size]

    options = [f"-max_total_time={int(float(seconds))}", "-max_len=65536", "-rss_limit_mb=0", "-timeout=0"]
    atheris.Setup([sys.argv[0], *options, str(corpus)], one, custom_mutator=changed)
    atheris.Fuzz()


if __name__ == "__main__":
    main(*sys.argv[1:])
