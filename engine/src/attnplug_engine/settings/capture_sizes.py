"""Capture sizes: requests of decode steps, tokens of prefills."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from attnplug import UsageError
from attnplug.hf.config_keys import show

_SMALL_BATCHES = (1, 2, 4, 8, 12, 16, 24, 32)
LARGEST_DEFAULT = 512
"""Largest batch size that is captured by default."""
_PREFILLS = (16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)


def default_sizes(max_batch: int) -> tuple[int, ...]:
    """Return batch sizes up to and including ``max_batch``. From 8 requests on, at most half of a batch is padding."""
    sizes, top = list(_SMALL_BATCHES), min(max_batch, LARGEST_DEFAULT)
    while sizes[-1] < top:
        sizes.append(sizes[-1] + max(16, sizes[-1] // 4 // 16 * 16))
    return tuple(sorted({size for size in sizes if size < top} | {top}))


def default_prefill_sizes(max_tokens: int) -> tuple[int, ...]:
    """Return token counts of prefills, at most ``max_tokens``. At most half of a graph is padding, from 64 tokens on a
    third."""
    top = min(max_tokens, _PREFILLS[-1])
    return (*(size for size in _PREFILLS if size < top), top)


@dataclass(frozen=True, slots=True)
class SizeOption:
    """Setting that lists capture sizes, with the words of its error messages."""

    name: str
    off: str
    """Setting that turns these graphs off."""
    one: str
    several: str
    bounded: str
    """Phrase with the maximum in place of ``{}``."""
    limit: str
    """Setting that determines the maximum."""

    def check(self, sizes: Collection[int], most: int, limit: str | None = None) -> tuple[int, ...]:
        """Return the requested sizes, smallest first. ``limit`` names the setting that implies ``most``, if it is
        another one. Raises UsageError."""
        name, limit = self.name, limit or self.limit
        if isinstance(sizes, str) or not isinstance(sizes, Collection):
            raise UsageError(
                f"`{name}` {show(sizes)} is not allowed; give a list of {self.several}, such as [1, 2, 4]",
                settings=[name],
            )
        if not sizes:
            raise UsageError(
                f"`{name}` is empty; give {self.several}, or turn graphs off by `{self.off}`", settings=[name, self.off]
            )
        for size in sizes:
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise UsageError(
                    f"`{name}` holds {show(size)}, which is not a {self.one}; give numbers from 1 to {most}",
                    settings=[name],
                )
            if size > most:
                raise UsageError(
                    f"`{name}` holds {size}, and no {self.bounded.format(most)}; leave it out, or raise `{limit}`",
                    settings=[name, limit],
                )
        if len(set(sizes)) < len(sizes):
            raise UsageError(
                f"`{name}` names a size twice: {', '.join(map(str, sizes))}; name each once", settings=[name]
            )
        return tuple(sorted(sizes))


BATCH_SIZES = SizeOption(
    "cuda_graph_batch_sizes",
    "disable_cuda_graph",
    "batch size",
    "batch sizes",
    "batch has more than {} requests",
    "max_batch",
)
PREFILL_SIZES = SizeOption(
    "cuda_graph_prefill_sizes",
    "disable_prefill_cuda_graph",
    "number of tokens",
    "numbers of tokens",
    "step has more than {} tokens",
    "chunked_prefill_size",
)
