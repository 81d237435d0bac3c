"""The bridge's uses of transformers, checked against its sources at both ends of the supported range.

Sources of both ends are unpacked beside the installed version and are read without being imported.
"""

from __future__ import annotations

import ast
import inspect
import re
from functools import cache
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from transformers.cache_utils import Cache

from attnplug.host import BackendRequest
from attnplug_testing.signatures import installed, unpacked
from attnplug_transformers.attention import AttentionFunction
from attnplug_transformers.cache import PagedCache, PagedLayer
from attnplug_transformers.layer_call import _IGNORED
from attnplug_transformers.masks import step_mask
from attnplug_transformers.paged_attention import PAGED_ARGUMENTS
from attnplug_transformers_host import HOST

ROOT = Path(__file__).resolve().parents[3]
((OLDEST, NEWEST),) = re.findall(r"^TRANSFORMERS := (\S+) (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
FOLDERS = {version: unpacked("transformers", version) for version in (OLDEST, NEWEST)}
FOLDERS["installed"] = installed("transformers")
BATCHING = "generation/continuous_batching"


@pytest.fixture(params=FOLDERS)
def folder(request):
    found = FOLDERS[request.param]
    if found is None:
        pytest.skip(f"no transformers {request.param} unpacked in .venv; make test does it")
    return found / "transformers"


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def definition(path: Path, *names: str) -> ast.AST:
    """A class or function of a module, or one inside another."""
    found: ast.AST = tree(path)
    for name in names:
        (found,) = (node for node in ast.iter_child_nodes(found) if getattr(node, "name", None) == name)
    return found


def arguments(path: Path, *names: str) -> list[str]:
    function = definition(path, *names)
    assert isinstance(function, ast.FunctionDef)
    return [argument.arg for argument in function.args.args]


def calls(path: Path, name: str) -> list[ast.Call]:
    return [
        node
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name
    ]


def test_the_range_begins_where_its_lower_end_is_tested():
    assert str(min(Version(part.version) for part in SpecifierSet(HOST.versions))) == OLDEST.removesuffix(".0")


def test_models_make_their_masks_as_ours_is_called(folder):
    made = calls(folder / "masking_utils.py", "mask_interface")
    assert made
    read = [name for name, p in inspect.signature(step_mask).parameters.items() if p.kind is not p.VAR_KEYWORD]
    for call in made:
        assert not call.args
        assert set(read) <= {keyword.arg for keyword in call.keywords}


def test_causal_masks_and_windows_are_made_of_the_same_functions(folder):
    for name in ("and_masks", "causal_mask_function", "sliding_window_overlay", "sliding_window_causal_mask_function"):
        here, there = (
            ast.unparse(definition(root / "masking_utils.py", name))
            for root in (folder, FOLDERS["installed"] / "transformers")
        )
        assert here == there


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "gpt_oss", "deepseek_v3"])
def test_layers_call_attention_as_ours_is_called(folder, name):
    (call,) = calls(folder / f"models/{name}/modeling_{name}.py", "attention_interface")
    signature = inspect.signature(AttentionFunction(BackendRequest()).__call__)
    named = {keyword.arg: ... for keyword in call.keywords if keyword.arg is not None}
    bound = signature.bind(*call.args, **named).arguments
    assert set(bound) >= {"module", "query", "key", "value", "attention_mask", "dropout", "scaling"}
    assert set(bound.get("others", ())) <= _IGNORED | {"softcap", "s_aux"}


def test_what_continuous_batching_passes_is_known(folder):
    passed = {
        node.target.id
        for node in definition(folder / BATCHING / "input_outputs.py", "PagedAttentionArgs").body
        if isinstance(node, ast.AnnAssign)
    }
    taken_by_models = {"input_ids", "attention_mask"}
    assert passed <= PAGED_ARGUMENTS | _IGNORED | taken_by_models
    assert {"cache", "cu_seq_lens_q", "cu_seq_lens_k", "read_index", "write_index"} <= passed


def test_blocks_are_read_in_one_of_two_forms(folder):
    path = folder / BATCHING / "cache.py"
    update = arguments(path, "PagedAttentionCache", "update")
    held = {
        node.attr
        for node in ast.walk(definition(path, "PagedAttentionCache"))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    }
    assert "max_batch_tokens" in held
    if "layer_to_allocator" not in held:
        assert update == ["self", "key_states", "value_states", "layer_idx", "read_index", "write_index"]
        assert {"key_cache", "value_cache", "block_size", "sliding_windows", "layer_index_to_group_indices"} <= held
        return
    assert update == ["self", "key_states", "value_states", "layer_idx", "kwargs"]
    allocators = folder / BATCHING / "cache_allocators"
    text = (allocators / "cache_allocator.py").read_text() + (allocators / "full_attention.py").read_text()
    for name in ("index", "layer_indices", "tokens_per_page", "block_physical_stride"):
        assert f"self.{name} = " in text
    full = allocators / "full_attention.py", "FullAttentionCacheAllocator"
    assert arguments(*full, "get_cache_for_block_table") == ["self", "layer_idx"]


def test_names_are_registered_as_we_do(folder):
    assert arguments(folder / "utils/generic.py", "GeneralInterface", "register") == ["cls", "key", "value"]
    assert "_attn_implementation" in (folder / "configuration_utils.py").read_text()
    model = folder / "modeling_utils.py", "PreTrainedModel"
    assert arguments(*model, "_can_set_attn_implementation") == ["cls"]
    assert arguments(*model, "get_correct_attn_implementation")[:2] == ["self", "requested_attention"]


def test_our_cache_overrides_what_transformers_calls(folder):
    path = folder / "cache_utils.py"
    for owner, own in (("CacheLayerMixin", PagedLayer), ("Cache", PagedCache), ("DynamicLayer", PagedLayer)):
        theirs = {n.name: n for n in definition(path, owner).body if isinstance(n, ast.FunctionDef)}
        for name in set(theirs) & set(vars(own)) - {"__init__"}:
            mine = inspect.signature(vars(own)[name])
            assert list(mine.parameters)[: len(theirs[name].args.args)] == [a.arg for a in theirs[name].args.args], name
    abstract = {
        node.name
        for node in definition(path, "CacheLayerMixin").body
        if isinstance(node, ast.FunctionDef) and any("abstractmethod" in ast.unparse(d) for d in node.decorator_list)
    }
    assert abstract <= set(vars(PagedLayer))
    assert issubclass(PagedCache, Cache)
