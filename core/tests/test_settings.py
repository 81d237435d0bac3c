"""Settings in errors: keys in the contract, and how hosts render them."""

from __future__ import annotations

import argparse

import pytest

from attnplug import Role, Setting, UsageError
from attnplug.cli.app import option, options_of
from attnplug.host import AttnplugError


def test_an_error_names_settings_by_their_keys() -> None:
    error = UsageError("`page_size` 0 is wrong", settings=[Setting.PAGE_SIZE])
    assert str(error) == "page_size 0 is wrong"
    assert error.settings == ("page_size",)


def test_a_usage_error_has_the_settings_that_its_message_names() -> None:
    """Only keys of ``Setting``: other words in backticks may be a plugin's or a library's."""
    error = UsageError("`torch.float16` for `page_size`, `dtype` or `acme.speed`", settings=["acme.speed"])
    assert error.settings == ("acme.speed", "page_size", "dtype")
    assert AttnplugError("`page_size` of a library").settings == ()


@pytest.mark.parametrize(
    ("message", "fragment"),
    [
        ("`page_size` 0 is wrong", "block_size 0 is wrong"),
        ("raise `page_size` or `max_batch`", "raise block_size or max_batch"),
        ("pages are too small", "pages are too small (block_size)"),
        ("`other` is nobody's", "`other` is nobody's (block_size)"),
    ],
)
def test_a_host_spells_the_settings_of_an_error(message: str, fragment: str) -> None:
    """A setting that the host cannot spell keeps its key inside the message, and is not appended."""
    error = AttnplugError(message, settings=["page_size", "max_batch"])
    assert error.format({"page_size": "block_size"}.get) == fragment


def test_every_role_has_a_setting() -> None:
    """D3"""
    assert [role.setting for role in Role] == [f"{role}_attention_backend" for role in Role]


@pytest.mark.parametrize(
    ("setting", "shown"),
    [
        (Setting.PAGE_SIZE, "--page-size"),
        ("flashinfer_mla.kernel", "--backend-option flashinfer_mla.kernel=…"),
        (Role.DRAFT.setting, "--draft-attention-backend"),
    ],
)
def test_the_command_line_shows_a_setting_as_an_option(setting: str, shown: str) -> None:
    assert option(setting) == shown


def test_a_command_shows_only_options_that_it_has() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--page-size")
    parser.add_argument("--backend-option")
    render = options_of(parser)
    assert [render(key) for key in ("page_size", "a.kernel", "cuda_graph")] == [
        "--page-size",
        "--backend-option a.kernel=…",
        None,
    ]
