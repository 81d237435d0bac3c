"""What keeps part of the cache outside of the pools."""

from __future__ import annotations

from typing import Protocol, runtime_checkable


@runtime_checkable
class Coordinator(Protocol):
    """Keeps rows of the cache outside of the pools, and brings them back when attention reads them (A10).

    HiSparse is one: all rows are in host memory, and each request has a small buffer of hot rows on the device. A
    coordinator is built after the pools and before the backends. A backend takes it in its constructor. A backend that
    calls more than this protocol narrows it to the class that it knows. It is not a part of a batch.
    """

    @property
    def name(self) -> str:
        """What messages and reports call it."""
        ...

    @property
    def device_nbytes(self) -> int:
        """Bytes that it holds on the device, beside the pools."""
        ...

    @property
    def host_nbytes(self) -> int:
        """Bytes that it holds in host memory."""
        ...

    def release(self, row: int) -> None:
        """Give back all that is kept for the request in this row of the slot table, which ended or was aborted.

        This is allowed in every state of a request. Copies of its rows that are under way are waited for. A row for
        which nothing is kept is left alone.
        """
        ...
