"""Writes contents, words and codes anew: `cd tests && python -m golden [contents|words]`."""

import os
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from golden import contents, goldens, words, write

parts = sys.argv[1:] or ["contents", "words"]
if "words" in parts:
    write("words", words.words())
    write("codes", words.codes())
    write("exits", words.exits())
if "contents" in parts:
    made = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in filter(contents.installed, contents.COMPILES):
            begun = time.process_time()
            made[name] = contents.compiled(name, Path(folder))["content_sha256"]
            print(f"{name}: {time.process_time() - begun:.0f} s", file=sys.stderr)
    known = goldens().get("contents", {})
    write("contents", {**known, contents.here(): {**known.get(contents.here(), {}), **made}})
