"""The same functions directly on their primitives, for forward mode: jvp, jacfwd, linearize.

JAX cannot give a function with a custom_vjp a forward mode. These have one, take no `where`, and
their gradient runs the same two kernels.
"""

from ._api import without_vjp as _without_vjp

softmax = _without_vjp("softmax")
log_softmax = _without_vjp("log_softmax")
logsumexp = _without_vjp("logsumexp")

__all__ = ["log_softmax", "logsumexp", "softmax"]
