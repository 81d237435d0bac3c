"""Formatting of settings as command-line options."""

from __future__ import annotations

import argparse

from attnplug.declare.refusal import Refusal
from attnplug.declare.settings import Render


def option(setting: str) -> str:
    """Return ``--page-size`` for ``page_size``, or ``--backend-option NAME.KEY=…`` for an option of a backend."""
    return f"--backend-option {setting}=…" if "." in setting else f"--{setting.replace('_', '-')}"


def options_of(parser: argparse.ArgumentParser) -> Render:
    """Return a function that formats settings as options of one command, or as None if it has no such option."""

    def render(setting: str) -> str | None:
        text = option(setting)
        return text if text.partition(" ")[0] in parser._option_string_actions else None

    return render


def refusal_as_json(refusal: Refusal, render: Render) -> dict[str, object]:
    """Return a refusal as JSON, with its setting as a key and as a command-line option."""
    return {**refusal.as_json(), "option": None if refusal.setting is None else render(refusal.setting)}
