"""Settings as options of a command line, for people who can give them."""

from __future__ import annotations

import argparse

from attnplug.declare.refusal import Refusal
from attnplug.declare.settings import Render


def option(setting: str) -> str:
    """``--page-size`` for ``page_size``; ``--backend-option NAME.KEY=…`` for an option of a backend."""
    return f"--backend-option {setting}=…" if "." in setting else f"--{setting.replace('_', '-')}"


def options_of(parser: argparse.ArgumentParser) -> Render:
    """Renders settings as the options of one command; ``None`` for those that it does not have."""

    def render(setting: str) -> str | None:
        text = option(setting)
        return text if text.partition(" ")[0] in parser._option_string_actions else None

    return render


def refusal_as_json(refusal: Refusal, render: Render) -> dict[str, object]:
    """A refusal, with its setting by key and as an option."""
    return {**refusal.as_json(), "option": None if refusal.setting is None else render(refusal.setting)}
