"""Rope keys of a config: the section ``rope_parameters``, or ``rope_scaling`` in older configs."""

from __future__ import annotations

from collections.abc import Mapping

from attnplug.hf.config_keys import Config


def rope_section(config: Config) -> Config:
    """Return the rope section, or an empty one. As in transformers, ``rope_scaling`` has priority if both exist."""
    for key in ("rope_scaling", "rope_parameters"):
        section = config.section(key)
        if section is not None and section.values:
            nested = next((name for name, value in section.values.items() if isinstance(value, Mapping)), None)
            if nested is not None:
                raise section.error("is an object: rope must be the same in all layers", nested[:80])
            return section
    return Config({}, config.source, config.model_type, config.path)


def rope_type_key(section: Config) -> str:
    """Return the key of the rope type: ``rope_type``, or ``type`` in older configs."""
    return "type" if "rope_type" not in section.values and "type" in section.values else "rope_type"


def rope_type(section: Config) -> str:
    """Return the rope type, known or not, or ``"default"`` if the section has none."""
    key = rope_type_key(section)
    if key not in section.values:
        return "default"
    value = section.optional_text(key)
    if value is None:
        raise section.wrong(key, "the name of a rope type; leave the key out for 'default'")
    return value
