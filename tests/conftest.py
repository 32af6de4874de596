"""Set-up of the suite: 8 virtual CPU devices, the installed package before the tree, fixtures."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

# Before anything imports jax. A user's own flags stay.
_flags = os.environ.get("XLA_FLAGS", "")
if "xla_force_host_platform_device_count" not in _flags:
    os.environ["XLA_FLAGS"] = f"{_flags} --xla_force_host_platform_device_count=8".strip()

# `python -m pytest` puts the repository first on the path, where the package may have no compiled
# module: an installed jaxsoftmax comes first, the source tree serves without one.
_root, _path = Path(__file__).resolve().parents[1], list(sys.path)
sys.path[:] = [p for p in _path if Path(p or ".").resolve() != _root]
if importlib.util.find_spec("jaxsoftmax") is None:
    sys.path[:] = _path
sys.path.append(str(_root))  # last: for bench, which no package holds

import jax  # noqa: E402
import pytest  # noqa: E402


def devices_of(platform: str) -> list[jax.Device]:
    try:
        return jax.devices(platform)
    except RuntimeError:
        return []


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def platform(request):
    """Runs the test once a platform, on its first device; skips the GPU where there is none."""
    devices = devices_of(request.param)
    if not devices:
        pytest.skip(f"no {request.param} device")
    with jax.default_device(devices[0]):
        yield request.param


@pytest.fixture
def cpu():
    """Runs the test on the CPU only: what it tests does not depend on the device."""
    with jax.default_device(jax.devices("cpu")[0]):
        yield


@pytest.fixture
def cpus():
    """Eight CPU devices."""
    devices = jax.devices("cpu")
    if len(devices) < 8:
        pytest.skip("XLA_FLAGS asks for fewer than 8 CPU devices")
    return devices[:8]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def several(request):
    """Runs the test once a platform, on eight CPU devices and on all GPUs, if there are two."""
    if request.param == "cpu":
        return request.getfixturevalue("cpus")
    devices = devices_of("cuda")
    if len(devices) < 2:
        pytest.skip("fewer than 2 cuda devices")
    return devices


@pytest.fixture
def cpu_backend():
    """For what asks which device JAX runs on."""
    if jax.default_backend() != "cpu":
        pytest.skip("this process runs on a GPU")
