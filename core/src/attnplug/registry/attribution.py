"""Errors that name the plugin whose code caused them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from attnplug.declare.errors import AttnplugError, BackendError, PluginError, describe_error
from attnplug.declare.registered import Registered
from attnplug.registry.isolation import guarded


def label(registered: Registered) -> str:
    return f"backend {registered.spec.name} ({registered.source})"


@contextmanager
def attributed_to(registered: Registered, failure: str) -> Iterator[None]:
    """Raise any exception of a plugin's code as an error that names the plugin. Kernel libraries do anything."""
    where = f"{label(registered)}: {failure}"
    try:
        with guarded():
            yield
    except PluginError as error:  # raised by a declaration, which does not know its plugin
        raise BackendError(f"{where}: {error}") from error
    except (AttnplugError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise BackendError(f"{where}: {describe_error(error)}") from error


class BuildError(BackendError):
    """A selected backend could not be built. ``backend`` is its registration, with the plugin's distribution."""

    def __init__(self, backend: Registered, error: AttnplugError) -> None:
        named, text = label(backend), error.message
        super().__init__(text if text.startswith(named) else f"{named}: {text}", settings=error.settings)
        self.backend = backend
        self.exit_code = error.exit_code  # that of a UsageError if the backend refuses its options
