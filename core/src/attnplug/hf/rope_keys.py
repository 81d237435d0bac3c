"""Where a config says how positions are rotated: ``rope_parameters``, or ``rope_scaling`` in older configs."""

from __future__ import annotations

from collections.abc import Mapping

from attnplug.hf.config_keys import Config


def rope_section(config: Config) -> Config:
    """The section that counts, or an empty one. If a config has both, ``rope_scaling`` wins, as in transformers."""
    for key in ("rope_scaling", "rope_parameters"):
        section = config.section(key)
        if section is not None and section.values:
            _check_flat(section)
            return section
    return Config({}, config.source, config.model_type, config.path)


def rope_type_key(section: Config) -> str:
    """The key of the rope's type: ``rope_type``, or ``type`` in older configs."""
    return "type" if "rope_type" not in section.values and "type" in section.values else "rope_type"


def rope_type(section: Config) -> str:
    """The rope's type, whether it is known or not; ``"default"`` if the section has none."""
    key = rope_type_key(section)
    if key not in section.values:
        return "default"
    value = section.optional_text(key)
    if value is None:
        raise section.wrong(key, "the name of a rope type; leave the key out for 'default'")
    return value


def _check_flat(section: Config) -> None:
    for key, value in section.values.items():
        if isinstance(value, Mapping):
            raise section.error(
                "is an object: rope that differs from layer to layer cannot be read; give one for all layers", key[:80]
            )
