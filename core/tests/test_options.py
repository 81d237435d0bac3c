"""Typed options: validation of the class, parsing of each type, and messages about mistakes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Any, ClassVar, Literal, Optional

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnplug import UsageError
from attnplug.declare.options import describe_options, options_problems, parse_options
from attnplug.host import split_settings
from attnplug_testing.errors import raises_naming


class Layout(Enum):
    NHD = "nhd"
    HND = "hnd"


class Level(IntEnum):
    LOW = 1
    HIGH = 2


@dataclass(frozen=True)
class Options:
    """One option of every type."""

    flag: bool = False
    count: int = 4
    ratio: float = 0.5
    path: str = "here"
    mode: Literal["fast", "exact"] = "fast"
    width: Literal[64, 128] = 64
    layout: Layout = Layout.NHD
    level: Level = Level.LOW
    limit: int | None = None
    label: str | None = "x"
    old_style: Optional[float] = None  # noqa: UP045 # authors write it
    either: int | str = 0
    maybe_mode: Literal["on", "off"] | None = None
    made: str = field(default_factory=lambda: "made")
    derived: int = field(default=3, init=False)
    shared: ClassVar[int] = 9


def parse(**settings: str) -> Options:
    parsed = parse_options("fast", Options, settings)
    assert isinstance(parsed, Options)
    return parsed


# ---- reading ----


def test_the_class_of_these_tests_is_a_good_one() -> None:
    assert list(options_problems(Options)) == []


def test_without_settings_the_defaults_hold() -> None:
    assert parse() == Options()


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("flag", "true", True),
        ("flag", "1", True),
        ("flag", "YES", True),
        ("flag", "On", True),
        ("flag", "false", False),
        ("flag", "0", False),
        ("flag", "no", False),
        ("flag", "OFF", False),
        ("count", "-7", -7),
        ("ratio", "0.25", 0.25),
        ("ratio", "1e-3", 0.001),
        ("ratio", "3", 3.0),
        ("path", "", ""),
        ("path", "a=b.c,d é✨", "a=b.c,d é✨"),
        ("path", "none", "none"),
        ("mode", "exact", "exact"),
        ("width", "128", 128),
        ("layout", "hnd", Layout.HND),
        ("layout", "HND", Layout.HND),
        ("level", "2", Level.HIGH),
        ("level", "HIGH", Level.HIGH),
        ("limit", "5", 5),
        ("limit", "none", None),
        ("label", "none", None),
        ("limit", "None", None),
        ("limit", "", None),
        ("old_style", "0.5", 0.5),
        ("old_style", "none", None),
        ("either", "5", 5),
        ("either", "five", "five"),
        ("maybe_mode", "off", "off"),
        ("maybe_mode", "none", None),
        ("made", "x", "x"),
    ],
)
def test_every_type_is_read(key: str, text: str, value: object) -> None:
    found = getattr(parse(**{key: text}), key)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("key", "text", "allowed"),
    [
        ("flag", "maybe", "true or false"),
        ("flag", "", "true or false"),
        ("flag", "2", "true or false"),
        ("count", "four", "int"),
        ("count", "4.0", "int"),
        ("count", "", "int"),
        ("count", "9" * 5000, "int"),
        ("ratio", "half", "float"),
        ("mode", "Fast", "one of fast, exact"),
        ("mode", "", "one of fast, exact"),
        ("width", "65", "one of 64, 128"),
        ("layout", "dhn", "one of nhd, hnd"),
        ("level", "3", "one of 1, 2"),
        ("limit", "many", "int or none"),
        ("maybe_mode", "x", "one of on, off or none"),
    ],
)
def test_a_value_of_the_wrong_type_is_an_error_with_the_right_one(key: str, text: str, allowed: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(**{key: text})
    message = str(caught.value)
    assert f"fast.{key}" in message
    assert allowed in message
    assert repr(text) in message


@pytest.mark.parametrize("key", ["cuont", "Count", "", "derived", "shared", "__class__", "é", "x" * 5000])
def test_an_unknown_option_is_an_error_with_all_that_exist(key: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(**{key: "1"})
    message = str(caught.value)
    assert repr(key) in message
    for line in ("count: int = 4", "mode: one of fast, exact = 'fast'", "limit: int or none = none", "made: str"):
        assert line in message


def test_a_wrong_value_lists_the_options_too() -> None:
    with raises_naming(UsageError, "ratio", "float"):
        parse(count="four")


def test_options_that_cannot_be_set_are_not_listed() -> None:
    assert "derived" not in describe_options(Options)
    assert "shared" not in describe_options(Options)


def test_a_default_is_listed_as_it_is_written() -> None:
    """The listing shows a default in the spelling that a user can type."""
    assert "layout: one of nhd, hnd = nhd" in describe_options(Options).replace("'", "")


def test_a_backend_without_options_says_so() -> None:
    assert parse_options("fast", None, {}) is None
    with raises_naming(UsageError, "fast", "fast.count"):
        parse_options("fast", None, {"count": "1"})


@pytest.mark.parametrize("error", [ValueError, TypeError, AssertionError, KeyError, RuntimeError])
def test_a_class_may_refuse_a_value_itself(error: type[Exception]) -> None:
    """Any exception of its ``__post_init__`` becomes a usage error, including AssertionError."""

    @dataclass(frozen=True)
    class Even:
        count: int = 4

        def __post_init__(self) -> None:
            if self.count % 2:
                raise error("count must be even")

    assert parse_options("fast", Even, {"count": "6"}) == Even(6)
    with pytest.raises(UsageError) as caught:
        parse_options("fast", Even, {"count": "7"})
    for text in ("fast.count=7", "count must be even"):
        assert text in str(caught.value)


@given(st.dictionaries(st.sampled_from(["flag", "count", "ratio", "mode", "limit", "either", "oops"]), st.text()))
def test_any_text_is_read_or_refused_for_a_person(settings: dict[str, str]) -> None:
    try:
        parse(**settings)
    except UsageError as error:
        assert "fast" in str(error)


# ---- the command line's form ----


def test_settings_are_split_by_backend() -> None:
    assert split_settings(["a.x=1", "b.x=2", "a.y=3=4.5"]) == {"a": {"x": "1", "y": "3=4.5"}, "b": {"x": "2"}}


def test_no_settings_are_none() -> None:
    assert split_settings([]) == {}


def test_an_empty_value_is_a_value() -> None:
    assert split_settings(["a.x="]) == {"a": {"x": ""}}


@pytest.mark.parametrize("setting", ["", "=", ".", ".=", "a", "a=1", "a.=1", ".x=1", "a.x", "=a.x", "é✨", "a x"])
def test_a_setting_of_another_form_is_an_error_with_the_form(setting: str) -> None:
    with pytest.raises(UsageError) as caught:
        split_settings([setting])
    assert repr(setting) in str(caught.value)
    assert "NAME.KEY=VALUE" in str(caught.value)


@pytest.mark.parametrize("again", ["2", "1"])
def test_a_setting_given_twice_is_an_error_with_both_values(again: str) -> None:
    with pytest.raises(UsageError) as caught:
        split_settings(["a.x=1", "b.x=5", f"a.x={again}"])
    for text in ("a.x", "'1'", repr(again)):
        assert text in str(caught.value)


@given(st.lists(st.text(alphabet="ab.= é", max_size=8), max_size=4))
def test_any_settings_are_split_or_refused_for_a_person(settings: list[str]) -> None:
    try:
        split = split_settings(settings)
    except UsageError as error:
        assert error.settings
    else:
        assert sum(map(len, split.values())) == len(settings)


# ---- what a class must be ----


@dataclass
class Thawed:
    x: int = 1


@dataclass(frozen=True)
class NoDefault:
    x: int


@dataclass(frozen=True)
class ListField:
    x: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class PartlyReadable:
    x: int | list[int] = 1


@dataclass(frozen=True)
class AnyField:
    x: Any = None


@dataclass(frozen=True)
class Unresolved:
    x: NoSuchType = None  # noqa: F821 (that it cannot be resolved is the test)


@dataclass(frozen=True)
class RefusesItsDefaults:
    x: int = 1

    def __post_init__(self) -> None:
        raise ValueError("never good")


class Plain:
    x: int = 1


@pytest.mark.parametrize(
    ("options", "needs"),
    [
        (Plain, ["frozen dataclass"]),
        (dict, ["frozen dataclass"]),
        (7, ["frozen dataclass", "7"]),
        ("Options", ["frozen dataclass", "Options"]),
        (Options(), ["frozen dataclass"]),
        (Thawed, ["Thawed", "frozen=True"]),
        (NoDefault, ["x", "default"]),
        (ListField, ["x", "list"]),
        (PartlyReadable, ["x", "list"]),
        (AnyField, ["x", "Any"]),
        (Unresolved, ["Unresolved", "NoSuchType"]),
        (RefusesItsDefaults, ["RefusesItsDefaults", "never good"]),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_class_that_cannot_serve_is_refused_with_the_reason(options: object, needs: list[str]) -> None:
    problems = "; ".join(options_problems(options))
    for text in needs:
        assert text in problems


def test_every_wrong_field_is_named() -> None:
    @dataclass(frozen=True)
    class Wrong:
        no_default: int
        no_type: bytes = b""
        good: int = 1

    problems = list(options_problems(Wrong))
    assert len(problems) == 2
    assert "no_default" in problems[0] and "no_type" in problems[1]


def test_a_subclass_of_a_good_class_is_good() -> None:
    @dataclass(frozen=True)
    class More(Options):
        extra: bool = True

    assert list(options_problems(More)) == []
    assert parse_options("fast", More, {"extra": "off", "count": "2"}) == More(extra=False, count=2)


@pytest.mark.parametrize("kind", [dataclass(frozen=True, slots=True), dataclass(frozen=True, kw_only=True)])
def test_slots_and_keywords_are_good(kind: Callable[[type], type]) -> None:
    class Small:
        __annotations__ = {"x": int}
        x = 1

    made = kind(Small)
    assert list(options_problems(made)) == []
    assert parse_options("fast", made, {"x": "2"}).x == 2
