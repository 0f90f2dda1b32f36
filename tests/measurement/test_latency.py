from itertools import combinations

import numpy as np
import pytest

from quantkit.errors import InputError
from quantkit.measurement.operators.ceilings import Ceiling
from quantkit.measurement.operators.tax import StepCost, captured_gain
from quantkit.measurement.timing.latency import TimedSide, measure
from quantkit.measurement.timing.schedule import TimingPlan

DEVICE = {"id": "x", "kind": "cpu", "name": "a processor"}
READ, FP32, INT8 = 10e9, 100e9, 400e9
FLOAT = StepCost("float32", 540e6, kv_bytes_per_token=46e3, flops_per_token=270e6, attention_flops=140e3)
INT4 = StepCost("int4", 85e6, kv_bytes_per_token=46e3, flops_per_token=270e6, attention_flops=140e3, compute="int8")


class World:
    """A clock that only steps move, and the noise of its machine."""

    def __init__(self, noise=0.01, seed=0):
        self.now, self.noise, self.rng, self.steps, self.prepared = 0.0, noise, np.random.default_rng(seed), 0, 0

    def __call__(self):
        return self.now

    def step(self, seconds):
        def run():
            self.steps += 1
            self.now += seconds * float(np.exp(self.noise * self.rng.normal()))

        return run


class FakeSide:
    def __init__(self, world, decode, prefill=lambda batch, tokens: 1e-3 * tokens, *, fits=lambda b, c: True, cost=0.0):
        self.world, self.times, self.fits, self.cost = world, {"decode": decode, "prefill": prefill}, fits, cost

    def decode(self, batch, context):
        return self._step("decode", batch, context)

    def prefill(self, batch, tokens):
        return self._step("prefill", batch, tokens)

    def _step(self, kind, batch, size):
        self.world.prepared += 1
        self.world.now += self.cost
        if not self.fits(batch, size):
            raise InputError("out-of-memory", where=f"batch {batch}", value="too large")
        return self.world.step(self.times[kind](batch, size))


def ceilings():
    return [
        Ceiling("ceiling.read", "B/s", (READ,) * 7, {"threads": 2}, {"bytes": 1}),
        Ceiling("ceiling.compute", "flop/s", (FP32,) * 7, {"compute_type": "fp32"}, {"M": 1}),
        Ceiling("ceiling.compute", "op/s", (INT8,) * 7, {"compute_type": "int8"}, {"M": 1}),
    ]


def run(ours, theirs, *, world, plan=None, ceilings=ceilings, progress=None):
    return measure(
        TimedSide(INT4, "ours", 85_000_000, model=ours),
        TimedSide(FLOAT, "theirs", model=theirs),
        runtime="onnxruntime",
        settings={"threads": 2},
        device=DEVICE,
        versions={"onnxruntime": "1"},
        plan=plan or TimingPlan(batches=(1, 8), contexts=(128,), prefills=(64,), seconds=20),
        ceilings=ceilings,
        progress=progress,
        clock=world,
    )


def named(rows, name, **wanted):
    return [row for row in rows if row.name == name and all(getattr(row, k) == v for k, v in wanted.items())]


def falling(batch, context):
    """Twice as fast at batch 1, as fast at batch 8: the gain falls as a power of the batch."""
    return 0.030 * 2 ** (np.log(batch) / np.log(8) - 1)


def test_every_cell_has_its_rows():
    world = World()
    plan = TimingPlan(batches=(1, 4), contexts=(128, 1024), prefills=(64, 256), seconds=10)
    rows = run(FakeSide(world, lambda b, c: 0.01), FakeSide(world, lambda b, c: 0.03), world=world, plan=plan)
    counts = {name: len(named(rows, name)) for name in {row.name for row in rows}}
    assert counts == {
        "ceiling.read": 1,
        "ceiling.compute": 2,
        "latency.decode_step": 4,
        "throughput.decode": 4,
        "bandwidth.effective": 4,
        "latency.prefill": 2,
        "throughput.prefill": 2,
        "tax.total": 6,
        "tax.break_even": 3,
    }
    for row in rows:
        assert row.device is not None
        assert row.subject == ("x" if row.name.startswith("ceiling") else "ours")
        assert row.line()


def test_a_decode_row_has_all_that_the_contract_names():
    world = World()
    rows = run(FakeSide(world, lambda b, c: 0.01), FakeSide(world, lambda b, c: 0.03), world=world)
    (row,) = named(rows, "latency.decode_step", batch=8)
    assert (row.value, set(row.quantiles)) == (pytest.approx(0.01, rel=0.02), {"p50", "p90", "p99"})
    assert row.quantiles["p50"] == row.value
    assert row.ci95[0] <= row.value <= row.ci95[1]
    assert row.n >= 30
    assert 0 < row.aa_spread < 0.05
    assert (row.baseline.subject, row.baseline.ratio) == ("theirs", pytest.approx(3.0, rel=0.02))
    assert row.baseline.ratio_ci95[0] > 2.9
    assert (row.shape, row.resident_bytes) == ({"new_tokens": 1, "context": 128}, 85_000_000)
    assert row.settings["threads"] == 2
    assert row.settings["p99_ratio_low"] < 3.0 < row.settings["p99_ratio_high"]
    (rate,) = named(rows, "throughput.decode", batch=8)
    assert (rate.value, rate.baseline.ratio) == (pytest.approx(8 / row.value), row.baseline.ratio)
    (prefill,) = named(rows, "throughput.prefill")
    assert prefill.value == pytest.approx(1000, rel=0.02)


def test_tax_is_time_beyond_the_bound():
    world = World(noise=0.0)
    rows = run(FakeSide(world, lambda b, c: 0.02), FakeSide(world, lambda b, c: 0.07), world=world)
    (row,) = named(rows, "tax.total", batch=1, shape={"new_tokens": 1, "context": 128})
    moved = 85e6 + 129 * 46e3
    assert row.op.bound_s == pytest.approx(moved / READ)
    assert row.op.hp_bound_s == pytest.approx((540e6 + 129 * 46e3) / READ)
    assert row.value == pytest.approx(0.02 - row.op.bound_s)
    assert row.baseline.value == pytest.approx(0.07 - row.op.hp_bound_s)
    assert (row.settings["share_of_baseline"], row.op.M) == (pytest.approx(row.value / 0.07), 1)
    assert row.op.raw_s is None
    assert "sum-only" in row.flags
    seen = (129 * 46e3 / READ, 129 * 140e3 / FP32)
    assert row.op.shares == {
        "int4 in int8": pytest.approx((85e6 / READ, 270e6 / INT8)),
        "attention": pytest.approx(seen),
    }
    assert row.op.hp_shares["float32"] == pytest.approx((540e6 / READ, 270e6 / FP32))
    promised = row.op.hp_bound_s / row.op.bound_s
    assert captured_gain(row) == pytest.approx((3.5 - 1) / (promised - 1))
    (effective,) = named(rows, "bandwidth.effective", batch=1)
    assert effective.value == pytest.approx(moved / 0.02)
    assert effective.settings["share_of_ceiling"] == pytest.approx(effective.value / READ)


def test_a_prefill_is_bound_by_its_arithmetic():
    world = World(noise=0.0)
    rows = run(FakeSide(world, lambda b, c: 0.02), FakeSide(world, lambda b, c: 0.07), world=world)
    (row,) = named(rows, "tax.total", shape={"new_tokens": 64, "context": 0})
    # int8 products and attention in float32
    assert (row.op.bound_s, row.op.M) == (pytest.approx(64 * 270e6 / INT8 + 64 * 65 / 2 * 140e3 / FP32), 64)


def test_a_step_below_its_bound_is_shown_and_flagged():
    world = World()
    rows = run(FakeSide(world, lambda b, c: 0.001), FakeSide(world, lambda b, c: 0.07), world=world)
    for row in named(rows, "tax.total", shape={"new_tokens": 1, "context": 128}):
        assert row.value < 0
        assert "negative-tax" in row.flags


def test_without_a_ceiling_there_is_no_tax():
    def no_int8():
        return [*ceilings()[:2], Ceiling("ceiling.compute", "op/s", (), {"compute_type": "int8"}, {}, "not measured")]

    world = World()
    side = FakeSide(world, lambda b, c: 0.01)
    rows = run(side, side, world=world, ceilings=no_int8)
    for row in named(rows, "tax.total"):
        assert row.value is None
        assert "no-ceiling" in row.flags
    assert all(row.value is not None for row in named(rows, "bandwidth.effective"))


def test_break_even_is_where_the_first_win_ends():
    world = World(noise=0.02)
    plan = TimingPlan(batches=(1, 2, 4, 8, 16, 32), contexts=(128,), prefills=(), seconds=60)
    rows = run(FakeSide(world, falling), FakeSide(world, lambda b, c: 0.03), world=world, plan=plan)
    (row,) = named(rows, "tax.break_even")
    # surely faster up to a little below batch 8, where the two are equal
    assert 6.5 < row.value < 8.0
    assert row.ci95[0] < row.value < row.ci95[1]
    assert row.ci95[1] < 9
    assert row.settings["win_1_from"] is None
    assert row.settings["win_1_to"] == row.value
    assert row.settings["win_intervals"].startswith("1 to ")
    assert (row.settings["measured_from"], row.settings["measured_to"]) == (1, 32)
    assert row.shape == {"context": 128, "new_tokens": 1}


@pytest.mark.parametrize(("ours", "flag"), [(0.01, "wins-everywhere"), (0.05, "wins-nowhere"), (0.03, "wins-nowhere")])
def test_no_break_even_within_the_range(ours, flag):
    world = World()
    rows = run(FakeSide(world, lambda b, c: ours), FakeSide(world, lambda b, c: 0.03), world=world)
    (row,) = named(rows, "tax.break_even", shape={"context": 128, "new_tokens": 1})
    assert row.value is None
    assert flag in row.flags


def test_a_shape_that_does_not_fit_is_skipped():
    world = World()
    ours = FakeSide(world, lambda b, c: 0.01, fits=lambda b, c: b < 8)
    theirs = FakeSide(world, lambda b, c: 0.03)
    (row,) = named(run(ours, theirs, world=world), "latency.decode_step", batch=8)
    assert (row.value, row.flags, row.baseline) == (None, ["out-of-memory"], None)
    (row,) = named(run(theirs, ours, world=world), "latency.decode_step", batch=8)
    assert row.flags == ["out-of-memory-baseline"]
    rows = run(ours, theirs, world=world)
    (other,) = named(rows, "latency.decode_step", batch=1)
    assert other.value is not None
    assert not named(rows, "tax.total", batch=8)


def test_a_context_beyond_the_model_is_skipped():
    class Short(FakeSide):
        def decode(self, batch, context):
            if context > 512:
                raise InputError("prompt-too-long", value=f"{context} tokens")
            return super().decode(batch, context)

    world = World()
    plan = TimingPlan(batches=(1,), contexts=(128, 1024), prefills=(), seconds=5)
    rows = run(Short(world, falling), FakeSide(world, falling), world=world, plan=plan)
    short, long = named(rows, "latency.decode_step")
    assert short.value is not None
    assert (long.value, long.flags) == (None, ["prompt-too-long"])
    assert [row.flags[0] for row in named(rows, "tax.break_even")][1] == "not-measured"


def test_another_error_is_not_swallowed():
    class Broken(FakeSide):
        def decode(self, batch, context):
            raise InputError("no-such-input", value="past_key_values")

    world = World()
    with pytest.raises(InputError, match="no-such-input"):
        run(Broken(world, falling), FakeSide(world, falling), world=world)


def test_slow_steps_keep_within_their_time():
    world = World()
    plan = TimingPlan(batches=(1,), contexts=(128,), prefills=(), seconds=10, cell_seconds=60)
    rows = run(FakeSide(world, lambda b, c: 3.0), FakeSide(world, lambda b, c: 3.0), world=world, plan=plan)
    (row,) = named(rows, "latency.decode_step")
    assert 10 <= row.n < 30
    assert "few-steps" in row.flags
    assert world.now < 120


def test_quick_cells_use_the_time_and_steps_are_bounded():
    world = World()
    rows = run(FakeSide(world, lambda b, c: 0.01), FakeSide(world, lambda b, c: 0.02), world=world)
    assert all("few-steps" not in row.flags for row in rows)
    assert world.now < 30
    plan = TimingPlan(batches=(1,), contexts=(128,), prefills=(), seconds=1e6)
    before = world.steps
    rows = run(FakeSide(world, lambda b, c: 0.01), FakeSide(world, lambda b, c: 0.02), world=world, plan=plan)
    assert named(rows, "latency.decode_step")[0].n == 960
    assert world.steps - before < 4000


def test_costly_preparation_is_not_repeated():
    world = World()
    plan = TimingPlan(batches=(1,), contexts=(128,), prefills=(), seconds=9)
    rows = run(FakeSide(world, falling, cost=5.0), FakeSide(world, falling), world=world, plan=plan)
    assert world.prepared == 2
    assert named(rows, "latency.decode_step")[0].n >= 30
    world = World()
    run(FakeSide(world, falling, cost=0.1), FakeSide(world, falling), world=world, plan=plan)
    assert world.prepared == 2 * TimingPlan().rounds


def test_cells_share_the_drift_of_the_machine():
    class Slowing(World):
        def step(self, seconds):
            def run():
                self.now += seconds * (1 + self.now / 60)

            return run

    world = Slowing()
    plan = TimingPlan(batches=(1, 2, 4, 8), contexts=(128,), prefills=(), seconds=60)
    rows = run(FakeSide(world, lambda b, c: 0.01), FakeSide(world, lambda b, c: 0.02), world=world, plan=plan)
    steps = named(rows, "latency.decode_step")
    values = [row.value for row in steps]
    assert max(values) / min(values) < 1.25
    # each cell saw the machine at its start and at its end, and says so
    assert all(row.ci95[1] / row.ci95[0] > 1.2 for row in steps)
    assert all(row.baseline.ratio == pytest.approx(2.0, rel=0.03) for row in steps)


class Moody(World):
    """A machine whose speed wanders: 8 % up and down, forgotten after 20 seconds."""

    def __init__(self, seed):
        super().__init__(noise=0.02, seed=seed)
        self.mood, self.last = self.rng.normal(), 0.0

    def step(self, seconds):
        def run():
            kept = np.exp((self.last - self.now) / 20)
            self.last = self.now
            self.mood = kept * self.mood + np.sqrt(max(1 - kept**2, 0)) * self.rng.normal()
            self.now += seconds * float(np.exp(0.08 * self.mood + self.noise * abs(self.rng.normal())))

        return run


def test_runs_agree_within_their_printed_intervals():
    plan = TimingPlan(batches=(1, 8), contexts=(128,), prefills=(64,), seconds=120)
    runs = []
    for seed in range(8):
        world = Moody(seed)
        ours, theirs = (
            FakeSide(world, lambda b, c, k=k: k * b**0.5, lambda b, t, k=k: k * t / 10) for k in (0.02, 0.04)
        )
        runs.append([row for row in run(ours, theirs, world=world, plan=plan) if row.ci95 and row.n and row.batch])
    met = [
        a.ci95[0] <= b.ci95[1] and b.ci95[0] <= a.ci95[1]
        for one, other in combinations(runs, 2)
        for a, b in zip(one, other, strict=True)
    ]
    assert len(met) >= 200
    assert sum(met) >= 0.9 * len(met)


def test_a_model_that_does_not_decode():
    world = World()
    plan = TimingPlan(batches=(), contexts=(), prefills=(128,), prefill_batches=(1, 8), seconds=5)
    side = FakeSide(world, falling, lambda b, t: 0.01 * b)
    rows = run(side, FakeSide(world, falling, lambda b, t: 0.02 * b), world=world, plan=plan)
    assert [row.batch for row in named(rows, "latency.prefill")] == [1, 8]
    (row,) = named(rows, "tax.break_even")
    assert (row.settings["over"], row.settings["measured_to"]) == ("batch", 8)


def test_progress_rises():
    world, told = World(), []
    side = FakeSide(world, falling)
    run(side, side, world=world, progress=lambda share, words: told.append((share, words)))
    shares = [share for share, _ in told]
    assert (shares, shares[0], shares[-1]) == (sorted(shares), 0.0, 1.0)
    assert any("batch 8, context 128" in words for _, words in told)


def test_a_third_takes_its_turns_in_another_runtime():
    """Its rows are names of their own: no curve and no verdict takes them for times against the float model."""
    world = World()
    ours, theirs = FakeSide(world, lambda b, c: 0.01), FakeSide(world, lambda b, c: 0.03)
    third = FakeSide(world, lambda b, c: 0.005)
    rows = measure(
        TimedSide(INT4, "ours", model=ours),
        TimedSide(FLOAT, "theirs", model=theirs),
        across=TimedSide(FLOAT, "third", runtime="onnxruntime", model=third),
        runtime="llama_cpp",
        settings={"threads": 2},
        device=DEVICE,
        versions={},
        plan=TimingPlan(batches=(1,), contexts=(128,), prefills=(64,), seconds=10),
        ceilings=ceilings,
        clock=world,
    )
    (step,) = named(rows, "across.decode_step")
    assert (step.runtime, step.settings["baseline_runtime"], step.baseline.subject) == (
        "llama_cpp",
        "onnxruntime",
        "third",
    )
    assert step.baseline.ratio == pytest.approx(0.5, rel=0.02)
    assert named(rows, "across.prefill")
    (own,) = named(rows, "latency.decode_step")
    assert own.baseline.subject == "theirs" and own.baseline.ratio == pytest.approx(3, rel=0.02)
    assert own.value == step.value
