"""Linear attention: inputs of the hooks, dimensions of a layer, and the pool of recurrent states.

A name is imported when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnplug.faces import face

if TYPE_CHECKING:
    from attnplug.contract.backend import LinearHooks as LinearHooks
    from attnplug.contract.linear import DeltaInputs as DeltaInputs
    from attnplug.contract.linear import DeltaWeights as DeltaWeights
    from attnplug.contract.linear import LinearInputs as LinearInputs
    from attnplug.declare.model import LinearDims as LinearDims
    from attnplug.kv import LinearStatePool as LinearStatePool

_MODULES = {
    "contract.backend": ("LinearHooks",),
    "contract.linear": ("DeltaInputs", "DeltaWeights", "LinearInputs"),
    "declare.model": ("LinearDims",),
    "kv": ("LinearStatePool",),
}

__getattr__, __dir__, __all__ = face(__name__, globals(), _MODULES, other="attnplug")
