"""Loading: the ABI guard, a missing module, registering twice, an import that starts no backend."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import jaxsoftmax
from jaxsoftmax import _ffi, _native

# What the sub-processes share: the package as this process found it, the CPU only.
PRELUDE = """
import sys, types, warnings, importlib.util
sys.path.insert(0, {root!r})
native_file = {native!r}

def load_native():
    spec = importlib.util.spec_from_file_location("jaxsoftmax._native", native_file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

def pose(**replaced):
    '''Puts the real module in place with some of its functions replaced.'''
    real = load_native()
    posed = types.ModuleType("jaxsoftmax._native")
    posed.__dict__.update({{k: v for k, v in vars(real).items() if k[:2] != "__"}}, **replaced)
    sys.modules["jaxsoftmax._native"] = posed
    return real, posed

def import_warned():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        import jaxsoftmax
    return jaxsoftmax, [w for w in caught if "jaxsoftmax" in str(w.message)]

def check_right(kernels):
    import functools, jax, jax.numpy as jnp, numpy as np, jaxsoftmax
    x = np.linspace(-3, 3, 20, dtype=np.float32).reshape(4, 5)
    names, paths = jaxsoftmax.primitive.__all__, (None, *jaxsoftmax._plan.PATHS)
    def both(module, name, **options):
        f = functools.partial(getattr(module, name), axis=-1, **options)
        return lambda x: (f(x), jax.grad(lambda x: (f(x) ** 2).sum())(x))
    def ours(x):
        return [[both(jaxsoftmax, name, path=path)(x) for path in paths] for name in names]
    want = jax.jit(lambda x: [[both(jax.nn, name)(x)] * len(paths) for name in names])(x)
    program = jax.jit(ours).lower(x).compile()
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    jax.tree.map(close, program(x), want)
    for target in (*names, *(name + "_bwd" for name in names)):
        assert ('"jaxsoftmax.' + target + '"' in program.as_text()) == kernels, target
    np.testing.assert_allclose(jaxsoftmax.softmax(x), jax.nn.softmax(x), rtol=1e-6)
    assert float(jnp.arange(4.0).sum()) == 6
"""


def in_process(code: str, **environment: str) -> str:
    """Runs code after PRELUDE in a fresh Python; its output, or a failure with its errors."""
    root = Path(jaxsoftmax.__file__).parents[1]
    prelude = PRELUDE.format(root=str(root), native=_native.__file__)
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", **environment}
    done = subprocess.run(
        [sys.executable, "-P", "-c", prelude + code],
        env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("version", ["(0, 999)", "(1, 0)"])
def test_newer_api_is_not_registered(version):
    """Once registered it would take the backend down: one warning, formulas, right results."""
    in_process(f"""
def never():
    raise AssertionError("registered")

pose(build_info=lambda: {{"ffi_api": {version}}}, registrations=never)
package, warned = import_warned()
assert [w.category for w in warned] == [RuntimeWarning], warned
text = str(warned[0].message)
assert "%d.%d" % {version} in text, text
check_right(kernels=False)
""")


def test_missing_module():
    in_process("""
sys.modules["jaxsoftmax._native"] = None
package, warned = import_warned()
assert [w.category for w in warned] == [RuntimeWarning], warned
check_right(kernels=False)
for op in package._ops.OPS:
    print(package.plan(op, "float32", 4, 100))
""")


def test_older_api_is_registered():
    in_process("""
real, posed = pose()
posed.build_info = lambda: {**real.build_info(), "ffi_api": (0, 1)}
package, warned = import_warned()
assert not warned, warned
check_right(kernels=True)
""")


def test_import_starts_no_backend_and_warns_of_nothing():
    in_process("""
warnings.simplefilter("error")
import jaxsoftmax
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized()
jaxsoftmax.plan("softmax", "float32", 4, 100, limits="h200")
assert not xla_bridge.backends_are_initialized()
check_right(kernels=True)
""")


def test_plan_module_imports_no_jax():
    """The planner is pure Python: bench and tools read it without jax."""
    in_process("""
package = types.ModuleType("jaxsoftmax")
package.__path__ = [importlib.util.find_spec("jaxsoftmax").submodule_search_locations[0]]
sys.modules["jaxsoftmax"] = package
from jaxsoftmax import _plan
from jaxsoftmax._ops import OPS
for op in OPS:
    print(_plan.plan(op, "float32", 4, 1000, limits="h200"))
assert "jax" not in sys.modules
""")


def test_registration_is_idempotent():
    in_process("""
import jaxsoftmax, importlib
from jaxsoftmax import _ffi
_ffi._register(_ffi.NATIVE)
importlib.reload(_ffi)
check_right(kernels=True)
""")


def test_module_reports_its_build():
    info = _native.build_info()
    assert set(info) >= {"ffi_api", "cuda", "cuda_archs", "compiler"}
    assert len(info["ffi_api"]) == 2 and info["compiler"]
    registered = _native.registrations()
    assert ("CUDA" in registered) == (info["cuda"] is not None)
    for platform, targets in registered.items():
        assert set(targets) == {f"jaxsoftmax.{op}" for op in jaxsoftmax._ops.OPS}
        stages = {"execute"} | ({"initialize"} if platform == "CUDA" else set())
        assert all(set(target) == stages for target in targets.values())


def test_versions_are_compared():
    """A header of the running jaxlib is found, and an equal or older build may register."""
    runtime = _ffi.runtime_version()
    assert runtime is not None and tuple(_native.build_info()["ffi_api"]) <= runtime
    assert _ffi.mismatch(runtime, runtime) is None
    assert _ffi.mismatch((runtime[0], runtime[1] + 1), runtime)
    assert _ffi.mismatch((runtime[0] + 1, 0), runtime)
    assert _ffi.mismatch(runtime, None)
    assert _ffi.header_version("#define XLA_FFI_API_MAJOR 3\n#define XLA_FFI_API_MINOR 14\n") == (
        3,
        14,
    )
    assert _ffi.header_version("nothing here") is None


def test_command_line():
    """python -m jaxsoftmax info and plan."""

    def call(*args):
        command = [sys.executable, "-m", "jaxsoftmax", *args]
        root = str(Path(jaxsoftmax.__file__).parents[1])
        environment = {**os.environ, "PYTHONPATH": root}
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)

    info = call("info")
    assert (
        info.returncode == 0
        and jaxsoftmax.__version__ in info.stdout
        and jax.__version__ in info.stdout
    )
    plan = call("plan", "8x131072", "--device", "h200", "--dtype", "float16")
    assert plan.stdout.strip() == str(
        jaxsoftmax.plan("softmax", "float16", 8, 131072, limits="h200")
    )
    refused = call("plan", "8x131072", "--path", "packed")
    assert refused.returncode != 0 and "holds" in refused.stderr
    assert call("nonsense").returncode != 0
