"""The bridge checked against SGLang's own sources, at both ends of the supported range: imports exist, attributes have
the names that the bridge reads, and SGLang's calls match the bridge's signatures.

The sources are read, not imported, since SGLang needs a GPU's packages. The bridge's checks in a real SGLang show that
it runs.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from sglang_fakes import Mode

ROOT = Path(__file__).resolve().parents[3]
SOURCE = Path(__file__).resolve().parents[1] / "src" / "attnplug_sglang"
(VERSIONS,) = re.findall(r"^SGLANG := (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
ENDS = VERSIONS.split()

UNUSED = {
    # Not ours to offer: another way to plan, or for another kind of model.
    "forward",
    "forward_mixed",  # NPU
    "get_fused_kv_write_buffers",
    "get_verify_buffers_to_fill_after_draft",
    "glue_draft_metadata",
    "glue_target_verify_metadata",
    "draft_extend_metadata_captured_in_graph",
    "init_forward_metadata_for_breakable_cuda_graph_capture",
    "late_layer_num_tokens",
    "on_after_cuda_graph_warmup",
    "prepare_forward_metadata_for_breakable_cuda_graph_replay",
    "prepare_full_cuda_graph_chunked_prefix",
    "resolve_prefill_shared_read_ends",
    "shared_read_ends",
    "validate_elastic_cuda_graph_recapture",
    "verify_mask",
}
"""Members of SGLang's base class whose default is right for this bridge. Other members are not reviewed."""


@pytest.fixture(params=ENDS)
def sglang(request: pytest.FixtureRequest) -> Path:
    root = ROOT / ".venv" / "sglang" / request.param
    if not root.exists():
        pytest.skip(f"{root} is not there; make test unpacks it")
    return root


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def module(root: Path, name: str) -> Path:
    path = root.joinpath(*name.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def named(body: list[ast.stmt]) -> Iterator[str]:
    """Names that a module or class body defines or imports."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
        elif isinstance(node, ast.If | ast.Try):
            yield from named(node.body)


def class_of(root: Path, where: str, name: str) -> ast.ClassDef:
    (found,) = (node for node in tree(module(root, where)).body if isinstance(node, ast.ClassDef) and node.name == name)
    return found


def methods(of: ast.ClassDef) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in of.body if isinstance(node, ast.FunctionDef)}


def own_class() -> ast.ClassDef:
    (found,) = (
        node
        for node in tree(SOURCE / "backend.py").body
        if isinstance(node, ast.ClassDef) and node.name == "AttnplugBackend"
    )
    return found


def signature(function: ast.FunctionDef) -> inspect.Signature:
    """Signature of a parsed function: names, kinds and presence of defaults."""
    given, kinds, parameters = function.args, inspect.Parameter, list[inspect.Parameter]()
    bare = len(given.args) - len(given.defaults)
    for number, argument in enumerate(given.args):
        default = kinds.empty if number < bare else None
        parameters.append(kinds(argument.arg, kinds.POSITIONAL_OR_KEYWORD, default=default))
    parameters += [kinds(argument.arg, kinds.KEYWORD_ONLY, default=None) for argument in given.kwonlyargs]
    if given.kwarg is not None:
        parameters.append(kinds(given.kwarg.arg, kinds.VAR_KEYWORD))
    return inspect.Signature(parameters)


def imports() -> Iterator[tuple[str, str]]:
    """Every name that the bridge imports from SGLang."""
    for path in SOURCE.glob("*.py"):
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.startswith("sglang."):
                yield from ((node.module, alias.name) for alias in node.names)


MOVED = "add_chunked_prefix_cache_attention_backend"
PROBED = {MOVED, "resolved_view"}
"""Not in every version, or not in the same place; the bridge does without, or looks in both."""


def test_every_import_is_there(sglang: Path) -> None:
    for where, name in imports():
        if name in PROBED:
            continue
        path = module(sglang, where)
        found = set(named(tree(path).body)) if path.exists() else set()
        assert name in found or module(sglang, f"{where}.{name}").exists(), f"{where}.{name}"


def test_the_list_of_backends_with_chunks_is_in_one_of_two_places(sglang: Path) -> None:
    places = [where for where, name in imports() if name == MOVED]
    assert len(places) == 2
    assert any(MOVED in named(tree(module(sglang, where)).body) for where in places)


def test_the_newest_sglang_keeps_decisions_apart_from_arguments() -> None:
    newest = ROOT / ".venv" / "sglang" / ENDS[-1]
    if not newest.exists():
        pytest.skip(f"{newest} is not there; make test unpacks it")
    assert "resolved_view" in named(tree(module(newest, "sglang.srt.arg_groups.overrides")).body)


def test_every_method_that_sglang_calls_can_be_called_so(sglang: Path) -> None:
    theirs = methods(class_of(sglang, "sglang.srt.layers.attention.base_attn_backend", "AttentionBackend"))
    for name, function in methods(own_class()).items():
        if name.startswith("_") or name not in theirs:
            continue
        called = signature(theirs[name])
        ours = signature(function)
        for parameters in (
            list(called.parameters.values()),
            [p for p in called.parameters.values() if p.default is p.empty],
        ):
            positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
            assert ours.bind(*positional)
            assert ours.bind(**dict.fromkeys(positional))


def test_every_member_of_sglangs_base_class_was_looked_at(sglang: Path) -> None:
    theirs = methods(class_of(sglang, "sglang.srt.layers.attention.base_attn_backend", "AttentionBackend"))
    unknown = {name for name in theirs if not name.startswith("_")} - set(methods(own_class())) - UNUSED
    assert not unknown


def test_the_hook_for_chunks_is_called_with_the_batch(sglang: Path) -> None:
    """A4, A8: SGLang looks for it by name, and its wrappers pass a second argument on."""
    hook = signature(methods(own_class())["init_mha_chunk_metadata"])
    assert hook.bind("self", "forward_batch")
    assert hook.bind("self", "forward_batch", True)
    where = "sglang.srt.models.deepseek_common.attention_forward_methods.forward_mha"
    assert "init_mha_chunk_metadata(forward_batch)" in module(sglang, where).read_text()


def test_modes_are_those_that_planning_knows_or_refuses(sglang: Path) -> None:
    theirs = set(named(class_of(sglang, "sglang.srt.model_executor.forward_batch_info", "ForwardMode").body))
    assert set(Mode.__members__) <= theirs | {"SPLIT_PREFILL"}


def test_fields_of_a_batch_have_their_names(sglang: Path) -> None:
    fields = set(named(class_of(sglang, "sglang.srt.model_executor.forward_batch_info", "ForwardBatch").body))
    where = "sglang.srt.model_executor.forward_batch_deepseek_mha_mixin"
    fields |= set(named(class_of(sglang, where, "ForwardBatchDeepSeekMHAMixin").body))
    read = {
        match
        for name in ("planning.py", "mla_prefill.py", "backend.py")
        for match in re.findall(r"\b(?:forward_)?batch\.([a-z_]+)", (SOURCE / name).read_text())
    }
    ours = {"geometry"}  # our own batch
    assert read - ours - fields == set()


def test_attributes_of_a_layer_have_their_names(sglang: Path) -> None:
    text = module(sglang, "sglang.srt.layers.radix_attention").read_text()
    read = {
        match
        for name in ("layers.py", "backend.py", "build.py")
        for match in re.findall(r"\b(?:module|layer)\.([a-z_]+)", (SOURCE / name).read_text())
    }
    ours = {"children", "sliding_window"}
    missing = {name for name in read - ours if f"self.{name} = " not in text}
    assert missing == set()


def test_attributes_of_a_model_runner_have_their_names(sglang: Path) -> None:
    text = module(sglang, "sglang.srt.model_executor.model_runner").read_text()
    more = sglang / "sglang" / "srt" / "model_executor"
    text += "".join(path.read_text() for path in sorted(more.glob("model_runner_*.py")))
    read = set(
        re.findall(r"\brunner\.([a-z_]+)", (SOURCE / "build.py").read_text() + (SOURCE / "backend.py").read_text())
    )
    missing = {name for name in read if not re.search(rf"self\.{name}\b|def {name}\b|\b{name}:", text)}
    assert missing == set()


def test_arguments_have_their_names(sglang: Path) -> None:
    folder = sglang / "sglang" / "srt"
    text = (folder / "server_args.py").read_text() + "".join(
        path.read_text() for path in sorted((folder / "arg_groups").rglob("*.py"))
    )
    read = set(
        re.findall(r"\barguments\.([a-z_]+)", "".join((SOURCE / n).read_text() for n in ("build.py", "server_args.py")))
    )
    missing = {name for name in read if not re.search(rf"^ +{name}: ", text, re.MULTILINE)}
    assert missing == set()


def test_an_argument_that_is_refused_exists_in_some_version() -> None:
    roots = [ROOT / ".venv" / "sglang" / version for version in ENDS]
    if not all(root.exists() for root in roots):
        pytest.skip("make test unpacks SGLang")
    text = "".join(
        path.read_text()
        for root in roots
        for path in [root / "sglang/srt/server_args.py", *(root / "sglang/srt/arg_groups").rglob("*.py")]
    )
    read = set(re.findall(r'given\("([a-z_]+)"\)', (SOURCE / "selection.py").read_text())) | {
        "dcp_size",
        "attn_cp_size",
    }
    assert {name for name in read if not re.search(rf"^ +{name}: ", text, re.MULTILINE)} == set()


def test_what_verifies_trees_says_so(sglang: Path) -> None:
    """Verified batches have the fields and properties from which trees are read."""
    own = class_of(sglang, "sglang.srt.speculative.eagle_info", "EagleVerifyInput")
    assert {"tree_topk", "draft_token_num", "custom_mask"} <= set(named(own.body))
    tree_modes = module(sglang, "sglang.srt.speculative.eagle_utils").read_text()
    on_cpu = "TreeMaskMode.QLEN_ONLY if _is_cpu else TreeMaskMode.FULL_MASK"
    assert on_cpu in tree_modes or "is_cpu" not in tree_modes, "0.5.14 does not speculate on a CPU"


DEEPSEEK = "sglang.srt.models.deepseek_common"
ABSORBED = f"{DEEPSEEK}.attention_forward_methods.forward_mla"
DSA = "sglang.srt.layers.attention.dsa"


def test_the_indexer_finds_what_it_reads_of_a_batch(sglang: Path) -> None:
    """A10: members of SGLang's base class, further members that its indexer reads, and the call for selected rows."""
    homes = [module(sglang, f"{DSA}.{name}") for name in ("dsa_indexer_metadata", "dsa_indexer")]
    (base,) = (
        node
        for home in homes
        if home.exists()
        for node in tree(home).body
        if isinstance(node, ast.ClassDef) and node.name == "BaseIndexerMetadata"
    )
    (own,) = (node for node in tree(SOURCE / "sparse.py").body if getattr(node, "name", None) == "IndexerMetadata")
    assert isinstance(own, ast.ClassDef)
    have = set(named(own.body))
    assert set(methods(base)) <= have
    text = homes[-1].read_text()
    read = set(re.findall(r"(?<![a-z_])metadata\.([a-z_0-9]+)", text)) | set(
        re.findall(r'getattr\(metadata, "([a-z_0-9]+)"', text)
    )
    assert read <= have
    assert set(re.findall(r"metadata\.attn_metadata\.([a-z_]+)", text)) <= have
    select = methods(class_of(sglang, f"{DSA}.dsa_topk_backend", "DSATopKBackend"))["topk_func"]
    assert signature(select).bind("self", "logits", "lengths", "topk", row_starts="ks")


def test_sparse_layers_pass_on_what_was_selected(sglang: Path) -> None:
    text = module(sglang, ABSORBED).read_text()
    assert "**(dict(topk_indices=topk_indices) if topk_indices is not None else {})" in text
    pools = module(sglang, "sglang.srt.mem_cache.memory_pool").read_text()
    assert "self.dsa_kv_cache_store_fp8 = " in pools


LIST = "FORWARD_ABSORB_CORE_ATTENTION_BACKENDS"


def test_backends_of_a_list_get_queries_and_rows_in_two_parts(sglang: Path) -> None:
    """The list has these uses only, so the bridge may add its backends. If this fails, look at SGLang's new uses."""
    assert f"{LIST} = [" in module(sglang, f"{DEEPSEEK}.utils").read_text()
    core = methods(class_of(sglang, ABSORBED, "DeepseekMLAForwardMixin"))["forward_absorb_core"]
    (parts,) = (
        node
        for node in core.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == f"self.current_attention_backend in {LIST}"
    )
    given, joined = ("\n".join(map(ast.unparse, body)) for body in (parts.body, parts.orelse))
    assert "self.attn_mqa(q_nope_out, k_nope, k_nope, forward_batch, q_rope=q_pe, k_rope=k_pe, **extra_args" in given
    assert "torch.cat([q_nope_out, q_pe], dim=-1)" in joined and "q *= llama_4_scaling" in joined
    assert "self.llama_4_scaling_config = " in module(sglang, "sglang.srt.models.deepseek_v2").read_text()
    uses = {
        (path.stem, function.name)
        for path in (sglang / "sglang" / "srt").rglob("*.py")
        if LIST in path.read_text()
        for function in ast.walk(tree(path))
        if isinstance(function, ast.FunctionDef) and LIST in ast.unparse(function)
    }
    newer = {
        ("forward_mla", "_can_fuse_bmm_into_attention"),
        ("forward_mla", "_q8kv8_born_fp8_q_backend"),
        ("forward_mla_rocm", "_can_fuse_bmm_rope_cat_and_cache"),
        ("forward_mla_rocm", "forward_absorb_rocm_prepare"),
        ("forward_mla_rocm", "forward_absorb_rocm_core"),
    }
    older = {("forward_mla", "_skip_rope_for_aiter_fused_mla")}  # of ROCm
    assert uses == {("forward_mla", "forward_absorb_core")} | (older if sglang.name == ENDS[0] else newer)


def test_rows_in_two_parts_are_written_by_every_pool_of_mla(sglang: Path) -> None:
    for name in ("MLATokenToKVPool", "HybridLinearKVPool"):
        own = methods(class_of(sglang, "sglang.srt.mem_cache.memory_pool", name))["set_mla_kv_buffer"]
        assert signature(own).bind("self", "layer", "out_cache_loc", "k", "k_rope")
    call = "self.token_to_kv_pool.set_mla_kv_buffer("
    assert call in module(sglang, "sglang.srt.layers.attention.flashinfer_mla_backend").read_text()


def test_decode_context_parallelism_is_for_sglangs_own_backends(sglang: Path) -> None:
    """``--dcp-size`` is refused for this reason. If this fails, SGLang has changed and may support other backends."""
    attention = sglang / "sglang" / "srt" / "layers" / "attention"
    if sglang.name == ENDS[0]:
        arguments = (sglang / "sglang" / "srt" / "server_args.py").read_text()
        assert not re.search("^ +dcp_size: ", arguments, re.MULTILINE), "0.5.14 has none"
        return
    groups = module(sglang, "sglang.srt.distributed.parallel_state").read_text()
    (condition,) = re.findall(r"if decode_context_parallel_size > 1 and not \(\s+(.+)\s+\):", groups)
    assert condition == "is_hip() or is_cuda() or _is_npu or _is_xpu", "not on a CPU"
    mha = [path.stem for path in attention.glob("*_backend.py") if "cp_lse_ag_out_rs_mha" in path.read_text()]
    assert "triton_backend" in mha, "MHA is gathered and merged inside each backend"
    text = module(sglang, ABSORBED).read_text()
    core = text.split("def forward_absorb_core")[1].split("# correct attn_output")[0]
    (others,) = core.split("        else:\n            q = torch.cat([q_nope_out, q_pe]")[1:]
    assert ", lse = " in core and ", lse = " not in others, "MLA's results are merged for backends of a list only"


def test_pools_have_their_shape(sglang: Path) -> None:
    pools = module(sglang, "sglang.srt.mem_cache.memory_pool").read_text()
    assert "self.size + self.page_size" in pools or "size + page_size" in pools
    for name in ("MHATokenToKVPool", "MLATokenToKVPool"):
        own = methods(class_of(sglang, "sglang.srt.mem_cache.memory_pool", name))
        assert {"get_key_buffer", "get_value_buffer"} <= set(own)
    assert "layers_mapping" in module(sglang, "sglang.srt.mem_cache.swa_memory_pool").read_text()
