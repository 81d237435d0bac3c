"""What users ask of the bridge: ``additional_config["attnplug"]`` of a vLLM configuration, as a ``BackendRequest``."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from attnplug import Role
from attnplug.host import BackendRequest, UsageError

CUSTOM = "CUSTOM"
"""What vLLM calls a backend that is not its own."""
SECTION = "attnplug"
OPTION = f"--additional-config.{SECTION}"
ROLES = {"prefill": Role.PREFILL, "decode": Role.DECODE}
KEYS = ("backend", *ROLES, "options")


@dataclass(frozen=True, slots=True)
class Settings:
    """``asked`` says whether the configuration mentions attnplug at all."""

    request: BackendRequest
    asked: bool


def read_settings(additional_config: object) -> Settings:
    """What a vLLM configuration asks for; ``auto`` where it says nothing. Raises UsageError for what it cannot mean."""
    if not isinstance(additional_config, Mapping) or SECTION not in additional_config:
        return Settings(BackendRequest(), asked=False)
    section = additional_config[SECTION]
    if not isinstance(section, Mapping):
        raise UsageError(
            f"{OPTION} is {section!r}; give an object with some of the keys {', '.join(KEYS)}, such as "
            f'{{"{SECTION}": {{"backend": "auto"}}}}'
        )
    if unknown := [key for key in section if key not in KEYS]:
        raise UsageError(f"{OPTION} has no key {unknown[0]!r}; it has {', '.join(KEYS)}")
    names = {key: _name(key, section[key]) for key in ("backend", *ROLES) if key in section}
    return Settings(
        BackendRequest(
            attention=names.get("backend", "auto"),
            roles={role: names[key] for key, role in ROLES.items() if key in names},
            options=_options(section.get("options", {})),
        ),
        asked=True,
    )


def without_custom(names: Collection[str]) -> str:
    """What a user is told who asks for attnplug, while vLLM is told to use something else, or nothing."""
    instead = f"uses {', '.join(names)}" if names else "is not told to use it"
    return f"--additional-config asks for {SECTION}, but vLLM {instead}; give --attention-backend {CUSTOM}"


def _name(key: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise UsageError(f"{OPTION}.{key} is {value!r}; give the name of a backend, or auto")
    return value


def _options(value: object) -> dict[str, dict[str, str]]:
    """Options by backend: ``{"NAME": {"KEY": VALUE}}``. Values are read as the command line's are."""
    if not isinstance(value, Mapping):
        raise UsageError(f'{OPTION}.options is {value!r}; give {{"NAME": {{"KEY": VALUE}}}}')
    options = {}
    for name, settings in value.items():
        if not isinstance(settings, Mapping):
            raise UsageError(f'{OPTION}.options.{name} is {settings!r}; give {{"KEY": VALUE}}')
        options[str(name)] = {str(key): _text(item) for key, item in settings.items()}
    return options


def _text(value: object) -> str:
    """A JSON value as a person would type it."""
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)
