"""Pooling settings of an embedding checkpoint, from sentence-transformers' files.

``modules.json`` lists the modules that run in order. Nothing here imports torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from attnplug import UsageError
from attnplug_engine.settings.pooling import Pooling

MODULES_FILE = "modules.json"
PROMPTS_FILE = "config_sentence_transformers.json"

_MODES = {"lasttoken": Pooling.LAST, "mean": Pooling.MEAN, "cls": Pooling.FIRST}
"""Supported pooling modes of sentence-transformers."""
_MODE_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""Spelling of modes in versions before 5.4."""


@dataclass(frozen=True, slots=True)
class EmbeddingRules:
    """Computation of a checkpoint's embeddings. ``source`` is the file that defines it; None for the default.

    ``prompts`` are texts to put before a prompt, by name; ``default_prompt`` is the name of the default one.
    ``pools_prompt`` is False if a mean leaves out the tokens of that text.
    """

    pooling: Pooling = Pooling.LAST
    normalize: bool = True
    source: str | None = None
    pools_prompt: bool = True
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None

    def prefix(self, name: str | None) -> str:
        """Return the text to put before each prompt: that of ``name``, or the checkpoint's default. Raises UsageError
        if there is none of this name, or if a mean would have to leave it out."""
        name = self.default_prompt if name is None else name
        if name is None:
            return ""
        if name not in self.prompts:
            known = f"it has {', '.join(self.prompts)}" if self.prompts else "it has none"
            raise UsageError(f"the checkpoint has no prompt {name!r} in {PROMPTS_FILE}; {known}")
        prefix = self.prompts[name]
        if prefix and not self.pools_prompt and self.pooling is Pooling.MEAN:
            raise UsageError(
                f"{self.source} requires a mean that leaves out the prompt {prefix!r}, which is not supported; put "
                "another text before your prompts yourself, or use another `pooling`",
                settings=["pooling"],
            )
        return prefix


def read_rules(folder: Path | None, pooling: Pooling | None = None, normalize: bool | None = None) -> EmbeddingRules:
    """Read the rules of a checkpoint's folder, or the defaults if it has none. Arguments take precedence.

    Raises UsageError for what is not supported.
    """
    rules = EmbeddingRules() if folder is None else _read_folder(folder, pooling)
    return replace(
        rules,
        pooling=rules.pooling if pooling is None else pooling,
        normalize=rules.normalize if normalize is None else normalize,
    )


def _read_folder(folder: Path, chosen: Pooling | None) -> EmbeddingRules:
    path = folder / MODULES_FILE
    if not path.is_file():
        return EmbeddingRules()
    pooling, normalize, pools_prompt = None, False, True
    for position, (kind, place) in enumerate(_modules(path)):
        if kind == "Transformer" and position == 0:
            if place:
                raise UsageError(f"{path} puts the model into the folder {place!r}; a model is read from its top only")
        elif kind == "Pooling" and position == 1:
            pooling, pools_prompt = _read_pooling(folder / place / "config.json", chosen)
        elif kind == "Normalize" and position == 2:
            normalize = True
        else:
            raise UsageError(
                f"{path} has the module {kind} at place {position}, which is not supported; supported are Transformer, "
                "Pooling and Normalize, in this order"
            )
    if pooling is None:
        raise UsageError(f"{path} has no module Pooling, so it does not say how hidden states become one vector")
    prompts, default = _read_prompts(folder / PROMPTS_FILE)
    return EmbeddingRules(pooling, normalize, str(path), pools_prompt, prompts, default)


def _modules(path: Path) -> list[tuple[str, str]]:
    """Return class and folder of each module, in order of execution."""
    listed = _read_json(path)
    if not isinstance(listed, list) or not all(isinstance(module, dict) for module in listed):
        raise UsageError(f"{path} is not a list of modules")
    found = []
    for module in listed:
        kind, place = module.get("type"), module.get("path", "")
        if not isinstance(kind, str) or not isinstance(place, str) or Path(place).name != place:
            raise UsageError(
                f"{path} has a module without a 'type' and a 'path' inside the checkpoint: {module!r:.100}"
            )
        found.append((kind.rpartition(".")[2], place))
    return found


def _read_pooling(path: Path, chosen: Pooling | None) -> tuple[Pooling, bool]:
    """Return the pooling, unless one is ``chosen``, and True if a mean includes the tokens of the prefix."""
    config = _read_object(path)
    modes = config.get("pooling_mode")
    if modes is None:
        modes = [mode for key, mode in _MODE_FLAGS.items() if config.get(key)] or ["mean"]
    elif isinstance(modes, str):
        modes = [modes]
    pooling = chosen
    if pooling is None and isinstance(modes, list) and len(modes) == 1:
        pooling = _MODES.get(str(modes[0]))
    if pooling is None:
        given = " and ".join(map(str, modes)) if isinstance(modes, list) else repr(modes)
        raise UsageError(
            f"{path} requires the pooling {given:.100}, which is not supported; supported is one of "
            f"{', '.join(_MODES)}, and --pooling chooses one in its place"
        )
    return pooling, config.get("include_prompt") is not False


def _read_prompts(path: Path) -> tuple[dict[str, str], str | None]:
    if not path.is_file():
        return {}, None
    config = _read_object(path)
    prompts, default = config.get("prompts") or {}, config.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise UsageError(f"{path}: 'prompts' is {prompts!r:.100}; it must be texts by name")
    if default is not None and (not isinstance(default, str) or default not in prompts):
        raise UsageError(f"{path}: 'default_prompt_name' is {default!r:.100}, which is none of its prompts")
    return prompts, default


def _read_object(path: Path) -> dict[str, Any]:
    content = _read_json(path)
    if not isinstance(content, dict):
        raise UsageError(f"{path} is JSON, but not an object")
    return content


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:  # ValueError: not UTF-8, or not JSON
        raise UsageError(f"{path} cannot be read as JSON: {error}") from error
