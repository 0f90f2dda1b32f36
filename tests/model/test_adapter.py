"""A folder with an adapter in it is refused from its names, and opens once what the remedy names is gone."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import zoo

from quantkit.errors import InputError
from quantkit.model.sight import demand_no_adapter
from quantkit.model.source.open import open_model

LORA = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "somebody/base"}
BESIDE, MERGED = "without it, where the weights hold it already", "merged, in Python"


def folder_of(tmp_path: Path, stated: object, weights: str, *, model: bool) -> Path:
    folder = tmp_path / "model"
    if model:
        zoo.tiny("llama", num_hidden_layers=1).save_pretrained(folder)  # type: ignore[operator]
    else:
        folder.mkdir()
    (folder / "adapter_config.json").write_text(stated if isinstance(stated, str) else json.dumps(stated))
    if weights:
        (folder / weights).write_bytes(b"")
    return folder


@pytest.mark.parametrize(
    ("stated", "weights", "model", "ways"),
    [
        (LORA, "adapter_model.safetensors", True, [BESIDE, MERGED]),
        (LORA, "adapter_model.bin", True, [BESIDE, MERGED]),
        ({**LORA, "peft_type": "IA3"}, "adapter_model.safetensors", False, [MERGED]),
        (LORA, "", True, [BESIDE]),
        ({**LORA, "peft_type": "PREFIX_TUNING"}, "adapter_model.safetensors", True, [BESIDE]),
        ({**LORA, "peft_type": "PROMPT_TUNING"}, "adapter_model.bin", False, ["belongs to: somebody/base"]),
        (LORA, "", False, ["belongs to: somebody/base"]),
        ("{", "adapter_model.safetensors", True, [BESIDE, MERGED]),
        ([1], "adapter_model.safetensors", False, [MERGED]),
    ],
)
def test_an_adapter_is_refused_with_what_to_do(
    tmp_path: Path, stated: object, weights: str, model: bool, ways: list[str]
) -> None:
    folder = folder_of(tmp_path, stated, weights, model=model)
    with pytest.raises(InputError, match="adapter-unmerged") as refused:
        open_model(str(folder))
    remedy = refused.value.remedy
    assert [way for way in (BESIDE, MERGED, "belongs to: somebody/base") if way in remedy] == ways
    if BESIDE in ways:
        for name in re.findall(r"adapter_\w+\.\w+", remedy.partition(";")[0]):
            (folder / name).unlink()
        assert open_model(str(folder)).architecture == "LlamaForCausalLM"
        assert not list(folder.glob("adapter*"))


def test_what_is_no_adapter_of_the_model_is_left_alone(tmp_path: Path) -> None:
    """Weights that nothing loads without their config, and an adapter in a folder below, which no library reads."""
    folder = folder_of(tmp_path, LORA, "adapter_model.safetensors", model=True)
    (folder / "checkpoint-10").mkdir()
    (folder / "adapter_config.json").rename(folder / "checkpoint-10" / "adapter_config.json")
    demand_no_adapter(folder, "./model")


def test_of_the_hub_the_model_is_fetched_without_it(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, LORA, "adapter_model.safetensors", model=True)
    with pytest.raises(InputError) as refused:
        demand_no_adapter(folder, "hf:org/name@v1")
    call = "snapshot_download('org/name', revision='v1', ignore_patterns='adapter_*', local_dir='./name')"
    assert call in refused.value.remedy
    assert "from_pretrained('org/name')" in refused.value.remedy


def test_no_command_imports_torch_for_it(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, LORA, "", model=False)
    program = (
        "import sys; from quantkit.cli import main\n"
        f"sys.argv = ['quantkit', 'compile', {str(folder)!r}]\n"
        "try: code = main()\nexcept SystemExit as end: code = end.code\n"
        "print(code, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["2", "False"]
    assert done.stderr.count("\n") == 1
    assert "adapter-unmerged" in done.stderr
