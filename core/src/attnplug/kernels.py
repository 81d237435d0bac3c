"""Checks, transfers and merges shared by kernel authors.

A name is imported when it is first used: ``requirement_refusal`` loads no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnplug.faces import face

if TYPE_CHECKING:
    from attnplug.author.served_layers import check_lse as check_lse
    from attnplug.author.served_layers import check_rows as check_rows
    from attnplug.contract.geometry import spread as spread
    from attnplug.declare.requirement import import_library as import_library
    from attnplug.declare.requirement import requirement_refusal as requirement_refusal
    from attnplug.kv import split_table as split_table
    from attnplug.kv import torch_dtype as torch_dtype
    from attnplug.machine.transfer import on_host as on_host
    from attnplug.machine.transfer import to_device as to_device
    from attnplug.mla import merge_partial as merge_partial

_MODULES = {
    "author.served_layers": ("check_lse", "check_rows"),
    "contract.geometry": ("spread",),
    "declare.requirement": ("import_library", "requirement_refusal"),
    "kv": ("split_table", "torch_dtype"),
    "machine.transfer": ("on_host", "to_device"),
    "mla": ("merge_partial",),
}

__getattr__, __dir__, __all__ = face(__name__, globals(), _MODULES, other="attnplug")
