"""User settings in ``additional_config["attnplug"]``."""

from __future__ import annotations

import re

import pytest

from attnplug import Role, UsageError
from attnplug.host import BackendRequest
from attnplug_testing.errors import naming
from attnplug_vllm.settings import read_request


def test_auto_is_the_default():
    assert read_request({"gdn_prefill_backend": "triton"}) == BackendRequest("auto")


def test_a_backend_a_backend_per_role_and_options():
    section = {"backend": "a", "prefill": "b", "decode": "c", "options": {"b": {"splits": 4, "fast": True, "x": None}}}
    request = read_request({"attnplug": section})
    assert request.attention == "a" and request.roles == {Role.PREFILL: "b", Role.DECODE: "c"}
    assert request.options == {"b": {"splits": "4", "fast": "true", "x": "none"}}


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("triton_mha", "--additional-config.attnplug is 'triton_mha'; give an object with some of the keys backend, "),
        ({"bakend": "a"}, "--additional-config.attnplug has no key 'bakend'; it has backend, prefill, decode, options"),
        ({"backend": 3}, "--additional-config.attnplug.backend is 3; give the name of a backend, or auto"),
        ({"options": []}, '--additional-config.attnplug.options is []; give {"NAME": {"KEY": VALUE}}'),
        ({"options": {"a": 1}}, '--additional-config.attnplug.options.a is 1; give {"KEY": VALUE}'),
    ],
)
def test_what_cannot_be_read_is_said_in_vllms_words(section, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        read_request({"attnplug": section})


@pytest.mark.parametrize("key", ["Attnplug", "attnplug.backend"])
def test_a_misspelled_section_is_refused_and_not_read_as_auto(key):
    with pytest.raises(UsageError, check=naming(key, '{"attnplug": {"backend": "auto"}}')):
        read_request({key: "triton_mha"})
