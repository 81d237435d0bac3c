"""Declarations of ``attnplug plugins``, ``doctor`` and ``completion``. A command's module is imported when it runs."""

from __future__ import annotations

import argparse

from attnplug.cli.app import Commands, add_command


def declare_plugins(commands: Commands[argparse.ArgumentParser]) -> None:
    text = "List the installed packages that provide backends, commands and hosts."
    add_command(commands, "plugins", text, _plugins)


def _plugins(parsed: argparse.Namespace) -> int:
    from attnplug_conformance import plugins

    return plugins.run(parsed)


def declare_doctor(commands: Commands[argparse.ArgumentParser]) -> None:
    text = "Report on Python, torch, devices, kernel libraries, plugins and caches. Always prints, never fails."
    add_command(commands, "doctor", text, _doctor)


def _doctor(parsed: argparse.Namespace) -> int:
    from attnplug_conformance import doctor

    return doctor.run(parsed)


def declare_completion(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = add_command(commands, "completion", "Print a completion script for a shell.", _completion)
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="bash, zsh or fish")


def _completion(parsed: argparse.Namespace) -> int:
    from attnplug_conformance import completion

    return completion.run(parsed)
