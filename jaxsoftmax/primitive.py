"""The same functions directly on their primitives, for forward mode: jvp, jacfwd, linearize.

JAX cannot give a function with a custom_vjp a forward mode. These have one, take no `where`, and
their gradient runs the same two kernels.
"""

from ._api import primitive_log_softmax as log_softmax
from ._api import primitive_logsumexp as logsumexp
from ._api import primitive_softmax as softmax

__all__ = ["log_softmax", "logsumexp", "softmax"]
