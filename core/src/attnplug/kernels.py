"""Building blocks for authors of kernels, pools and reference backends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnplug.faces import face

if TYPE_CHECKING:
    from attnplug.author.served_layers import output_width as output_width
    from attnplug.contract.geometry import spread as spread
    from attnplug.declare.errors import UsageError as UsageError
    from attnplug.kv.buffer import PagedBuffer as PagedBuffer
    from attnplug.kv.buffer import copy_pages as copy_pages
    from attnplug.kv.caches import CacheKey as CacheKey
    from attnplug.kv.layers import check_size as check_size
    from attnplug.kv.layers import distinct_layers as distinct_layers
    from attnplug.kv.layers import held_for as held_for
    from attnplug.kv.layout import PageLayout as PageLayout
    from attnplug.kv.page_copy import PageCopy as PageCopy
    from attnplug.kv.page_copy import settle_copies as settle_copies
    from attnplug.kv.row_pool import RowFormat as RowFormat
    from attnplug.kv.row_pool import RowPool as RowPool
    from attnplug.kv.scaled_rows import ScaledRows as ScaledRows
    from attnplug.mla.merge import merge_partial as merge_partial
    from attnplug.torch_native.attention import Softmax as Softmax
    from attnplug.torch_native.attention import attend as attend
    from attnplug.torch_native.attention import attend_by_parts as attend_by_parts
    from attnplug.torch_native.attention import hidden_keys as hidden_keys
    from attnplug.torch_native.attention import tiles as tiles
    from attnplug.torch_native.planner import Group as Group
    from attnplug.torch_native.planner import plan_groups as plan_groups

_MODULES = {
    "author.served_layers": ("output_width",),
    "contract.geometry": ("spread",),
    "declare.errors": ("UsageError",),
    "kv.page_copy": ("PageCopy", "settle_copies"),
    "kv.buffer": ("PagedBuffer", "copy_pages"),
    "kv.caches": ("CacheKey",),
    "kv.layers": ("check_size", "distinct_layers", "held_for"),
    "kv.layout": ("PageLayout",),
    "kv.row_pool": ("RowFormat", "RowPool"),
    "kv.scaled_rows": ("ScaledRows",),
    "mla.merge": ("merge_partial",),
    "torch_native.attention": ("Softmax", "attend", "attend_by_parts", "hidden_keys", "tiles"),
    "torch_native.planner": ("Group", "plan_groups"),
}

__getattr__, __dir__, __all__ = face(__name__, globals(), _MODULES, other="attnplug")
