"""User settings: ``additional_config["attnplug"]`` of a vLLM configuration as a ``BackendRequest``."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from attnplug import Role, UsageError
from attnplug.host import BackendRequest

CUSTOM = "CUSTOM"
"""vLLM's name for a backend from outside."""
SECTION = "attnplug"
OPTION = f"--additional-config.{SECTION}"
ROLES = {"prefill": Role.PREFILL, "decode": Role.DECODE}
KEYS = ("backend", *ROLES, "options")


def read_request(additional_config: object) -> BackendRequest:
    """Read attnplug's section; ``auto`` is the default. Raises :class:`UsageError` if the section is malformed."""
    if not isinstance(additional_config, Mapping):
        return BackendRequest()
    for key in additional_config:
        if key != SECTION and str(key).lower().partition(".")[0] == SECTION:
            raise UsageError(
                f'--additional-config has a key {key!r}; the section is named {SECTION}: {{"{SECTION}": '
                '{"backend": "auto"}}'
            )
    if SECTION not in additional_config:
        return BackendRequest()
    section = additional_config[SECTION]
    if not isinstance(section, Mapping):
        raise UsageError(
            f"{OPTION} is {section!r}; give an object with some of the keys {', '.join(KEYS)}, such as "
            f'{{"{SECTION}": {{"backend": "auto"}}}}'
        )
    if unknown := [key for key in section if key not in KEYS]:
        raise UsageError(f"{OPTION} has no key {unknown[0]!r}; it has {', '.join(KEYS)}")
    names = {key: _name(key, section[key]) for key in ("backend", *ROLES) if key in section}
    return BackendRequest(
        attention=names.get("backend", "auto"),
        roles={role: names[key] for key, role in ROLES.items() if key in names},
        options=_options(section.get("options", {})),
    )


def missing_custom(names: Collection[str]) -> str:
    """Error message for a configuration with attnplug's section that selects other backends, or none."""
    instead = f"uses {', '.join(names)}" if names else "is not configured to use it"
    return f"--additional-config has a section {SECTION}, but vLLM {instead}; give --attention-backend {CUSTOM}"


def _name(key: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise UsageError(f"{OPTION}.{key} is {value!r}; give the name of a backend, or auto")
    return value


def _options(value: object) -> dict[str, dict[str, str]]:
    """Options by backend, ``{"NAME": {"KEY": VALUE}}``, with values as strings, as on a command line."""
    if not isinstance(value, Mapping):
        raise UsageError(f'{OPTION}.options is {value!r}; give {{"NAME": {{"KEY": VALUE}}}}')
    options = {}
    for name, settings in value.items():
        if not isinstance(settings, Mapping):
            raise UsageError(f'{OPTION}.options.{name} is {settings!r}; give {{"KEY": VALUE}}')
        options[str(name)] = {str(key): _text(item) for key, item in settings.items()}
    return options


def _text(value: object) -> str:
    """Format a JSON value as a user would type it on a command line."""
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)
