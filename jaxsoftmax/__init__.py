"""jaxsoftmax: softmax for JAX models, as XLA FFI custom calls on GPU and CPU."""

from . import primitive as primitive
from . import reference as reference
from ._api import log_softmax as log_softmax
from ._api import logsumexp as logsumexp
from ._api import softmax as softmax
from ._plan import Limits as Limits
from ._plan import Plan as Plan
from ._plan import plan as plan

__version__ = "0.1.0"

__all__ = [
    "Limits",
    "Plan",
    "__version__",
    "log_softmax",
    "logsumexp",
    "plan",
    "primitive",
    "reference",
    "softmax",
]
