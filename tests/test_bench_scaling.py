"""The benchmark over several devices: results compared, figures, the mode."""

from __future__ import annotations

import argparse
import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from test_bench_tables import bench

from bench import report, scaling, scaling_cases, scaling_hlo, scaling_report, timing, trace
from bench.scaling_cases import AUTOMATIC, AXIS_NAME, PLAIN, STRONG, WEAK, Family
from bench.trace import TimingError

pytestmark = pytest.mark.multidevice
QUICK = timing.Effort(1, 0.002)


# --- right or wrong ---


@pytest.fixture(params=["rows", "columns"])
def cut(request, cpus):
    """One device's results, and the automatic program of 8 devices with its inputs."""
    kind, shape = request.param, (16, 256)
    given = (scaling_cases.sharding(kind, d) for d in (cpus[:1], cpus))
    one, several = (scaling_cases.inputs(shape, "bfloat16", s) for s in given)
    for a, b in zip(one, several, strict=True):
        assert len(b.addressable_shards) == 8 and b.addressable_shards[0].data.size == a.size // 8
        np.testing.assert_array_equal(a, b)  # the same numbers, wherever they are made
        np.testing.assert_array_equal(scaling_cases.whole(b, cpus[0]), a)
    return scaling_cases.OneDevice(*one, cpus[0]), kind, several


def test_a_wrong_element_is_seen(cpu_backend, cpus, cut):
    one, kind, (x, dy) = cut
    case = scaling_cases.programs(kind, x, dy, cpus)[AUTOMATIC, "fwd+bwd"]
    y, dx = case.fn(x, dy)
    limits = scaling_cases.bounds("bfloat16")
    found = one.errors((y, dx))
    assert set(found) == set(limits) and all(found[k] <= limits[k] for k in limits), found
    assert set(one.errors((y,))) == {"y"}

    def planted(array, place, change):
        host = np.array(array)
        host[place] = change(host[place])
        return jax.device_put(host, array.sharding)

    ulp = float(one.unit[13, 0])
    for name, results in {
        "y": (planted(y, (13, 250), lambda v: v * (1 + 2.0**-6)), dx),
        "dx": (y, planted(dx, (13, 250), lambda v: v + 4 * ulp)),
        "dx end to end": (y, planted(dx, (0, 0), lambda v: v + 4 * ulp)),
    }.items():
        assert one.errors(results)[name] > limits[name]
    assert one.errors((planted(y, (0, 0), lambda v: np.nan), dx))["y"] > limits["y"]
    assert max(one.against_oracle().values()) <= 1


# --- one shape ---


def point(**given):
    collectives = scaling_hlo.collectives("") | given.pop("collectives", {})
    errors = {"y": 0.0, "dx": 0.0, "dx end to end": 0.0} | given.pop("errors", {})
    base = {"devices": 2, "shape": (8, 8), "form": AUTOMATIC, "what": "fwd+bwd", "stays": True}
    return base | {"errors": errors, "collectives": collectives, "wrong": []} | given


MOVED = {"count": 1, "bytes": 8, "shapes": ["f32[2]"]}


@pytest.mark.parametrize(
    "kind, given, says",
    [
        ("columns", {}, []),
        ("columns", {"collectives": {"all_reduce": MOVED}}, []),
        ("columns", {"collectives": {"all_gather": MOVED}}, ["1 x all_gather: f32[2]"]),
        ("rows", {"collectives": {"all_reduce": MOVED}}, ["1 x all_reduce: f32[2]"]),
        ("rows", {"stays": False}, ["a result is not laid out as x is"]),
        ("rows", {"errors": {"y": 2.0}}, ["y is 2 ulp from one device's, at most 1 are right"]),
        ("rows", {"errors": {"dx": float("nan")}}, ["dx is nan ulp"]),
        ("rows", {"oracle": {"softmax": 1.5}}, ["softmax of one device is off by 1.5 ulp"]),
    ],
)
def test_what_is_wrong_is_named(kind, given, says):
    found = scaling.wrong(kind, point(**given), "bfloat16")
    assert len(found) == len(says) and all(
        f.startswith(s) for f, s in zip(found, says, strict=True)
    )


@pytest.mark.parametrize("n", [1, 8])
@pytest.mark.parametrize("kind", ["rows", "columns"])
def test_one_count(cpu_backend, cpus, kind, n):
    shape = (16, 512)
    points = scaling.one_count(kind, shape, cpus[:n], "bfloat16", QUICK)
    first = PLAIN if n == 1 else AUTOMATIC
    forms = (first,) if kind == "rows" else (first, AXIS_NAME)
    assert [(p["form"], p["what"]) for p in points] == [
        (form, what) for form in forms for what in scaling_cases.WHATS
    ]
    for p in json.loads(json.dumps(points)):
        assert p["wrong"] == [] and p["us"] > 0 and p["copy_us"] > 0 and p["of_copy"] > 0
        assert p["collectives"]["all_gather"]["count"] == 0
        moved = p["collectives"]["all_reduce"]
        assert (moved["count"] > 0) == (kind == "columns" and p["form"] != PLAIN)
        # a few numbers a row, of 4 bytes
        assert moved["bytes"] <= 4 * 4 * shape[0]
        assert ("dx" in p["errors"]) == (p["what"] == "fwd+bwd")


def test_calls_of_gpus(cpu_backend, cpus, monkeypatch):
    """A lost measurement keeps what was checked; the calls of a group are few and in memory."""
    asked = []

    def lost(cases, calls, *_):
        asked.extend(calls)
        raise TimingError("no events on /device:GPU:1")

    monkeypatch.setattr(timing, "on_gpu", lambda: True)
    monkeypatch.setattr(scaling.scaling_trace, "in_rounds", lost)
    points = scaling.one_count("rows", (16, 512), cpus[:2], "bfloat16", QUICK)
    assert {p["error"] for p in points} == {"no events on /device:GPU:1"}
    assert all(p["errors"]["y"] == 0 and "us" not in p for p in points)
    assert len(asked) == 3 and all(3 <= n <= trace.GROUP for n in asked)
    huge = trace.Case("huge", lambda x: x, [(SimpleNamespace(nbytes=5 << 30),)])
    assert scaling.most(huge, cpus[:1]) == 1 and scaling.most(huge, cpus[:2]) == 3


# --- figures ---


def times(**us):
    """Points of (devices, form) of one program."""
    return [point(devices=int(k[-1]), form=k[:-1], us=v) for k, v in us.items()]


@pytest.mark.parametrize(
    "scaling_, speed_up, same_code",
    [(STRONG, 100 / 80, 160 / 80), (WEAK, 2 * 100 / 80, 2 * 160 / 80)],
)
def test_figures_of_columns(scaling_, speed_up, same_code):
    points = times(plain1=100.0, axis_name1=160.0, automatic2=80.0)
    scaling_report.add_figures(points, Family(scaling_, "columns", (8, 8)))
    plain, first, several = points
    assert (plain["speed_up"], plain["same_code"], plain["efficiency"]) == (1, 1.6, None)
    assert (first["speed_up"], first["same_code"], first["efficiency"]) == (0.625, 1, 1)
    assert several["speed_up"] == speed_up and several["same_code"] == same_code
    assert several["efficiency"] == same_code / 2


def test_figures_of_rows_and_of_what_is_missing():
    points = [*times(plain1=100.0, automatic2=50.0), point(devices=4, error="lost")]
    scaling_report.add_figures(points, Family(STRONG, "rows", (8, 8)))
    assert [p["efficiency"] for p in points] == [1, 1, None]
    alone = times(automatic2=50.0)
    scaling_report.add_figures(alone, Family(STRONG, "rows", (8, 8)))
    assert alone[0]["speed_up"] is None
    text = scaling_report.line(points[2], Family(STRONG, "rows", (8, 8)))
    assert text.endswith("none  lost") and not scaling_report.good(points)
    assert scaling_report.good(points[:2]) and not scaling_report.good([point(wrong=["x"])])


def test_targets():
    families = []
    for shape, us in (((4096, 262144), (100.0, 160.0, 80.0)), ((8, 8), (100.0, 160.0, 100.0))):
        points = times(**dict(zip(("plain1", "axis_name1", "automatic2"), us, strict=True)))
        family = Family(STRONG, "columns", shape)
        scaling_report.add_figures(points, family)
        families.append({"name": str(family), "scaling": STRONG, "kind": "columns"})
        families[-1] |= {"shape": list(shape), "points": points}
    least, same, best = scaling_report.targets(families)
    assert (least["value"], least["met"], least["worst"]) == (
        0.8,
        False,
        "8x8 columns strong fwd+bwd",
    )
    assert (same["value"], same["met"], best["value"], best["met"]) == (2.0, True, 1.25, True)
    assert "MISSED" in scaling_report.target_line(least) and "met" in scaling_report.target_line(
        same
    )
    assert scaling_report.targets([families[0] | {"points": []}]) == []


# --- the mode ---


def test_weak_shapes_grow_to_the_strong_ones():
    for gpu, quick in ((True, False), (False, False), (False, True)):
        found = scaling_cases.grid(gpu, quick)
        whole = {s: {(f.kind, f.whole(8)) for f in found if f.scaling == s} for s in (STRONG, WEAK)}
        assert whole[STRONG] == whole[WEAK] and {kind for kind, _ in whole[WEAK]} == {
            *("rows", "columns")
        }
    assert {f.kind for f in scaling_cases.grid(True, True)} == {"rows", "columns"}


def test_what_was_measured_is_kept(cpu_backend, cpus, tmp_path, monkeypatch):
    console = pytest.importorskip("rich.console")
    real = scaling.one_count

    def failing(kind, shape, devices, *rest):
        if len(devices) == 2:
            raise RuntimeError("no memory")
        return real(kind, shape, devices, *rest)

    monkeypatch.setattr(scaling, "one_count", failing)
    out = report.Report(tmp_path, "scaling", {}, console.Console())
    progress = SimpleNamespace(add_task=lambda *a, **k: 0, update=lambda *a, **k: 0)
    progress.advance = progress.update
    args = argparse.Namespace(grid=[Family(STRONG, "rows", (8, 64))], devices=[1, 2, 4])
    args.quick, args.dtype = True, "bfloat16"
    assert not scaling.run(out, args, progress)
    (family,) = json.loads(out.path.read_text())["shapes"]
    assert family["failures"] == [{"devices": 2, "error": "RuntimeError: no memory"}]
    assert [p["devices"] for p in family["points"]] == [1, 1, 4, 4]
    assert family["points"][-1]["efficiency"] > 0


def test_command_line(tmp_path):
    args = ("--scaling", "--quick", "--devices", "2", "--dtype", "bfloat16")
    done = bench(*args, out=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (result,) = tmp_path.glob("*_bfloat16_scaling_quick.json")
    data = json.loads(result.read_text())
    assert data["complete"] and data["environment"]["devices"] and data["environment"]["commit"]
    found = {(f["scaling"], f["kind"]): f["points"] for f in data["shapes"]}
    assert len(found) == 4 and all({p["devices"] for p in ps} == {1, 2} for ps in found.values())
    assert not any(f["failures"] for f in data["shapes"])
    assert result.with_suffix(".png").exists() and "256x512 rows" in done.stdout.replace("  ", " ")


@pytest.mark.parametrize(
    "argv, says",
    [
        (("--scaling", "--devices", "1024"), "--devices 1024: only 8 found"),
        (("--scaling", "--devices", "3"), "--devices 3: not 1, 2, 4"),
        (("--scaling", "--devices", "0"), "--devices 0: not 1, 2, 4"),
        (("--devices", "2"), "--devices is for --scaling"),
        (("--scaling", "--op", "softmax"), "--scaling has ops of its own"),
        (("--scaling", "--shapes", "7x7"), "unknown shape '7x7'"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, tuple) else "",
)
def test_bad_options(cpu_backend, cpus, monkeypatch, capsys, argv, says):
    pytest.importorskip("rich")
    main = pytest.importorskip("bench.__main__")
    monkeypatch.setattr(jax, "local_devices", lambda: cpus)
    with pytest.raises(SystemExit) as left:
        main.options(argv)
    text = capsys.readouterr().err
    assert left.value.code == 2 and text.startswith(says) and text.count("\n") == 1


def test_the_dtype_on_a_cpu(cpu_backend):
    pytest.importorskip("rich")
    main = pytest.importorskip("bench.__main__")
    assert main.options(["--scaling"]).dtype == "float32"
    assert main.options(["--loss"]).dtype == "bfloat16"


def test_devices_are_counted(cpu_backend, cpus, monkeypatch):
    monkeypatch.setattr(jax, "local_devices", lambda: cpus[:6])
    assert [scaling_cases.counts(n) for n in (None, 2, 1)] == [[1, 2, 4], [1, 2], [1]]
