"""From a model reference to a ``ModelSpec``, tiny models of plugins included."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from attnplug.choose.registry import Registry, load_registry
from attnplug.declare.errors import PluginError
from attnplug.declare.model import ModelSpec
from attnplug.hf.config_keys import ModelConfigError
from attnplug.hf.model_config import model_from_config, read_model
from attnplug.hf.tiny import TINY, TINY_CONFIGS


def load_model(reference: str, registry: Registry | None = None) -> ModelSpec:
    """Read the model that ``reference`` names: ``tiny:NAME``, a ``config.json`` or the folder that holds one.

    Raises ModelConfigError, whatever is wrong with it. Without a registry, the one of the installed plugins is used.
    """
    if reference.startswith(TINY):
        return model_from_config(tiny_config(reference, registry), reference)
    return read_model(reference)


def tiny_config(reference: str, registry: Registry | None = None) -> Mapping[str, object]:
    """The config of ``tiny:NAME``, or an error that says which names there are."""
    name = reference.removeprefix(TINY)
    if registry is None:
        if name in TINY_CONFIGS:  # core keeps its names, so no plugin needs to be loaded
            return TINY_CONFIGS[name]
        registry = load_registry()
    if name in registry.tiny_models:
        return registry.tiny_models[name].value
    faults = [str(broken) for broken in registry.broken if broken.name == reference]
    if faults:
        raise PluginError(f"the model {reference!r} cannot be used:\n" + "\n".join(f"  {fault}" for fault in faults))
    near = difflib.get_close_matches(name, registry.tiny_models, n=2)
    meant = f"did you mean {' or '.join(TINY + match for match in near)}? " if near else ""
    known = ", ".join(TINY + known for known in registry.tiny_models)
    lost = "; 'attnplug doctor' shows the broken plugins, which may bring more" if registry.broken else ""
    raise ModelConfigError(f"{reference!r} is not a built-in model; {meant}known: {known}{lost}", reference)
