"""The benchmark over several devices: rates from traces, collectives from HLO, ulps apart."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from bench import scaling_cases, scaling_hlo, scaling_trace, trace
from bench.trace import TimingError

pytestmark = pytest.mark.multidevice
GPUS = ("/device:GPU:0", "/device:GPU:1")
PLUG = frozenset({"plug"})


# --- rates from traces ---


def group(start, period, calls=3, kernels=("fold", "nccl", "map")):
    """A plug, then calls of three kernels; a call's first is late, as if it waited for others."""
    events = [(start - 1e6, 1e6, "plug")]
    for i in range(calls):
        at = start + i * period + (5e5 if i == 0 else 0)
        events += [(at + 10.0 * k, 10.0, name) for k, name in enumerate(kernels)]
    return events


def test_the_slowest_device_counts_and_clocks_are_not_compared():
    traces = {GPUS[0]: group(2e6, 1e6), GPUS[1]: group(7e9, 2e6)}
    (rate,) = scaling_trace.rates(traces, PLUG, [3])
    assert rate.us == [pytest.approx((2e6 - 5e5) / 2e3), pytest.approx((4e6 - 5e5) / 2e3)]
    assert rate.kernels == ["fold", "map", "nccl"]
    assert rate.queued < 1  # gaps between these calls
    other = scaling_trace.Rate([9000.0, 1000.0], rate.kernels, 1.0)
    sample, by_device = scaling_trace.summary([rate, TimingError("lost"), other])
    assert sample.rounds == [pytest.approx(1750.0), 9000.0] and sample.queued == rate.queued
    assert by_device == [pytest.approx((750 + 9000) / 2), pytest.approx((1750 + 1000) / 2)]


def test_calls_back_to_back():
    traces = {GPUS[0]: [(0.0, 5.0, "plug"), *((5.0 + 100 * i, 100.0, "a") for i in range(4))]}
    (rate,) = scaling_trace.rates(traces, PLUG, [4])
    assert rate.us == [pytest.approx(0.1)] and rate.queued == 1


@pytest.mark.parametrize(
    "lost, says",
    [
        (0, "GPU:1: 0 groups of GPU events for 1"),  # the plug
        (3, "GPU:1: 8 GPU events for 3 calls"),
        (None, "GPU:1: calls differ in their GPU events"),
    ],
)
def test_what_is_wrong_with_a_device_is_named(lost, says):
    second = group(9e9, 1e6)
    if lost is None:
        second[-1] = (*second[-1][:2], "other")
    else:
        del second[lost]
    with pytest.raises(TimingError, match=says):
        for found in scaling_trace.rates({GPUS[0]: group(2e6, 1e6), GPUS[1]: second}, PLUG, [3]):
            raise found
    with pytest.raises(TimingError, match="a rate takes two"):
        scaling_trace.rates({GPUS[0]: group(2e6, 1e6, calls=1)}, PLUG, [1])


@pytest.mark.skipif(
    not hasattr(jax.profiler.ProfileData, "text_proto_to_serialized_xspace"), reason="an older jax"
)
def test_a_device_missing_in_the_profile(tmp_path):
    planes = "".join(
        f"""planes {{
          name: "/device:GPU:{i}"
          event_metadata {{ key: 1 value {{ id: 1 name: "kernel{i}" }} }}
          lines {{
            id: 2 name: "Stream #13" timestamp_ns: 100
            events {{ metadata_id: 1 offset_ps: 5000 duration_ps: 3000 }}
          }}
        }}"""
        for i in range(2)
    )
    profile = jax.profiler.ProfileData.text_proto_to_serialized_xspace(planes)
    (tmp_path / "vm.xplane.pb").write_bytes(profile)
    assert trace.device_events(str(tmp_path), GPUS[1]) == [(105.0, 3.0, "kernel1")]
    assert trace.device_events(str(tmp_path)) == [(105.0, 3.0, "kernel0")]
    with pytest.raises(TimingError, match="no events on /device:GPU:2"):
        trace.device_events(str(tmp_path), "/device:GPU:2")


class FakeGpus:
    """Two GPUs that record what calls launch; the second, slower, loses an event at first."""

    def __init__(self, losing):
        self.losing, self.sessions = losing, 0
        self.now, self.events = [0.0, 1e12], [[], []]

    def launch(self, name, duration):
        for i in range(2):
            self.events[i].append((self.now[i], duration * (1 + i), name))
            self.now[i] += duration * (1 + i)

    def record(self, work, planes):
        assert tuple(planes) == GPUS
        self.events, self.sessions = [[], []], self.sessions + 1
        work()
        if self.sessions == 1 and self.losing:
            self.events[1].remove(next(e for e in self.events[1] if e[2] == self.losing))
        return self.events


@pytest.mark.parametrize("losing", ["", "a", "nccl", "plug"])
def test_rounds_on_fake_gpus(monkeypatch, losing):
    gpus = FakeGpus(losing)
    monkeypatch.setattr(trace, "record", gpus.record)
    monkeypatch.setattr(trace, "_plug", lambda _: (lambda: gpus.launch("plug", 1e6), PLUG))
    devices = tuple(SimpleNamespace(local_hardware_id=i) for i in range(2))

    def case(label, *kernels):
        return trace.Case(label, lambda: [gpus.launch(*k) for k in kernels] and None, [()])

    made = [case("a", ("a", 3000.0)), case("b", ("nccl", 2000.0), ("map", 500.0))]
    found = scaling_trace.in_rounds(made, [3, 5], 2, devices)
    assert gpus.sessions == 1 + (losing in ("a", "nccl"))  # a plug is launched once a device
    for label, us in (("a", 3.0), ("b", 2.5)):
        sample, by_device = found[label]
        assert sample.rounds == [pytest.approx(2 * us)] * 2
        assert by_device == [pytest.approx(us), pytest.approx(2 * us)]


# --- collectives ---

HLO = """
ENTRY %main (p: f32[4096,8]) -> f32[4096,8] {
  %p = bf16[4096,8]{1,0} parameter(0)
  %max = f32[4096]{0} all-reduce(%r), channel_id=1, to_apply=%region_0.3
  %start = f32[4096]{0} all-reduce-start(%r), to_apply=%region_0.3
  %done = f32[4096]{0} all-reduce-done(%start)
  %two = (f32[16]{0:T(8)}, /*index=1*/bf16[2,3]{1,0}) all-reduce(%a, %b), to_apply=%region_0.3
  %gathering = (bf16[4096,8]{1,0}, bf16[4096,16]{1,0}) all-gather-start(%p), dimensions={1}
  %gathered = bf16[4096,16]{1,0} all-gather-done(%gathering)
  %fused = f32[] fusion(%gathered), kind=kLoop, calls=%all-gather_fusion
  ROOT %out = pred[7]{0} collective-permute(pred[7]{0} %x), source_target_pairs={{0,1}}
}
"""


def test_collectives_and_their_bytes():
    found = scaling_hlo.collectives(HLO)
    assert found == {
        "all_reduce": {
            "count": 3,
            "bytes": 2 * 4 * 4096 + 4 * 16 + 2 * 6,
            "shapes": ["f32[4096]", "f32[4096]", "f32[16]", "bf16[2,3]"],
        },
        "all_gather": {"count": 1, "bytes": 2 * 4096 * 16, "shapes": ["bf16[4096,16]"]},
        "collective_permute": {"count": 1, "bytes": 7, "shapes": ["pred[7]"]},
    }
    assert scaling_hlo.collectives("")["all_gather"]["count"] == 0


def test_a_gathered_array_is_found(cpus):
    """The parser on what XLA prints."""
    mesh = Mesh(np.array(cpus), ("d",))
    x = jax.device_put(np.zeros((4, 64), np.float32), NamedSharding(mesh, P(None, "d")))
    gather = jax.jit(lambda x: x + 1, out_shardings=NamedSharding(mesh, P()))
    found = scaling_hlo.collectives(gather.lower(x).compile().as_text())
    assert found["all_gather"] == {"count": 1, "bytes": 1024, "shapes": ["f32[4,64]"]}


# --- ulps ---


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_steps_between_numbers(dtype):
    x = np.array([1.0, -3.0, 0.0, 1e-3], ml_dtypes.bfloat16).astype(dtype)
    up = np.nextafter(x, np.asarray(8, dtype))
    assert scaling_cases.steps(jnp.asarray(x), jnp.asarray(x)) == 0
    assert scaling_cases.steps(jnp.asarray(x), jnp.asarray(up)) == 1
    assert scaling_cases.steps(jnp.asarray(up), jnp.asarray(x)) == 1
    zeros = (jnp.asarray(np.array([z], dtype)) for z in (0.0, -0.0))
    assert scaling_cases.steps(*zeros) == 0
    far = scaling_cases.steps(jnp.asarray(x), jnp.asarray(-x))
    assert int(far) == 2 * int(np.array(3, dtype).view(f"uint{8 * x.itemsize}"))


def test_ulps_of_the_largest_term():
    y, dy = jnp.array([[0.5, 0.5], [1.0, 0.0]]), jnp.array([[1.0, 1.0], [3.0, 0.0]])
    unit = scaling_cases.largest_terms(y.astype(jnp.bfloat16), dy.astype(jnp.bfloat16))
    np.testing.assert_array_equal(unit, [[2.0**-7], [2.0**-5]])  # of 1 and of 6
    a, b = jnp.zeros((2, 2), jnp.bfloat16), jnp.array([[0, 2.0**-7], [2.0**-5, 0]], jnp.bfloat16)
    assert scaling_cases.in_units(a, b, unit) == 1
    assert scaling_cases.in_units(a, b.at[0, 0].set(jnp.nan), unit) == jnp.inf
