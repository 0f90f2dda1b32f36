"""The quantized head: rounded as `rtn` rounds, piece by piece, and never at the expense of a tied embedding."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import zoo

from quantkit.errors import InputError
from quantkit.exporters.values import Values
from quantkit.formats import load_format
from quantkit.model import finished
from quantkit.model.finished import Finished
from quantkit.model.source.open import open_model
from quantkit.model.streaming.answers import Head
from quantkit.model.streaming.stream import StreamedModel
from quantkit.passes import assign
from quantkit.passes.assign import in_pieces
from quantkit.passes.gptq import Gptq
from quantkit.passes.rtn import Rtn
from quantkit.passes.solvers import ranges
from quantkit.passes.solvers.gptq import gptq
from quantkit.passes.solvers.moments import Moments
from quantkit.pipeline import Request, compile_model
from quantkit.pipeline.blocks.layers import Layers, lay_out
from quantkit.pipeline.blocks.prepared import prepare
from quantkit.pipeline.blocks.quantize import quantize_head
from quantkit.recipe import Recipe
from quantkit.scheme import WeightScheme

RTN = {"rtn": Rtn.Settings()}
SCHEMES = {
    "int8 group": WeightScheme(format="int8", granularity="group", group=32),
    "int4 asymmetric": WeightScheme(format="int4", granularity="group", group=32, symmetric=False),
    "int4 channel": WeightScheme(format="int4", granularity="channel"),
    "int8 tensor": WeightScheme(format="int8", granularity="tensor", symmetric=False),
    "fp8 channel": WeightScheme(format="fp8_e4m3", granularity="channel"),
    "fp8 block": WeightScheme.model_validate({"format": "fp8_e4m3", "granularity": "block", "group": 32}),
    "nf4 double": WeightScheme(format="nf4", group=32, scale="double"),
    "mxfp4": WeightScheme(format="mxfp4"),
    "nvfp4": WeightScheme(format="nvfp4"),
}


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pieces_make_the_whole(scheme: WeightScheme, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(101, 96, generator=torch.Generator().manual_seed(0)).to(dtype)
    form = load_format(scheme.format)
    whole = form.nearest(weight, *ranges.searched(weight, scheme), scheme)
    monkeypatch.setattr(assign, "PIECE", 96 * 7)
    tensor, error = in_pieces(weight, None, scheme, RTN)
    # a product rounds otherwise for another number of rows on some processors: what is fitted by one is that much apart
    torch.testing.assert_close(tensor.scale.float(), whole.scale.float(), rtol=1e-5, atol=0)
    same = tensor.scale.float() == whole.scale.float()
    if scheme.granularity == "channel":
        assert torch.equal(tensor.codes.float()[same.flatten()], whole.codes.float()[same.flatten()])
    else:
        assert bool(same.all()) and torch.equal(tensor.codes.float(), whole.codes.float())
    assert tensor.global_scale == whole.global_scale
    assert tensor.zero is whole.zero is None or torch.equal(tensor.zero, whole.zero)  # type: ignore[arg-type]
    exact = weight.double()
    expected = (form.dequantize(whole).double() - exact).square().sum() / exact.square().sum()
    assert error == pytest.approx(float(expected), rel=1e-5)


def test_a_last_group_is_filled_up() -> None:
    scheme = WeightScheme(format="int4", granularity="group", group=64)
    weight = torch.randn(5, 96, generator=torch.Generator().manual_seed(0))
    tensor, error = in_pieces(weight, None, scheme, RTN)
    assert tensor.shape == (5, 128)
    assert not tensor.codes[:, 96:].any()
    assert 0 < error < 0.02


def laid(folder: Path, **changes: Any) -> tuple[StreamedModel, Layers]:
    data = {
        "summary": "",
        "keep": ["embeddings"],
        "scheme": {"weights": {"format": "int4", "granularity": "group", "group": 32, "symmetric": False}},
        "overrides": [{"match": "lm_head", "weights": {"format": "int8", "symmetric": True}}],
        "passes": ["rtn"],
        **changes,
    }
    stream = StreamedModel(open_model(str(folder)))
    recipe = Recipe.from_dict(data, name="x")
    return stream, lay_out(recipe, stream.skeleton, stream.block_names, stream.source.dtype, head=stream.head)


@pytest.mark.parametrize("name", ["llama", "llama-tied", "gpt2", "opt"])
def test_only_the_product_of_the_head_uses_the_codes(name: str, tmp_path: Path) -> None:
    """Logits are those of the model with another head and, tied or not, the embedding it always had."""
    model, ids = zoo.tiny(name), zoo.ids(2, 9)
    model.save_pretrained(tmp_path / "model")  # type: ignore[operator]
    stream, layers = laid(tmp_path / "model")
    assert stream.head == layers.head == "lm_head"
    assert bool(layers.tied) is (name != "llama")
    tensor, entry = quantize_head(stream, layers, RTN)
    assert (entry.name, entry.shape, entry.scheme["format"]) == ("lm_head", [zoo.VOCABULARY, 64], "int8")
    assert entry.bits_per_weight == 8.5
    assert entry.error is not None
    assert 0 < entry.error < 1e-4

    finished.save(tmp_path / "head", {"lm_head": tensor}, {})
    results = Finished([tmp_path / "head"], layers.schemes)
    assert list(results.schemes) == ["lm_head"]
    values = Values.of_results(stream.source, stream, results)
    dense = load_format("int8").dequantize(tensor)
    assert torch.equal(values.tensor("lm_head.weight"), dense)
    embedding = model.get_input_embeddings().weight  # type: ignore[operator]
    path = next(path for path, module in model.named_modules() if module is model.get_input_embeddings())  # type: ignore[operator]
    assert torch.equal(values.tensor(f"{path}.weight"), embedding)

    found = Head(values.stream.rest(), values.stream.paths, values.stream.flow)
    hidden = values.stream.run(ids)
    model.lm_head.weight = torch.nn.Parameter(dense)
    with torch.no_grad():
        expected = model(input_ids=ids).logits
    assert float((found(hidden, ids) - expected).abs().max() / expected.abs().max()) < 1e-6
    # and the source's own stream is not changed by it
    assert torch.equal(stream.tensor("lm_head.weight"), stream.tensor(f"{path}.weight")) is bool(layers.tied)


def test_a_head_that_a_pass_changed_is_rounded_as_changed(tmp_path: Path) -> None:
    zoo.tiny("llama").save_pretrained(tmp_path / "model")  # type: ignore[operator]
    stream, layers = laid(tmp_path / "model")
    before, _ = quantize_head(stream, layers, RTN)

    class Doubled:
        def block(self, index: int, block: torch.nn.Module) -> None:
            """Nothing."""

        def rest(self, model: torch.nn.Module) -> None:
            """Double the head."""
            model.lm_head.weight.data.mul_(2)  # type: ignore[union-attr, operator]

    stream.transforms.append(Doubled())
    after, _ = quantize_head(stream, layers, RTN)
    assert torch.equal(after.codes, before.codes)
    assert torch.equal(after.scale, before.scale * 2)


def test_an_encoder_has_no_head(tmp_path: Path) -> None:
    zoo.tiny("bert").save_pretrained(tmp_path / "model")  # type: ignore[operator]
    stream, layers = laid(tmp_path / "model")
    assert stream.head is layers.head is None
    assert len(layers.schemes) == 18


def test_a_tied_head_and_a_checkpoint_are_refused_before_any_work(tmp_path: Path) -> None:
    from quantkit.exporters.checkpoint.exporter import EXPORT

    zoo.tiny("llama-tied").save_pretrained(tmp_path / "model")  # type: ignore[operator]
    _, layers = laid(tmp_path / "model", overrides=[])
    for options in ({}, {"layout": "dense"}):
        with pytest.raises(InputError) as caught:
            EXPORT.accepts(EXPORT.Options(**options), layers.asked())
        assert (caught.value.code, caught.value.where) == ("layout-unsupported", "lm_head")
        assert "lm_head" in caught.value.remedy
    zoo.tiny("llama").save_pretrained(tmp_path / "untied")  # type: ignore[operator]
    _, layers = laid(tmp_path / "untied", overrides=[])
    EXPORT.accepts(EXPORT.Options(), layers.asked())


def test_a_head_is_solved_on_what_the_quantized_blocks_put_out(
    tmp_path: Path, byte_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its codes are GPTQ's for the inputs that plain transformers gives the head of the reloaded checkpoint."""
    monkeypatch.setattr("quantkit.pipeline.blocks.tokens.SCORED", 300)
    model = tmp_path / "model"
    zoo.save(model, byte_tokenizer, "llama", vocab_size=len(byte_tokenizer))
    weights = {"format": "int4", "granularity": "group", "group": 32, "symmetric": False}
    settings = {"shrink": 0.2, "correction": 0.0, "sweeps": 1}
    recipe = Recipe.from_dict(
        {
            "summary": "",
            "keep": ["embeddings"],
            "calibration": {"set": "prose-en", "samples": 4, "tokens": 48},
            "scheme": {"weights": weights},
            "passes": [{"gptq": settings}],
            "export": [{"checkpoint": {"layout": "dense"}}],
        },
        name="x",
    )
    request = Request.of(str(model), recipe=recipe, out=tmp_path / "out", speed=False)
    ids = prepare(request).calibration.ids  # type: ignore[union-attr]
    compile_model(request)
    reloaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model", dtype=torch.float32)
    with torch.no_grad():
        x = reloaded.model(input_ids=ids).last_hidden_state.flatten(0, 1).double()
    source = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    weight, scheme = source.lm_head.weight.detach(), WeightScheme.model_validate(weights)
    expected = gptq(weight, (x.T @ x / len(x)).float(), scheme, shrink=0.2, sweeps=1).tensor
    solved, stored = load_format("int4").dequantize(expected), reloaded.lm_head.weight.detach()
    off = (solved - stored).abs() > 1e-3 * weight.abs().max()
    assert float(off.float().mean()) < 0.01  # ties, of inputs that were summed in another order
    nearest, _ = in_pieces(weight, None, scheme, RTN)
    lost = [
        float((x @ (weight - each).double().T).square().mean())
        for each in (stored, load_format("int4").dequantize(nearest))
    ]
    assert lost[0] < 0.8 * lost[1]


def test_a_head_whose_damping_is_raised_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs in one direction alone have no Cholesky factor, as they are."""
    scheme = SCHEMES["int4 asymmetric"]
    weight = torch.randn(101, 96, generator=torch.Generator().manual_seed(0))
    moments = Moments(torch.ones(1, 96, 96, dtype=torch.float64), name="lm_head")
    monkeypatch.setattr(assign, "PIECE", 96 * 7)
    in_pieces(weight, moments, scheme, {"gptq": Gptq.Settings(damping=0.0, shrink=0.0)})
    assert [(each.code, each.where, each.from_) for each in moments.decisions] == [("damping-raised", "lm_head", 0.0)]
    solved = Moments(torch.eye(96, dtype=torch.float64)[None], name="lm_head")
    in_pieces(weight, solved, scheme, {"gptq": Gptq.Settings()})
    assert solved.decisions == []


@pytest.mark.parametrize(("wrong", "code"), [(-1e4, "hessian-not-positive"), (float("nan"), "hessian-nonfinite")])
def test_errors_of_a_head_name_it(wrong: float, code: str) -> None:
    moments = Moments(torch.full((1, 96, 96), wrong, dtype=torch.float64), name="lm_head")
    moments.hessian.diagonal(dim1=1, dim2=2).fill_(1.0)
    with pytest.raises(InputError) as caught:
        in_pieces(torch.ones(5, 96), moments, SCHEMES["int4 asymmetric"], {"gptq": Gptq.Settings(shrink=0.3)})
    assert (caught.value.code, caught.value.where) == (code, "lm_head")
