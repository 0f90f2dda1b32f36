"""What a tokenizer takes of memory: bytes a token, of byte-level BPEs that are trained here on the shipped texts.

    python benchmarks/harness/tokenizer_side.py 8000 24000

Each is loaded in a process of its own, beside transformers, and encodes a text; the figure is what is resident then.
`quantkit/planning/compiling.py` takes that of the largest.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_LOAD = """
import sys
def resident():
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmRSS:"))
from transformers import AutoTokenizer, PreTrainedTokenizerFast
PreTrainedTokenizerFast
before = resident()
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
tokenizer.encode("hello world " * 2000)
print(resident() - before)
"""


def trained(size: int, folder: Path) -> None:
    """A tokenizer of so many tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    texts = sorted([*ROOT.glob("benchmarks/texts/*.txt"), *ROOT.glob("calibration/*/*.txt")])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, show_progress=False, initial_alphabet=alphabet)
    tokenizer.train([str(path) for path in texts], trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


if __name__ == "__main__":
    for size in map(int, sys.argv[1:]):
        with tempfile.TemporaryDirectory() as place:
            trained(size, Path(place))
            said = subprocess.run([sys.executable, "-c", _LOAD, place], capture_output=True, text=True, check=True)
        print(f"{size} tokens: {int(said.stdout) / size:.0f} bytes each")
