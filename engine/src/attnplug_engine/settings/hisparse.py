"""HiSparse settings: sizes of hot buffers and of the host memory behind them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from attnplug import ModelSpec, UsageError
from attnplug.hf.config_keys import show

_BUFFER_TIMES_TOPK = 2
_HOST_SHARE = 0.8  # of free host memory


@dataclass(frozen=True, slots=True)
class HiSparseConfig:
    """Keys of ``hisparse_config``."""

    device_buffer_size: int | None = None
    """Rows of a request's hot buffer in each layer. None: twice the number of rows that its new rows can select."""
    host_memory_gib: float | None = None
    """Host memory in GiB per rank if ``num_pages`` is not given. None: most of the free memory."""

    @classmethod
    def read(cls, given: str | Mapping[str, Any] | None) -> HiSparseConfig:
        """Read the settings from JSON text or from a mapping. Raises UsageError."""
        if isinstance(given, str):
            try:
                given = json.loads(given)
            except ValueError as error:
                raise _error(
                    f'{show(given)} is not JSON: {error}; write it like {{"device_buffer_size": 4096}}'
                ) from None
        if given is None:
            return cls()
        known = [field.name for field in fields(cls)]
        if not isinstance(given, Mapping):
            raise _error(f"is {show(given)}; give an object with any of {', '.join(known)}")
        if unknown := sorted(set(given) - set(known)):
            topk = "; top_k is the model's own" if "top_k" in unknown else ""
            raise _error(f"has {', '.join(map(repr, unknown))}; its keys are {', '.join(known)}{topk}")
        config = cls(**given)
        rows, memory = config.device_buffer_size, config.host_memory_gib
        if rows is not None and (not isinstance(rows, int) or isinstance(rows, bool) or rows < 1):
            raise _error(f"has a device_buffer_size of {show(rows)}; give a number of rows")
        number = isinstance(memory, int | float) and not isinstance(memory, bool)
        if memory is not None and not (number and 0 < memory < math.inf):
            raise _error(f"has a host_memory_gib of {show(memory)}; give a number above 0")
        return config

    def buffer_size(self, spec: ModelSpec, nodes: int) -> int:
        """Return the rows of a hot buffer if ``nodes`` new rows of a request select together."""
        if self.device_buffer_size is not None:
            return self.device_buffer_size
        topk = max((layer.indexer.topk for layer in spec.layers if layer.indexer is not None), default=0)
        return _BUFFER_TIMES_TOPK * topk * nodes

    def host_budget(self, free: int, ranks: int) -> int:
        """Return the bytes of host memory for one of ``ranks`` ranks, if ``free`` bytes are free."""
        if self.host_memory_gib is not None:
            return int(self.host_memory_gib * 2**30)
        return int(free * _HOST_SHARE) // ranks


def _error(problem: str) -> UsageError:
    return UsageError(f"`hisparse_config` {problem}", settings=["hisparse_config"])
