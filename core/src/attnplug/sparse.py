"""Data types and protocols of sparse and compressed layers, for backends that serve them and models that have them.

The package attnplug-sparse implements them: the index and its kernels, pools, HiSparse and a reference backend.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnplug.faces import face

if TYPE_CHECKING:
    from attnplug.contract.backend import RowSelection as RowSelection
    from attnplug.contract.compressed import CompressorInputs as CompressorInputs
    from attnplug.contract.compressed import CompressorWeights as CompressorWeights
    from attnplug.contract.coordinator import Coordinator as Coordinator
    from attnplug.contract.sparse import IndexInputs as IndexInputs
    from attnplug.contract.sparse import SelectedPositions as SelectedPositions
    from attnplug.contract.sparse import SelectedRows as SelectedRows
    from attnplug.contract.sparse import SelectedSlots as SelectedSlots
    from attnplug.contract.sparse import selected_tensor as selected_tensor
    from attnplug.declare.model import CompressedDims as CompressedDims
    from attnplug.declare.model import IndexerDims as IndexerDims

_MODULES = {
    "contract.backend": ("RowSelection",),
    "contract.compressed": ("CompressorInputs", "CompressorWeights"),
    "contract.coordinator": ("Coordinator",),
    "contract.sparse": ("IndexInputs", "SelectedPositions", "SelectedRows", "SelectedSlots", "selected_tensor"),
    "declare.model": ("CompressedDims", "IndexerDims"),
}

__getattr__, __dir__, __all__ = face(__name__, globals(), _MODULES, other="attnplug")
