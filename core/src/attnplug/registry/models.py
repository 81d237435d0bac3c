"""Resolve a model reference, including a plugin's ``tiny:NAME``, to a ``ModelSpec``."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from attnplug.declare.errors import PluginError
from attnplug.declare.model import ModelSpec
from attnplug.hf.config_keys import ModelConfigError
from attnplug.hf.model_config import model_from_config, read_model
from attnplug.hf.tiny import TINY, TINY_CONFIGS
from attnplug.registry.registry import Registry, load_registry


def load_model(reference: str, registry: Registry | None = None) -> ModelSpec:
    """Read a model's config. ``reference`` is ``tiny:NAME``, a ``config.json`` or the folder that contains one.

    Raises ModelConfigError for anything that cannot be read. ``registry`` defaults to the installed plugins. Example::

        load_model("tiny:deepseek_v3").layers[0].mla
    """
    if reference.startswith(TINY):
        return model_from_config(tiny_config(reference, registry), reference)
    return read_model(reference)


def tiny_config(reference: str, registry: Registry | None = None) -> Mapping[str, object]:
    """Return the config of ``tiny:NAME``. Raises ModelConfigError with the known names."""
    name = reference.removeprefix(TINY)
    if registry is None:
        if name in TINY_CONFIGS:  # core keeps its names, so no plugin needs to be loaded
            return TINY_CONFIGS[name]
        registry = load_registry()
    if name in registry.tiny_models:
        return registry.tiny_models[name].value
    faults = [str(fault) for fault in registry.broken if fault.name == reference]
    if faults:
        raise PluginError(f"the model {reference!r} cannot be used:\n" + "\n".join(f"  {fault}" for fault in faults))
    near = difflib.get_close_matches(name, registry.tiny_models, n=2)
    meant = f"did you mean {' or '.join(TINY + match for match in near)}? " if near else ""
    known = ", ".join(TINY + known for known in registry.tiny_models)
    broken = "; 'attnplug backends' reports the broken plugins, which may provide more" if registry.broken else ""
    raise ModelConfigError(f"{reference!r} is not a built-in model; {meant}known: {known}{broken}", reference)
