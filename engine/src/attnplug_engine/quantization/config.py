"""Schemes of a checkpoint's modules, from its ``quantization_config`` or ``compression_config``."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from attnplug.hf.config_keys import Config
from attnplug_engine.checkpoints.safetensors import quantization_key
from attnplug_engine.quantization.fp8 import Fp8Blocks, Fp8Channels
from attnplug_engine.quantization.int4 import Int4Groups
from attnplug_engine.quantization.mxfp4 import Mxfp4
from attnplug_engine.quantization.scheme import Scheme, WeightFormat

SCHEMES: tuple[type[Scheme], ...] = (Fp8Blocks, Fp8Channels, Int4Groups, Mxfp4)
"""Known schemes. To add one, write its module, and its name here."""

_COMPRESSED = "compressed-tensors"
_EXPRESSION, _CLASS = "re:", "Linear"
_BOUNDARY = r"(?:(?<=\.)|(?=\.|$))"
Matches = Callable[[str], bool]


@dataclass(frozen=True, slots=True)
class Rule:
    """Modules, by name, that are stored in one of ``schemes``."""

    matches: Matches
    schemes: tuple[Scheme, ...]


@dataclass(frozen=True, slots=True)
class Quantization:
    """Schemes of a checkpoint's modules. The first rule that matches applies; ``ignored`` modules are not quantized."""

    rules: tuple[Rule, ...]
    ignored: Matches

    @property
    def code_names(self) -> frozenset[str]:
        """Names of the codes in all schemes."""
        return frozenset(scheme.code_name for rule in self.rules for scheme in rule.schemes)

    def schemes(self, *names: str) -> tuple[Scheme, ...]:
        """Return the schemes that the weight of a module may have, which has one or several ``names``."""
        if any(map(self.ignored, names)):
            return ()
        return next((rule.schemes for rule in self.rules if any(map(rule.matches, names))), ())


def read_quantization(values: Mapping[str, object], source: str) -> Quantization | None:
    """Return the quantization that a config describes; None for none. Raises ModelConfigError for unknown schemes."""
    config, key = Config(values, source, str(values.get("model_type"))), quantization_key(values)
    section = None if key is None else config.section(key)
    if section is None:
        return None
    method = section.optional_text("quant_method")
    if method == _COMPRESSED:
        return _compressed(section)
    schemes = _recognised(WeightFormat(str(method), "", section))
    if not schemes:
        raise section.wrong("quant_method", _known())
    return Quantization((Rule(lambda module: True, schemes),), _excluded(section))


def _compressed(section: Config) -> Quantization:
    sparsity, transforms = section.section("sparsity_config"), section.section("transform_config")
    if sparsity is not None and sparsity.lookup("format") not in (None, "dense"):
        raise sparsity.wrong("format", "'dense': sparse weights are not supported")
    if transforms is not None and transforms.lookup("config_groups"):
        raise transforms.wrong("config_groups", "empty: weights that are transformed (rotated) are not supported")
    groups, common = section.section("config_groups"), section.optional_text("format")
    if groups is None or not groups.values:
        if section.section("kv_cache_scheme") is not None:
            return Quantization((), _any([]))  # only the cache is quantized
        raise section.wrong("config_groups", "an object with the weights of each group")
    rules = {}
    for name in groups.values:
        group = groups.section(name)
        if group is None or "weights" not in group.values:
            raise groups.wrong(name, "an object with 'weights' and 'targets'")
        if (weights := group.section("weights")) is None:
            continue  # only activations are quantized, such as those of attention
        own = group.optional_text("format") or common or ""
        schemes = _recognised(WeightFormat(_COMPRESSED, own, weights))
        if not schemes:
            holder = group if group.optional_text("format") else section
            if own == "float-quantized":
                raise weights.wrong("strategy", "'tensor', 'channel' or 'block'")
            raise holder.wrong("format", _known())
        for entry in group.sequence("targets") or (_CLASS,):
            matches = _pattern(group, "targets", entry)
            rules[str(entry)] = Rule(matches, schemes)
    # As in compressed-tensors, names precede expressions, and expressions the class.
    order = sorted(rules, key=lambda entry: (entry == _CLASS, entry.startswith(_EXPRESSION), entry))
    ignored = _any([_pattern(section, "ignore", entry) for entry in section.sequence("ignore") or ()])
    return Quantization(tuple(rules[entry] for entry in order), ignored)


def _recognised(described: WeightFormat) -> tuple[Scheme, ...]:
    found = (scheme.recognise(described) for scheme in SCHEMES)
    return tuple(scheme for scheme in found if scheme is not None)


def _known() -> str:
    return "one of the known schemes: " + "; ".join(scheme.title.replace("`", "'") for scheme in SCHEMES)


def _any(patterns: list[Matches]) -> Matches:
    return lambda module: any(pattern(module) for pattern in patterns)


def _pattern(section: Config, key: str, entry: object) -> Matches:
    """Return the predicate of a compressed-tensors pattern: ``re:`` and a regular expression, a module's name, or a
    class name. All modules that the engine loads are ``Linear``."""
    if not isinstance(entry, str):
        raise section.wrong(key, "a list of names")
    if entry.startswith(_EXPRESSION):
        expression = _expression(section, key, entry.removeprefix(_EXPRESSION))
        return lambda module: expression.match(module) is not None
    return lambda module: entry in (_CLASS, module)


def _excluded(section: Config) -> Matches:
    """Return the predicate of ``modules_to_not_convert``, as in transformers: a regular expression for the beginning
    of a name up to a dot, or the end of a name."""
    entries = section.sequence("modules_to_not_convert") or ()
    patterns: list[Matches] = []
    for entry in entries:
        if not isinstance(entry, str):
            raise section.wrong("modules_to_not_convert", "a list of names")
        _expression(section, "modules_to_not_convert", entry)  # so that an error shows what the config has
        expression = re.compile(f"(?:{entry}){_BOUNDARY}")
        patterns.append(_prefix_or_suffix(expression, entry))
    return _any(patterns)


def _prefix_or_suffix(prefix: re.Pattern[str], suffix: str) -> Matches:
    return lambda module: prefix.match(module) is not None or module.endswith(suffix)


def _expression(section: Config, key: str, text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise section.error(f"has {text!r}, which is not a regular expression: {error}", key) from error
