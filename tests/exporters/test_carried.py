"""What goes along with a model whatever becomes of its weights, and what never does."""

from pathlib import Path

from quantkit.exporters.carried import carried


def put(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)


def test_text_about_a_model_goes_along_and_weights_and_code_stay_behind(tmp_path: Path) -> None:
    kept = ["1_Pooling/config.json", "LICENSE", "additional_chat_templates/tools.jinja", "chat_template.jinja"]
    kept += ["generation_config.json", "modules.json", "tokenizer.json"]
    put(tmp_path / "m", *kept)
    (tmp_path / "m" / "modules.json").write_text('[{"type": "m", "path": "1_Pooling"}]')
    (tmp_path / "m" / "1_Pooling" / "config.json").write_text("{}")
    put(tmp_path / "m", "README.md", "config.json", "modeling_evil.py", "pytorch_model.bin", ".git/config", ".hidden")
    assert sorted(name for _, name in carried(tmp_path / "m")) == kept


def test_a_link_out_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    put(tmp_path, "secret", "m/a.txt")
    (tmp_path / "m" / "link.txt").symlink_to(tmp_path / "secret")
    assert [name for _, name in carried(tmp_path / "m")] == ["a.txt"]


def test_another_onnx_file_s_weights_are_not_carried_over_ours(tmp_path: Path) -> None:
    put(tmp_path, "generation_config.json", "model.onnx.data", "onnx/model.onnx_data", "model.safetensors.index.json")
    assert [name for _, name in carried(tmp_path)] == ["generation_config.json"]


def test_what_lies_in_a_model_s_folder_and_is_no_part_of_it_stays_there(tmp_path: Path) -> None:
    """Bundles, builds, results of other commands, checkpoints of a training, environments."""
    put(tmp_path, "tokenizer.json", "m--awq-int4/model/tokenizer.json", "a/b/m.partial/bundle/model/tokenizer.json")
    put(tmp_path, "m--tuned/recipe.yaml", "checkpoint-500/tokenizer.json", "venv/lib/METADATA", "compare.html")
    put(tmp_path, "modules.json", "1_Pooling/config.json", "1_Pooling/x/manifest.json", "1_Pooling/y.partial/a")
    (tmp_path / "modules.json").write_text('[{"type": "m", "path": "1_Pooling"}]')
    (tmp_path / "1_Pooling" / "config.json").write_text("{}")
    kept = ["1_Pooling/config.json", "modules.json", "tokenizer.json"]
    assert sorted(name for _, name in carried(tmp_path)) == kept
