"""Embedding rules in sentence-transformers' files of a checkpoint: supported ones and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from attnplug import UsageError
from attnplug_engine.checkpoints.pooling import EmbeddingRules, read_rules
from attnplug_engine.settings.pooling import Pooling
from attnplug_testing.errors import naming

TRANSFORMER, POOLING, NORMALIZE = (
    {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
    for index, (kind, path) in enumerate([("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")])
)
DENSE = {"path": "3_Dense", "type": "sentence_transformers.models.Dense"}


@pytest.fixture
def saved(tmp_path: Path):
    def save(modules: Any, pooling: Any = None, prompts: Any = None) -> Path:
        (tmp_path / "1_Pooling").mkdir()
        (tmp_path / "modules.json").write_text(json.dumps(modules))
        (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
        if prompts is not None:
            (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(prompts))
        return tmp_path

    return save


def flags(mode: str) -> dict[str, object]:
    names = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
    return {"word_embedding_dimension": 64, **{f"pooling_mode_{name}": name == mode for name in names}}


@pytest.mark.parametrize(
    ("pooling", "expected"),
    [
        (flags("lasttoken"), Pooling.LAST),
        (flags("mean_tokens"), Pooling.MEAN),
        (flags("cls_token"), Pooling.FIRST),
        ({"pooling_mode": "lasttoken"}, Pooling.LAST),
        ({"pooling_mode": ["cls"]}, Pooling.FIRST),
        ({}, Pooling.MEAN),
    ],
)
def test_the_pooling_is_the_checkpoints(saved, pooling, expected):
    """In the formats of sentence-transformers before and after version 5.4; without a mode the mean is used."""
    folder = saved([TRANSFORMER, POOLING], pooling)
    rules = read_rules(folder)
    assert (rules.pooling, rules.normalize, rules.source) == (expected, False, str(folder / "modules.json"))


def test_a_module_normalises_and_options_go_before_the_checkpoint(saved):
    folder = saved([TRANSFORMER, POOLING, NORMALIZE], flags("lasttoken"))
    assert read_rules(folder).normalize
    chosen = read_rules(folder, Pooling.FIRST, normalize=False)
    assert (chosen.pooling, chosen.normalize) == (Pooling.FIRST, False)


def test_without_files_it_is_the_last_token_normalised(tmp_path):
    assert read_rules(None) == read_rules(tmp_path) == EmbeddingRules(Pooling.LAST, True, None)


@pytest.mark.parametrize(
    ("modules", "pooling", "fragment"),
    [
        ([TRANSFORMER, POOLING], flags("max_tokens"), r"1_Pooling.config\.json requires the pooling max,.*--pooling"),
        ([TRANSFORMER, POOLING], {"pooling_mode": ["mean", "max"]}, "the pooling mean and max"),
        ([TRANSFORMER, POOLING], {"pooling_mode": 3}, "the pooling 3"),
        ([TRANSFORMER, POOLING], [], "not an object"),
        ([TRANSFORMER, POOLING, DENSE], {}, "the module Dense at place 2"),
        ([TRANSFORMER, NORMALIZE, POOLING], {}, "the module Normalize at place 1"),
        ([TRANSFORMER], {}, "no module Pooling"),
        ([{**TRANSFORMER, "path": "0_Transformer"}, POOLING], {}, "the folder '0_Transformer'"),
        ([TRANSFORMER, {**POOLING, "path": "../elsewhere"}], {}, "'path' inside the checkpoint"),
        ({}, {}, "not a list of modules"),
        ([3], {}, "not a list of modules"),
    ],
)
def test_what_is_not_served_is_refused_by_name(saved, modules, pooling, fragment):
    with pytest.raises(UsageError, match=fragment):
        read_rules(saved(modules, pooling))


def test_a_pooling_that_is_not_served_can_be_replaced(saved):
    assert read_rules(saved([TRANSFORMER, POOLING], flags("max_tokens")), Pooling.MEAN).pooling is Pooling.MEAN


def test_a_file_that_is_not_json_is_named(saved):
    folder = saved([TRANSFORMER, POOLING], {})
    (folder / "1_Pooling" / "config.json").write_text("{")
    with pytest.raises(UsageError, check=naming("config.json")):
        read_rules(folder)


PROMPTS = {"prompts": {"query": "Query: ", "document": ""}, "default_prompt_name": None}


@pytest.mark.parametrize(("default", "unasked"), [(None, ""), ("query", "Query: ")])
def test_a_named_prompt_goes_before_texts_and_the_default_one_without_asking(saved, default, unasked):
    rules = read_rules(saved([TRANSFORMER, POOLING], {}, {**PROMPTS, "default_prompt_name": default}))
    assert [rules.prefix(name) for name in ("query", "document", None)] == ["Query: ", "", unasked]
    with pytest.raises(UsageError, check=naming("quary", "query", "document")):
        rules.prefix("quary")


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"default_prompt_name": "other"}, "default_prompt_name"),
        ({"default_prompt_name": ["query"]}, "default_prompt_name"),
        ({"prompts": ["query"]}, "prompts"),
    ],
)
def test_prompts_that_cannot_be_read_are_an_error(saved, changes, key):
    with pytest.raises(UsageError, check=naming(key)):
        read_rules(saved([TRANSFORMER, POOLING], {}, {**PROMPTS, **changes}))
