"""Where a model is hurt: held against whole models of transformers, and against errors put there on purpose."""

from pathlib import Path

import numpy as np
import pytest
import torch
import zoo

from quantkit.measurement.accuracy.harm import Depth, Harm, worst
from quantkit.measurement.accuracy.positions import Accuracy
from quantkit.model.source.open import open_model
from quantkit.model.streaming.stream import StreamedModel

UP = "model.layers.1.mlp.up_proj"


def stream(model: torch.nn.Module, folder: Path) -> StreamedModel:
    model.save_pretrained(folder)  # type: ignore[operator]
    return StreamedModel(open_model(str(folder)))


def through_depth(
    original: StreamedModel, candidate: StreamedModel, ids: torch.Tensor, layers: list[str] | None = None
) -> Harm:
    depth = Depth(original, candidate, ids, layers=layers or [])
    for stage, index in enumerate(original.visits):
        depth.visit(stage, candidate.load(index))
    return depth.harm


def behind(model: torch.nn.Module, names: list[str], ids: torch.Tensor) -> list[torch.Tensor]:
    """The hidden state behind each block, [tokens, width]."""
    kept: list[torch.Tensor] = []
    for name in names:
        model.get_submodule(name).register_forward_hook(
            lambda _, __, out: kept.append((out[0] if isinstance(out, tuple) else out)[0])
        )
    with torch.no_grad():
        model(input_ids=ids)
    return kept


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_what_builds_up_is_the_error_of_the_hidden_states_behind_each_block(name: str, tmp_path: Path) -> None:
    models = [zoo.tiny(name), zoo.tiny(name)]
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in models[1].parameters():
            parameter.add_(0.01 * torch.randn(parameter.shape, generator=generator))
    found = through_depth(*(stream(model, tmp_path / str(i)) for i, model in enumerate(models)), zoo.ids(2, 12)).blocks
    states = [behind(model, [block.name for block in found], zoo.ids(2, 12)[:1]) for model in models]
    wanted = [
        float(((b - a).square().sum(-1) / a.square().sum(-1)).mean().sqrt()) for a, b in zip(*states, strict=True)
    ]
    assert [block.error for block in found] == pytest.approx(wanted, rel=1e-4)
    assert min(wanted) > 1e-3


def test_one_rounded_layer_is_found_whatever_scale_was_folded_around_it(tmp_path: Path) -> None:
    one, two = zoo.tiny("llama"), zoo.tiny("llama")
    generator = torch.Generator().manual_seed(1)
    block = two.get_submodule("model.layers.1")
    up, down, norm = (
        block.get_submodule(name) for name in ("mlp.up_proj", "mlp.down_proj", "post_attention_layernorm")
    )
    error = 0.1 * up.weight.std() * torch.randn(up.weight.shape, generator=generator)
    rows, columns = (torch.rand(n, generator=generator) + 0.5 for n in up.weight.shape)
    with torch.no_grad():
        # exact folds into the norm before and the layer behind, and then an error
        norm.weight.div_(columns)
        block.get_submodule("mlp.gate_proj").weight.mul_(columns)
        up.weight.add_(error).mul_(columns).div_(rows[:, None])
        down.weight.mul_(rows)
    names = [f"model.layers.{i}.{part}" for i in range(3) for part in ("self_attn.q_proj", "mlp.up_proj")]
    harm = through_depth(stream(one, tmp_path / "1"), stream(two, tmp_path / "2"), zoo.ids(1, 24), layers=names)
    errors = {layer.name: layer.error for layer in harm.layers}
    assert set(errors) == set(names)
    # ‖E x‖ / ‖W x‖ of the unfolded model
    x: list[torch.Tensor] = []
    one.get_submodule(UP).register_forward_pre_hook(lambda _, args: x.append(args[0][0]))
    with torch.no_grad():
        one(input_ids=zoo.ids(1, 24))
        wanted = float((x[0] @ error.T / rows).norm() / (x[0] @ one.get_submodule(UP).weight.T / rows).norm())
    assert errors.pop(UP) == pytest.approx(wanted, rel=0.05)
    assert max(errors.values()) < 1e-5
    own = [block.own for block in harm.blocks]
    assert own[1] > 1e-3
    assert max(own[0], own[2]) < 1e-5
    assert harm.blocks[2].error > 1e-4


def test_outlier_channels_before_and_after_a_fold(tmp_path: Path) -> None:
    one, two = zoo.tiny("llama"), zoo.tiny("llama")
    for model, factor in ((one, 100.0), (two, 1.0)):
        with torch.no_grad():
            norm = model.get_submodule("model.layers.0.input_layernorm").weight
            norm[:] = 1.0
            norm[3] = factor
            for part in "qkv":
                model.get_submodule(f"model.layers.0.self_attn.{part}_proj").weight[:, 3] /= factor
    names = [f"model.layers.0.self_attn.{part}_proj" for part in "qkvo"]
    harm = through_depth(stream(one, tmp_path / "1"), stream(two, tmp_path / "2"), zoo.ids(1, 24), layers=names)
    first, second = harm.inputs  # q, k and v share one
    assert [first.name, second.name] == [names[0], names[3]]
    assert first.before > 20
    assert first.after < 10
    assert second.before == pytest.approx(second.after, rel=1e-4)
    assert max(block.error for block in harm.blocks) < 1e-5


def test_beside_a_score_it_takes_the_blocks_that_the_score_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = stream(zoo.tiny("llama"), tmp_path / "a"), stream(zoo.tiny("llama", seed=1), tmp_path / "b")
    ids, loaded, load = zoo.ids(2, 8), list[int](), StreamedModel.load
    alone, scored = through_depth(one, two, ids, layers=[UP]), two.answers(ids).all()
    assert alone.blocks[0].error > 0.1

    def watched(self: StreamedModel, index: int) -> torch.nn.Module:
        loaded.extend([index] if self is two else [])
        return load(self, index)

    monkeypatch.setattr(StreamedModel, "load", watched)
    depth = Depth(one, two, ids, layers=[UP])
    two.meanwhile = depth.visit
    assert torch.equal(two.answers(ids).all(), scored)
    assert loaded == [0, 1, 2]
    assert depth.harm == alone


def test_a_model_against_itself_and_no_more_tokens_than_a_curve_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = zoo.tiny("llama")
    one, two = (stream(model, tmp_path / name) for name in "ab")
    found = through_depth(one, two, zoo.ids(1, 8), layers=[UP])
    assert [(block.error, block.own) for block in found.blocks] == [(0.0, 0.0)] * 3
    assert found.layers[0].error < 1e-6
    seen: list[torch.Size] = []
    begin = StreamedModel.begin

    def watched(self: StreamedModel, ids: torch.Tensor, chunk: int) -> object:
        seen.append(ids.shape)
        return begin(self, ids, chunk)

    monkeypatch.setattr("quantkit.measurement.accuracy.harm._TOKENS", 5)
    monkeypatch.setattr(StreamedModel, "begin", watched)
    through_depth(one, two, zoo.ids(3, 8))
    assert seen == [(1, 5), (1, 5)]


def test_the_worst_positions_are_those_with_the_largest_divergence() -> None:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 50, (3, 20), generator=generator)
    original = torch.randn(3, 20, 50, generator=generator)
    candidate = original + 0.01 * torch.randn(3, 20, 50, generator=generator)
    candidate[2, 7, 11] += 30.0
    accuracy = Accuracy()
    for row, before, after in zip(ids, original, candidate, strict=True):
        accuracy.add(row, before, after)
    found = worst(accuracy.items(), ids, lambda tokens: " ".join(map(str, tokens)))
    first = found.worst[0]
    assert (first.sequence, first.position) == (2, 7)
    assert first.before.split() == [str(token) for token in ids[2, :8].tolist()]
    assert first.follows == str(int(ids[2, 8]))
    assert (first.candidate, first.original) == ("11", str(int(original[2, 7].argmax())))
    assert first.candidate_chance == pytest.approx(float(candidate[2, 7].softmax(0).max()), rel=1e-5)
    assert first.original_chance == pytest.approx(float(original[2, 7].softmax(0).max()), rel=1e-5)
    kl = accuracy.items().kl
    assert [position.kl for position in found.worst] == sorted(kl.tolist(), reverse=True)[:10]
    assert found.worst_share == pytest.approx(float(np.max(kl) / np.sum(kl)))


def test_an_input_of_zeros_has_no_outlier(tmp_path: Path) -> None:
    model = zoo.tiny("llama", num_hidden_layers=1)
    with torch.no_grad():
        model.get_parameter("model.layers.0.self_attn.v_proj.weight").zero_()
    sides = (stream(model, tmp_path / "m"), StreamedModel(open_model(str(tmp_path / "m"))))
    linear = "model.layers.0.self_attn.o_proj"
    (found,) = through_depth(*sides, zoo.ids(1, 8), layers=[linear]).inputs
    assert (found.name, found.before, found.after) == (linear, 1.0, 1.0)
