"""What goes along with a model whatever becomes of its weights, and what never does."""

from __future__ import annotations

from pathlib import Path

from quantkit.exporters.carried import carried


def put(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)


def test_text_about_a_model_goes_along_and_weights_and_code_stay_behind(tmp_path: Path) -> None:
    kept = ["1_Pooling/config.json", "LICENSE", "chat_template.jinja", "generation_config.json", "tokenizer.json"]
    put(tmp_path / "m", *kept)
    put(tmp_path / "m", "README.md", "config.json", "modeling_evil.py", "pytorch_model.bin", ".git/config", ".hidden")
    assert sorted(name for _, name in carried(tmp_path / "m")) == kept


def test_a_link_out_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    put(tmp_path, "secret", "m/a.txt")
    (tmp_path / "m" / "link.txt").symlink_to(tmp_path / "secret")
    assert [name for _, name in carried(tmp_path / "m")] == ["a.txt"]


def test_another_onnx_file_s_weights_are_not_carried_over_ours(tmp_path: Path) -> None:
    put(tmp_path, "generation_config.json", "model.onnx.data", "onnx/model.onnx_data", "model.safetensors.index.json")
    assert [name for _, name in carried(tmp_path)] == ["generation_config.json"]
