"""A test's code in a fresh process, under a time limit: a hang is a failure, not a stuck suite."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jaxsoftmax

ROOTS = [str(Path(jaxsoftmax.__file__).parents[1]), str(Path(__file__).parent)]
CODE = """
import faulthandler, sys
faulthandler.dump_traceback_later({limit}, exit=True)  # where every thread hangs
sys.path[:0] = {roots!r}
import {module}
{module}.{name}(*{args!r})
"""


def fresh(
    function: Callable[..., None], *args: Any, platform: str, flags: str = "", limit: int = 240
) -> None:
    """Calls a function of a module of tests in a process whose default device is the platform's.
    What it raises, or where its threads are after `limit` seconds, becomes the failure's text."""
    code = CODE.format(
        limit=limit, roots=ROOTS, module=function.__module__, name=function.__name__, args=args
    )
    environment = {
        **os.environ,
        "JAX_PLATFORMS": platform if platform == "cpu" else f"{platform},cpu",
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=limit + 30
    )
    assert done.returncode == 0, f"{function.__name__}{args}:\n{done.stderr[-8000:]}"
