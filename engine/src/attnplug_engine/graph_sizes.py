"""The batch sizes for which decode steps are captured."""

from __future__ import annotations

from collections.abc import Collection

from attnplug.host import UsageError, show

_FINE = (1, 2, 4, 8, 12, 16, 24, 32)
LARGEST_DEFAULT = 512


def default_sizes(max_batch: int) -> tuple[int, ...]:
    """Sizes that pad a batch by half at most, from 8 requests on; up to ``max_batch``, itself included."""
    sizes, top = list(_FINE), min(max_batch, LARGEST_DEFAULT)
    while sizes[-1] < top:
        sizes.append(sizes[-1] + max(16, sizes[-1] // 4 // 16 * 16))
    return tuple(sorted({size for size in sizes if size < top} | {top}))


def check_sizes(sizes: Collection[int], max_batch: int) -> tuple[int, ...]:
    """The sizes that were asked for, smallest first."""
    settings = ["cuda_graph_batch_sizes", "max_batch"]
    if isinstance(sizes, str) or not isinstance(sizes, Collection):
        raise UsageError(
            f"`cuda_graph_batch_sizes` {show(sizes)} is not allowed; give a list of batch sizes, such as [1, 2, 4]",
            settings=settings[:1],
        )
    if not sizes:
        raise UsageError(
            "`cuda_graph_batch_sizes` is empty; give batch sizes, or turn graphs off by `disable_cuda_graph`",
            settings=["cuda_graph_batch_sizes", "disable_cuda_graph"],
        )
    for size in sizes:
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise UsageError(
                f"`cuda_graph_batch_sizes` holds {show(size)}, which is no batch size; give numbers from 1 to "
                f"{max_batch}",
                settings=settings[:1],
            )
        if size > max_batch:
            raise UsageError(
                f"`cuda_graph_batch_sizes` holds {size}, and no batch has more than {max_batch} requests; leave it "
                "out, or raise `max_batch`",
                settings=settings,
            )
    if len(set(sizes)) < len(sizes):
        raise UsageError(
            f"`cuda_graph_batch_sizes` names a size twice: {', '.join(map(str, sizes))}; name each once",
            settings=settings[:1],
        )
    return tuple(sorted(sizes))
