"""Staged statistics: the sums, the order of visits, pausing against replaying, and what a visit changes."""

import copy
from dataclasses import replace

import pytest
import torch
import zoo
from torch import Tensor, nn

from quantkit.calibrate.statistics.collected import Original, Stats
from quantkit.calibrate.statistics.sums import InputStats
from quantkit.errors import InputError
from quantkit.model.streaming.stream import LoadedModel
from quantkit.model.structure import residual
from quantkit.model.structure.traced import SharedInput, trace, weight_of


def stats(name: str, chunk: int, samples: int = 5, tokens: int = 12) -> Stats:
    loaded = LoadedModel(zoo.tiny(name))
    calls = loaded.begin(zoo.ids(samples, tokens), chunk)
    module = loaded.load(0)
    structure = trace(module, lambda: calls.run(module, 0, calls.hidden[:chunk]))
    return Stats(module, structure.groups, calls, 0, calls.hidden)


def collected(found: Stats) -> dict[str, InputStats]:
    kept: dict[str, InputStats] = {}
    found.staged(lambda group, seen: kept.__setitem__(group.name, seen))
    return kept


def inputs_of(found: Stats, *more: str) -> dict[str, Tensor]:
    """What each first member, and `more` modules, receive: caught by plain hooks, [tokens, K] float64."""
    caught: dict[str, list[Tensor]] = {name: [] for name in (*(group.name for group in found.groups), *more)}
    hooks = [
        found.module.get_submodule(name).register_forward_pre_hook(
            lambda _, args, kept=kept: kept.append(args[0].reshape(-1, args[0].shape[-1]).double())
        )
        for name, kept in caught.items()
    ]
    found.calls.run_all(found.module, found.stage, found.hidden)
    for hook in hooks:
        hook.remove()
    return {name: torch.cat(parts) for name, parts in caught.items()}


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).abs().max() / expected.abs().max())


@pytest.mark.parametrize("name", ["llama", "phi3", "gpt2", "opt", "bert"])
@pytest.mark.parametrize("chunk", [5, 2, 1])
def test_sums_are_what_they_say(name: str, chunk: int) -> None:
    found = stats(name, chunk)
    seen, expected = collected(found), inputs_of(found)
    assert list(seen) == [group.name for group in found.groups]
    for group, x in expected.items():
        assert seen[group].tokens == x.shape[0] == 60
        assert seen[group].hessian.dtype == torch.float32
        assert relative(seen[group].hessian, x.T @ x / x.shape[0]) < 1e-6
        assert relative(seen[group].absmax, x.abs().amax(dim=0)) < 1e-6
        assert relative(seen[group].mean, x.mean(dim=0)) < 1e-6
        assert relative(seen[group].sample, x) < 1e-6  # few enough for all to be kept
    # the block's output came along
    assert found.outputs is not None
    assert relative(found.outputs, found.calls.run_all(found.module, 0, found.hidden)) < 1e-6


def test_mean_squares_need_no_products() -> None:
    """What `rtn: {range: importance}` asks for: the Hessian's diagonal without the time that the rest of it takes."""
    inputs = torch.randn(9, 5, 300, generator=torch.Generator().manual_seed(0))
    whole = InputStats(inputs.split(9)).hessian.diagonal()
    bad = inputs.clone()
    bad[3, 1, 7] = torch.inf
    for asked in ({}, {"products": False}, {"moments": False}, {"moments": False, "noise": False}):
        found = InputStats(inputs.split(2), **asked)
        assert relative(found.mean_square, whole) < 1e-6
        assert found.tokens == 45
        with pytest.raises(InputError, match="1 NaN or infinite inputs"):
            InputStats([bad], **asked)
    for wanted in ("low", "high", "mean", "absmax"):
        with pytest.raises(AssertionError, match="moments"):
            getattr(InputStats(inputs.split(2), moments=False), wanted)


def test_a_sample_is_spread_over_sequences_and_bounded_however_it_comes() -> None:
    inputs = torch.arange(40 * 100.0).reshape(40, 100, 1)
    for chunk in (40, 7, 1):
        found = InputStats(inputs.split(chunk)).sample
        assert found.shape == (512, 1)
        assert torch.equal(found[:15, 0], torch.arange(0, 100.0, 7))
        assert len({int(row) // 100 for row in found}) == 512 // 15 + 1
    assert InputStats([torch.ones(600, 3)]).sample.shape == (512, 3)


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_changing_a_weight_in_a_visit_changes_what_later_stages_see(name: str) -> None:
    """True sequential: the inputs of every later stage come from the changed linears, chunked or not."""
    results = {}
    for chunk in (5, 2):
        found = stats(name, chunk)
        before = collected(found)
        plain = found.settled()

        def halve(group: SharedInput, seen: InputStats, found: Stats = found) -> None:
            assert isinstance(seen, InputStats)
            for member in group.members:
                module = found.module.get_submodule(member)
                module.weight = nn.Parameter(module.weight.detach() / 2)

        kept: dict[str, Tensor] = {}

        def visit(group: SharedInput, seen: InputStats, kept: dict[str, Tensor] = kept, halve=halve) -> None:  # type: ignore[no-untyped-def]
            kept[group.name] = seen.hessian.clone()
            halve(group, seen)

        found.staged(visit)
        first, *later = [group.name for group in found.groups]
        assert torch.equal(kept[first], before[first].hessian), "the first stage comes before any change"
        for group in later:
            assert relative(kept[group], before[group].hessian) > 1e-3
        assert found.outputs is not None
        assert relative(found.outputs, plain) > 1e-3
        # what the run put out is what the block with its new weights puts out
        assert relative(found.outputs, found.calls.run_all(found.module, 0, found.hidden)) < 1e-5
        # and every stage saw what the block as it stands feeds it
        for group, x in inputs_of(found).items():
            assert relative(kept[group], x.T @ x / x.shape[0]) < 1e-5
        results[chunk] = kept
    for group, hessian in results[5].items():
        assert relative(results[2][group], hessian) < 1e-5


@pytest.mark.parametrize("large", [2048, 8])
def test_every_input_is_worked_on_once_without_gradients_on_any_threads(
    large: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "quantkit.calibrate.statistics.collected._LARGE", large
    )  # inputs of more features take all threads, one after another
    before, answers = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 5):
            torch.set_num_threads(threads)
            found = stats("llama", 5)
            seen = found.each(lambda sums: (torch.is_grad_enabled(), sums.taken()))
            assert list(seen) == [group.name for group in found.groups]
            answers.append({name: hessian for name, (graded, hessian) in seen.items() if not graded})
    finally:
        torch.set_num_threads(before)
    for others in answers[1:]:
        assert all(relative(others[name], hessian) < 1e-5 for name, hessian in answers[0].items())
    assert len(answers[0]) == len(found.groups) == len(answers[-1])


def test_the_number_of_threads_changes_no_sum() -> None:
    x = torch.randn(300, 16, generator=torch.Generator().manual_seed(0))
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            sums = InputStats()
            for part in (x[:100], x[100:]):
                sums.add(part, part.sin(), {"linear": part.cos()})
            found.append((sums.hessian, sums.drift, sums.taken_lag("linear")))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
    hessian, drift, lag = found[0]
    assert relative(hessian, x.double().T @ x.double() / 300) < 1e-6
    assert relative(drift, (x.sin() - x).double().T @ x.double() / 300) < 1e-5
    assert relative(lag, x.cos().double().T @ x.double() / 300) < 1e-5


@pytest.mark.parametrize("chunk", [5, 2])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_activations_that_are_not_finite_name_the_linear(chunk: int, bad: float) -> None:
    found = stats("llama", chunk)
    with torch.no_grad():
        found.module.get_parameter("self_attn.v_proj.weight")[0, 0] = bad
    with pytest.raises(InputError) as caught:
        collected(found)
    assert caught.value.code == "activations-nonfinite"
    assert caught.value.where == "self_attn.o_proj"
    assert not any(module._forward_pre_hooks for module in found.module.modules()), "hooks are gone"


@pytest.mark.parametrize("chunk", [4, 1])
def test_half_precision_inputs_are_summed_in_float32(chunk: int) -> None:
    module = nn.Sequential(nn.Linear(8, 8)).to(torch.bfloat16)
    x = torch.randn(4, 64, 8, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    calls = LoadedModel(module).begin(x, chunk)
    seen = collected(Stats(module, (SharedInput(("0",), 8),), calls, 0, x))["0"]
    rows = x.reshape(-1, 8).double()
    assert relative(seen.hessian, rows.T @ rows / rows.shape[0]) < 1e-6


class Sometimes(nn.Module):
    """Its second linear runs only on large inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.rare = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.always(x)
        return self.rare(x) if float(x.abs().max()) > 100 else x


@pytest.mark.parametrize("chunk", [4, 2])
def test_what_no_input_reaches_is_not_visited(chunk: int) -> None:
    module, x = Sometimes(), torch.ones(4, 3, 4)
    calls = LoadedModel(module).begin(x, chunk)
    groups = (SharedInput(("always",), 4), SharedInput(("rare",), 4))
    assert list(collected(Stats(module, groups, calls, 0, x))) == ["always"]


def test_what_runs_without_a_token_is_named() -> None:
    """As the audio layers of a model that is calibrated on text."""
    seen = InputStats([torch.ones(0, 4)], "audio_mlp.up_proj")
    with pytest.raises(InputError, match=r"calibration-unreached.*audio_mlp.up_proj"):
        _ = seen.hessian


def test_settled_runs_the_block_when_its_output_is_not_known() -> None:
    found = stats("llama", 2)
    assert found.outputs is None
    first = found.settled()
    assert found.settled() is first
    with torch.no_grad():
        found.module.get_parameter("mlp.down_proj.weight").mul_(2)
    found.outputs = None  # what a pass does that changes weights without a staged run
    assert relative(found.settled(), first) > 1e-3


def test_noise_is_the_share_of_a_correlation_that_is_chance() -> None:
    generator = torch.Generator().manual_seed(0)
    independent = torch.randn(64, 32, 24, generator=generator)
    shared = torch.randn(64, 32, 1, generator=generator) + 0.05 * torch.randn(64, 32, 24, generator=generator)
    assert InputStats([independent]).noise > 0.5, "what correlates by chance alone"
    assert InputStats([shared]).noise < 0.01, "what truly correlates"
    more = torch.randn(512, 32, 24, generator=generator) + torch.randn(512, 32, 1, generator=generator)
    assert InputStats([more]).noise < InputStats([more[:16]]).noise, "more text, less chance"
    chunks = InputStats([more[:5], more[5:16]])
    whole = InputStats([more[:16]])
    assert float(chunks.noise) == pytest.approx(float(whole.noise), rel=1e-5), "chunks do not matter"
    assert InputStats([more[:1]]).noise == 1.0, "one sequence says nothing about another"
    for scale in (1e-8, 1e7):
        assert float(InputStats([more[:16] * scale]).noise) == pytest.approx(float(whole.noise), rel=1e-4)
    dead, tiny = more[:16].clone(), more[:16].clone()
    dead[..., 5] = 0
    tiny[..., 5] *= 1e-20  # its square underflows
    assert float(InputStats([tiny]).noise) == pytest.approx(float(InputStats([dead]).noise), rel=1e-4)


def test_a_hessian_that_is_taken_is_the_same_and_leaves_nothing() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 16, 300, generator=generator) + torch.randn(6, 16, 1, generator=generator)
    kept, taken = InputStats([x]), InputStats([x])
    assert taken.noise == kept.noise
    hessian = taken.taken()
    assert torch.equal(hessian, kept.hessian) and torch.equal(hessian, hessian.T)
    flat = x.reshape(-1, 300).double()
    assert relative(hessian.double(), flat.T @ flat / len(flat)) < 1e-6
    assert kept.noise == taken_noise(kept), "as from the Hessian itself"
    assert taken._hessian is None and not taken._halves


def taken_noise(seen: InputStats) -> float:
    """By the definition, from correlations."""
    size = seen.hessian.diagonal().sqrt()
    first, second, whole = ((part / size / size[:, None]).triu(1) for part in (*seen.halves, seen.hessian))
    return pytest.approx(float((first - second).square().sum() / 4 / whole.square().sum()), rel=1e-4)  # type: ignore[return-value]


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
@pytest.mark.parametrize("chunk", [5, 2])
def test_drift_is_how_far_inputs_are_from_the_original_ones(name: str, chunk: int) -> None:
    """Two streams: other hidden states go in, and linears change on the way in one of them.

    Where an output is added to a stream, each token counts relative to what the stream is there.
    """
    found = stats(name, chunk)
    module = copy.deepcopy(found.module)
    hidden = found.hidden + 0.1 * torch.randn(found.hidden.shape, generator=torch.Generator().manual_seed(0))
    skips = dict(residual.skips(module, lambda block: found.calls.run(block, 0, found.hidden[:chunk])))
    found.original = Original(module, hidden, found.calls, skips)
    plain = Stats(module, found.groups, found.calls, 0, hidden)
    before, expected = inputs_of(plain, *skips.values()), plain.settled()
    kept: dict[str, Tensor] = {}
    lags: dict[str, Tensor] = {}
    hessians: dict[str, Tensor] = {}

    weights: dict[str, Tensor] = {}

    def visit(group: SharedInput, seen: InputStats) -> None:
        hessians[group.name] = seen.hessian
        if seen.drift is not None:
            kept[group.name] = seen.drift
        for member in group.members:
            lag = seen.taken_lag(member)
            assert (lag is None) == (member not in skips) == (seen.drift is not None)
            linear = found.module.get_submodule(member)
            if lag is not None:
                lags[member], weights[member] = lag, weight_of(linear)
            linear.weight = nn.Parameter(linear.weight.detach() * 0.9)

    found.staged(visit, drift=True)
    after = inputs_of(found, *skips.values())
    for group, hessian in hessians.items():
        x = after[group]
        w = 1 / after[skips[group]].square().mean(dim=1, keepdim=True) if group in skips else torch.ones(len(x), 1)
        assert relative(hessian, (w * x).T @ x / x.shape[0]) < 1e-5
        if group in kept:
            assert relative(kept[group], (before[group] - x).T @ x / x.shape[0]) < 1e-5
    assert len(lags) == 2
    for linear, source in skips.items():
        x = after[linear]
        # how far the stream is behind once the output is added, which the original weights compute from both inputs
        behind = before[source] - after[source] + (before[linear] - x) @ weights[linear].T.double()
        w = 1 / after[source].square().mean(dim=1, keepdim=True)
        assert relative(lags[linear], (w * behind).T @ x / x.shape[0]) < 1e-5
    assert relative(found.original_outputs(), expected) < 1e-6
    assert not any(each._forward_pre_hooks for each in module.modules()), "hooks are gone"


def test_drift_is_not_known_without_the_original_stream() -> None:
    assert all(seen.drift is None for seen in collected(stats("llama", 5)).values())
    some = InputStats()
    x = torch.ones(2, 3, 4)
    some.add(x, x + 1)
    assert torch.equal(some.drift, torch.ones(4, 4))
    some.add(x)
    assert some.drift is None, "nor of what only some chunks have"
    lags = {"linear": torch.ones(2, 3, 5)}
    for chunks in ((lags, None), (None, lags), (lags, lags)):
        some = InputStats()
        for lag in chunks:
            some.add(x, None, lag)
        assert (some.taken_lag("linear") is None) == (None in chunks)


def test_a_token_without_a_stream_to_be_added_to_does_not_count() -> None:
    x, stream = torch.ones(1, 2, 3), torch.tensor([[[2.0, 2.0], [0.0, 0.0]]])
    found = InputStats()
    found.add(x, x, {}, stream)
    assert torch.equal(found.hessian, torch.full((3, 3), 1 / 4 / 2))
    assert torch.equal(found.mean, torch.ones(3)), "what is no product is not weighed"


class Routed(nn.Module):
    """Its expert receives the tokens that are large, others in each stream."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.expert = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.gate(x)
        return self.expert(x[x[..., 0] > 0])


def test_drift_is_of_the_same_tokens_or_not_at_all() -> None:
    module, x = Routed(), torch.randn(4, 6, 4, generator=torch.Generator().manual_seed(0))
    groups = (SharedInput(("gate",), 4), SharedInput(("expert",), 4))
    calls = LoadedModel(module).begin(x, 4)
    found = Stats(module, groups, calls, 0, x, original=Original(copy.deepcopy(module), -x, calls))
    drifts = {}
    found.staged(lambda group, seen: drifts.__setitem__(group.name, seen.drift), drift=True)
    assert drifts["gate"] is not None
    assert drifts["expert"] is None


@pytest.mark.parametrize("chunk", [5, 2])
def test_statistics_of_the_first_sequences_are_those_of_a_run_on_them_alone(chunk: int) -> None:
    whole, few = stats("llama", chunk), stats("llama", min(chunk, 3), samples=3)
    whole = replace(whole, few=lambda sequences: few.calls, hidden=torch.cat([few.hidden, whole.hidden[3:]]))
    taken = whole.each(lambda seen: seen.hessian, sequences=3)
    assert whole.outputs is None
    expected = few.each(lambda seen: seen.hessian)
    assert list(taken) == [group.name for group in whole.groups]
    assert all(torch.equal(taken[name], expected[name]) for name in expected)


@pytest.mark.parametrize("chunk", [5, 2])
def test_statistics_need_no_output_of_the_block(chunk: int) -> None:
    found, expected = stats("llama", chunk), collected(stats("llama", chunk))
    ran: list[str] = []
    last = found.groups[-1].members[-1]
    found.module.get_submodule(last).register_forward_hook(lambda *_: ran.append(last))
    taken = found.each(lambda seen: seen.hessian)
    assert not ran
    assert all(torch.equal(taken[name], expected[name].hessian) for name in expected)


def test_the_noise_does_not_depend_on_threads() -> None:
    """SmolLM2 by `gptq-int4` had other codes on two threads than on one."""
    drawn = [torch.randn(4, 64, 576, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    before, found = torch.get_num_threads(), list[list[float]]()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found.append([float(InputStats([inputs]).noise) for inputs in drawn])
    torch.set_num_threads(before)
    assert found[0] == found[1] == found[2]
