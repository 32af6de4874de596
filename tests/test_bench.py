"""The benchmark's own arithmetic: plans tried, events to calls, means, ceilings, peers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import jaxsoftmax
from bench import (
    candidates,
    cases,
    ops,
    peers,
    plans,
    runs,
    scores,
    shapes,
    timing,
    trace,
)
from jaxsoftmax import Plan, _legal, _plan, _plan_spec

H200, A100 = _plan.LIMITS["h200"], _plan.LIMITS["a100"]


# --- the plans tried ---


@pytest.mark.parametrize("limits", ["h200", "a100", "rtx4090", "cpu"])
@pytest.mark.parametrize("dtype", _plan.DTYPES)
@pytest.mark.parametrize("op", ops.OPS)
def test_candidates_are_legal_and_few(op, dtype, limits):
    device = _plan.LIMITS[limits]
    for rows, n in (*shapes.GPU, (1, 1), (3, 7), (2**28, 9), (5, 2**31)):
        found = candidates.candidates(op, dtype, rows, n, device)
        assert found[0] == jaxsoftmax.plan(op, dtype, rows, n, limits=device)
        assert len(found) == len(set(found)) <= candidates.MOST
        for plan in found:
            _legal.check(plan, op, dtype, n, device)


def test_candidates_name_every_kind_that_the_device_has():
    def kinds(limits):
        every = (candidates.by_kind("softmax", "float16", *s, limits) for s in shapes.GPU)
        return {kind for found in every for kind in found}

    assert kinds(H200) == set(plans.KINDS)
    assert kinds(A100) == {"one_pass", "two_pass", "split_k"}


def test_candidates_leave_few_lanes_idle():
    for rows, n in shapes.GPU:
        size = _plan_spec.packs(n, "float16")
        for plan in candidates.candidates("softmax", "float16", rows, n, H200):
            if plan.reg_packs and not plan.smem_packs:
                held = plan.splits * plan.width * plan.reg_packs
                assert held <= max(4 * size, 32 * plan.splits * plan.reg_packs, 32), plan


def test_grid_is_the_peers_table():
    assert len(shapes.GPU) == len(set(shapes.GPU)) == 36
    assert shapes.GPU[: len(shapes.SEED)] == shapes.SEED


def test_names_of_plans():
    assert plans.describe(Plan("one_pass", 128, 4, 2)) == "one_pass 128/4 r2"
    assert plans.describe(Plan("one_pass", 256, 1, 0, 8, 4)) == "ring_cluster 256 m8 s4"
    assert plans.describe(Plan("one_pass", 256, 1, 4, 8)) == "one_pass 256 r4 m8"
    assert plans.describe(Plan("split_k", 256, splits=9)) == "split_k 256 s9"
    assert plans.describe(Plan("split_k", 256, 1, 0, 8, 9)) == "cooperative 256 m8 s9"


# --- the trace ---

PLUG = frozenset({"plug", "plug_1"})


def test_events_behind_each_plug():
    names = ["stray", "plug", "plug_1", "a", "a", "plug", "plug_1", "plug", "plug_1", "b"]
    groups = trace.split([(float(i), 1.0, name) for i, name in enumerate(names)], PLUG)
    assert [[e[2] for e in g] for g in groups] == [["a", "a"], ["b"]]  # the lost group is no group


def test_times_of_calls():
    events = [
        *((0.0, 1000.0, "fold"), (800.0, 1200.0, "map")),  # they overlap
        *((4000.0, 1000.0, "fold"), (6000.0, 1000.0, "map")),  # a gap between them
        *((20000.0, 1000.0, "fold"), (20100.0, 500.0, "map")),  # one within the other, late
    ]
    timed = trace.per_call(events, 3)
    assert timed.busy == [2.0, 2.0, 1.0]
    assert timed.span == [2.0, 3.0, 1.0]
    assert timed.kernels == ["fold", "map"]
    assert timed.queued == pytest.approx(2 / 3)


@pytest.mark.parametrize("lost", range(4))
def test_lost_events_are_noticed(lost):
    events = [(float(i), 1.0, name) for i, name in enumerate(["fold", "map"] * 2)]
    with pytest.raises(trace.TimingError):
        trace.per_call(events[:lost] + events[lost + 1 :], 2)
    with pytest.raises(trace.TimingError, match="1 groups of GPU events for 2"):
        trace.assign([(0.0, 1.0, "plug"), *events], PLUG, [2, 2])
    with pytest.raises(trace.TimingError, match="0 GPU events"):
        trace.per_call([], 2)


class FakeGpu:
    """Records what calls launch, as a profiler would; loses one event of each first session."""

    def __init__(self, losing: str = "") -> None:
        self.events: list[trace.Event] = []
        self.now, self.sessions, self.losing = 0.0, 0, losing

    def launch(self, name: str, duration: float) -> jax.Array:
        self.events.append((self.now, duration, name))
        self.now += duration + 100
        return jnp.zeros(())

    def case(self, label: str, *kernels: tuple[str, float]) -> trace.Case:
        return trace.Case(label, lambda: [self.launch(*k) for k in kernels], [(), ()])

    def record(self, work):
        self.events, self.sessions = [], self.sessions + 1
        work()
        found = list(self.events)
        if self.sessions == 1 and self.losing:
            found.remove(next(e for e in found if e[2] == self.losing))
        return found


@pytest.mark.parametrize("losing", ["", "one", "map", "plug"])
def test_rounds_on_a_fake_gpu(monkeypatch, losing):
    gpu = FakeGpu(losing)
    monkeypatch.setattr(trace, "_record", gpu.record)
    monkeypatch.setattr(trace, "_plug", lambda: (lambda: gpu.launch("plug", 1e6), PLUG))
    monkeypatch.setattr(timing, "on_gpu", lambda: True)
    made = [gpu.case("a", ("one", 3000.0)), gpu.case("b", ("fold", 2000.0), ("map", 1000.0))]
    samples = timing.in_rounds(made, [trace.GROUP + 3, 2], 3)
    assert gpu.sessions == 1 + bool(losing)
    a, b = samples["a"], samples["b"]
    assert (len(a.times), a.kernels, a.rounds) == (3 * (trace.GROUP + 3), ["one"], [3.0] * 3)
    assert (len(b.times), b.kernels, b.rounds) == (6, ["fold", "map"], [3.0] * 3)
    assert b.spans == pytest.approx([3.1] * 3)  # the gap between its launches counts
    assert b.span == pytest.approx(3.1) and b.median == 3.0 and b.spread == 0
    assert a.summary()["queued"] == 1.0


def test_a_case_without_times_says_why(monkeypatch):
    gpu = FakeGpu()
    flaky = iter(range(100))
    odd = trace.Case("odd", lambda: gpu.launch(f"kernel{next(flaky)}", 1.0), [()])
    monkeypatch.setattr(trace, "_record", gpu.record)
    monkeypatch.setattr(trace, "_plug", lambda: (lambda: gpu.launch("plug", 1e6), PLUG))
    monkeypatch.setattr(timing, "on_gpu", lambda: True)
    samples = timing.in_rounds([gpu.case("a", ("one", 1.0)), odd], [2, 2], 2)
    assert isinstance(samples["a"], timing.Sample)
    assert isinstance(samples["odd"], trace.TimingError) and "differ" in str(samples["odd"])


@pytest.mark.skipif(
    not hasattr(jax.profiler.ProfileData, "text_proto_to_serialized_xspace"), reason="an older jax"
)
def test_events_of_a_profile(tmp_path):
    text = """
    planes { name: "/host:CPU" }
    planes {
      name: "/device:GPU:0"
      event_metadata { key: 1 value { id: 1 name: "kernel" } }
      event_metadata { key: 2 value { id: 2 name: "Memset" } }
      lines { id: 1 name: "XLA Ops" events { metadata_id: 1 offset_ps: 0 duration_ps: 9000 } }
      lines {
        id: 2 name: "Stream #13(Memset,Compute)" timestamp_ns: 100
        events { metadata_id: 1 offset_ps: 5000 duration_ps: 3000 }
        events { metadata_id: 2 offset_ps: 1000 duration_ps: 2000 }
      }
    }
    """
    profile = jax.profiler.ProfileData.text_proto_to_serialized_xspace(text)
    (tmp_path / "vm.xplane.pb").write_bytes(profile)
    assert trace.device_events(str(tmp_path)) == [(101.0, 2.0, "Memset"), (105.0, 3.0, "kernel")]
    with pytest.raises(trace.TimingError, match="no trace"):
        trace.device_events(str(tmp_path / "nowhere"))


# --- figures ---


def test_geometric_means():
    rows = [
        {"shape": [128, 1024], "bytes": 1, "score": 0.5},  # the seed's
        {"shape": [1048576, 64], "bytes": 268e6, "score": 2.0},  # big, not the seed's
        {"shape": [7, 7], "bytes": 1e9, "score": 8.0},  # big, of no grid
        {"shape": [2048, 1024], "bytes": 8e6, "score": None},  # has no figure
    ]
    found = {name: (g["mean"], g["shapes"]) for name, g in scores.groups(rows, "score").items()}
    assert found == {
        "moving 64 MB or more": (pytest.approx(4.0), 2),
        "the seed's 13": (pytest.approx(0.5), 1),
        "all 36": (pytest.approx(1.0), 2),
    }
    assert "worst 0.50 128x1024" in scores.line(rows, "score", "x")
    assert scores.groups([], "score") == {}


CSV = """rows,cols,copy_us,triad_us,xla_fwd_us,torch_fwd_us,quack_fwd_us,xla_bwd_us,xla_fwd_f32_us
128,1024,1.0,1.2,2.0,4.0,,3.0,5.0
4,16384,1.0,1.1,3.0,5.0,2.5,,
"""


def test_peers(tmp_path):
    file = tmp_path / "peers.csv"
    file.write_text(CSV)
    table = peers.read(file)
    common = {"bytes": 1, "jax_us": 3.0, "copy_us": 1.5}
    rows = [
        common | {"shape": [128, 1024], "what": "fwd", "ours_us": 2.5},
        common | {"shape": [128, 1024], "what": "bwd", "ours_us": 2.0},
        common | {"shape": [128, 1024], "what": "fwd+bwd", "ours_us": 2.0},
        common | {"shape": [5, 5], "what": "fwd", "ours_us": 2.0},
    ]
    forward, backward = peers.compare(rows, table, "float16")
    assert (forward["xla"], forward["torch"], forward["quack"]) == (0.8, 1.6, None)
    assert (forward["xla_score"], forward["file_copy_us"], forward["score"]) == (0.5, 1.0, 0.6)
    assert (backward["xla"], backward["xla_score"]) == (1.5, pytest.approx(0.4))
    assert backward["torch"] is None
    now = {"what": "softmax", "ours_us": 2.5, "ceiling_us": 1.5, "ceiling": "copy"}
    rows[0] = {"bytes": 1, "jax_us": 3.0, "shape": [128, 1024]} | now
    rows.append(rows[0] | {"what": "logsumexp"})  # of which the file has nothing
    assert peers.compare(rows, table, "float16") == [forward, backward]
    (other, _) = peers.compare(rows, table, "float32")
    assert (other["xla"], other["xla_score"], other["torch"]) == (2.0, None, None)
    assert any("128x1024" in line for line in peers.lines([forward, backward, other]))
    file.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="no column cols, copy_us, rows"):
        peers.read(file)


def test_ceilings_take_the_fastest(cpu_backend):
    buffers = runs.make_buffers((64, 257), "float16", gradient=False)
    assert buffers.dy == [] and len(buffers.x) > 1
    timed = cases.ceilings(buffers)
    cases.compile_all(timed)
    for case in timed:
        jax.block_until_ready(case.fn(*case.next()))
    samples = {c.label: timing.Sample([float(i)], [float(i)]) for i, c in enumerate(timed, 1)}
    assert cases.fastest(samples)["copy"] == {"us": 1.0, "by": "copy_kernel"}
    assert set(cases.fastest(samples)) == {"copy", "triad", "read"}
