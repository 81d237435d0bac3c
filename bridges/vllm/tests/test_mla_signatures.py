"""MLA calls in both directions and metadata fields, checked against vLLM's sources at both ends of the range."""

from __future__ import annotations

import ast
import re

import pytest

from attnplug_vllm.host import index_is_ours
from vllm_sources import VERSIONS, Sources, ours, takes_what_is_given

COMMON = "vllm.model_executor.layers.attention.mla_attention"
PREFILL = "vllm.v1.attention.backends.mla.prefill.base"
BACKEND = "vllm.v1.attention.backend"
BASES = {
    "AttnplugMLABackend": ((COMMON, "MLACommonBackend"), (BACKEND, "AttentionBackend")),
    "AttnplugMLAImpl": ((COMMON, "MLACommonImpl"), (BACKEND, "MLAAttentionImpl")),
    "AttnplugCPUMLAImpl": ((BACKEND, "MLAAttentionImpl"),),
    "AttnplugMLABuilder": ((COMMON, "MLACommonMetadataBuilder"),),
    "AttnplugMLAPrefill": ((PREFILL, "MLAPrefillBackend"),),
}
SPARSE = "vllm.model_executor.layers.attention.sparse_mla_attention"
SPARSE_BASES = {
    "AttnplugSparseMLABackend": ((BACKEND, "AttentionBackend"),),
    "AttnplugSparseMLAImpl": ((BACKEND, "MLAAttentionImpl"),),
    "AttnplugSparseMLABuilder": ((SPARSE, "SparseMLACommonMetadataBuilder"), (BACKEND, "AttentionMetadataBuilder")),
}
BY_NAME = {"_build_decode", "run_prefill_context_chunk"}
"""Methods that vLLM calls with keywords only."""
CONSTRUCTORS = {("AttnplugMLAImpl", "__init__"), ("AttnplugMLABuilder", "__init__")}


@pytest.fixture(params=VERSIONS)
def vllm(request: pytest.FixtureRequest) -> Sources:
    return Sources.of(request.param)


@pytest.mark.parametrize("name", BASES)
def test_our_methods_take_what_vllm_gives(vllm, name):
    mine, common = ours("mla", name).methods, set()
    for module, base in BASES[name]:
        theirs = vllm.klass(module, base).methods
        for method in (mine.keys() & theirs.keys()) - BY_NAME:
            if (name, method) not in CONSTRUCTORS:
                takes_what_is_given(mine[method], theirs[method])
            common.add(method)
    assert common


@pytest.mark.parametrize("name", SPARSE_BASES)
def test_our_methods_of_sparse_mla_take_what_vllm_gives(vllm, name):
    mine, common = ours("sparse_mla", name).methods, set()
    for module, base in SPARSE_BASES[name]:
        theirs = vllm.klass(module, base).methods
        for method in (mine.keys() & theirs.keys()) - {"__init__"}:
            takes_what_is_given(mine[method], theirs[method])
            common.add(method)
    assert common


def test_sparse_layers_are_constructed_as_vllm_does_it(vllm):
    theirs = vllm.klass(SPARSE, "SparseMLACommonImpl").methods["__init__"]
    ours("sparse_mla", "AttnplugSparseMLAImpl").methods["__init__"].bind(**dict.fromkeys(theirs.parameters))
    rest = [name for name, one in list(theirs.parameters.items())[10:] if one.default is one.empty]
    theirs.bind(*[...] * 10, **dict.fromkeys(rest))
    builder = vllm.klass(SPARSE, "SparseMLACommonMetadataBuilder").methods
    assert builder["__init__"].bind(..., ..., ..., ...) and builder["build"].bind(..., ..., ...)


INDEX = "vllm.model_executor.layers.sparse_attn_indexer"
INDEX_BASES = {
    "AttnplugSparseIndexer": ((INDEX, "SparseAttnIndexer"),),
    "IndexCache": (("vllm.model_executor.layers.attention_layer_base", "AttentionLayerBase"),),
    "IndexBackend": (("vllm.v1.attention.backends.mla.indexer", "DeepseekV32IndexerBackend"),),
    "IndexMetadataBuilder": ((BACKEND, "AttentionMetadataBuilder"),),
}
FIRST = VERSIONS[:1]
"""The version in which our index can replace vLLM's."""


@pytest.mark.parametrize("version", FIRST)
@pytest.mark.parametrize("name", INDEX_BASES)
def test_our_methods_of_the_index_take_what_vllm_gives(version, name):
    mine, common = ours("indexer", name).methods, set()
    for module, base in INDEX_BASES[name]:
        theirs = Sources.of(version).klass(module, base).methods
        for method in (mine.keys() & theirs.keys()) - {"__init__"}:
            takes_what_is_given(mine[method], theirs[method])
            common.add(method)
    assert common


@pytest.mark.parametrize("version", FIRST)
@pytest.mark.parametrize("name", ["IndexCache", "IndexMetadataBuilder"])
def test_classes_of_the_index_define_what_vllm_leaves_open(version, name):
    ((module, base),) = INDEX_BASES[name]
    methods = [node for node in Sources.of(version).klass(module, base).node.body if isinstance(node, ast.FunctionDef)]
    left_open = {node.name for node in methods if "abstractmethod" in map(ast.unparse, node.decorator_list)}
    assert left_open and left_open <= ours("indexer", name).methods.keys()


@pytest.mark.parametrize("version", VERSIONS)
def test_models_call_the_indexer_as_a_layer_where_we_replace_it(version):
    """Later versions call its kernels."""
    vllm, name = Sources.of(version), "self.indexer_op"
    registry = vllm.file("vllm.model_executor.models.registry").read_text()
    (home,) = re.findall(r'"DeepseekV32ForCausalLM": \(\s*"([\w.]+)"', registry)
    module = home if home.startswith("vllm.") else f"vllm.model_executor.models.{home}"
    path = vllm.file(module)
    files = path.parent.glob("*.py") if path.name == "__init__.py" else [path]
    calls = [node for file in files for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)]
    assert (name in {ast.unparse(call.func) for call in calls}) is index_is_ours(80, version)
    if not index_is_ours(80, version):
        return
    (made,) = (call for call in calls if ast.unparse(call.func) == "SparseAttnIndexer")
    vllm.klass(INDEX, "SparseAttnIndexer").methods["__init__"].bind(*made.args)
    own = ("k_cache", "head_dim", "topk_indices_buffer")
    assert set(own) <= set(vllm.klass(INDEX, "SparseAttnIndexer").methods["__init__"].parameters)
    ops = vllm.file("vllm.model_executor.custom_op").read_text()
    assert "op_registry_oot[op_name]" in ops and "def register_oot" in ops
    assert "ALWAYS" in vllm.klass(BACKEND, "AttentionCGSupport").members | _constants(vllm, "AttentionCGSupport")


def _constants(vllm: Sources, name: str) -> set[str]:
    nodes = vllm.klass(BACKEND, name).node.body
    return {target.id for node in nodes if isinstance(node, ast.Assign) for target in node.targets}  # type: ignore[attr-defined]


def test_sparse_steps_have_what_vllms_layer_reads(vllm):
    """vLLM's builder passes all of it to ``metadata_cls`` by name."""
    text = vllm.file(SPARSE).read_text()
    (call,) = (node for node in ast.walk(ast.parse(text)) if _calls(node, "metadata_cls"))
    assert not call.args
    assert {"num_decodes", "num_prefills", "num_decode_tokens"} <= {keyword.arg for keyword in call.keywords}
    assert "topk_indices_buffer" in text


@pytest.mark.parametrize("method", sorted(BY_NAME))
def test_what_is_called_by_name_takes_the_names_that_are_given(vllm, method):
    name = "AttnplugMLABuilder" if method == "_build_decode" else "AttnplugMLAPrefill"
    calls = [call for call in ast.walk(ast.parse(vllm.file(COMMON).read_text())) if _calls(call, method)]
    assert calls
    for call in calls:
        assert not call.args
        ours("mla", name).methods[method].bind(**{keyword.arg: ... for keyword in call.keywords})


def _calls(node: ast.AST, method: str) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == method


def test_layers_and_groups_are_constructed_as_vllm_does_it(vllm):
    """Layers give everything by name, and groups the first four by place."""
    impl = ours("mla", "AttnplugMLAImpl").methods["__init__"]
    assert impl.bind(**{name: ... for name in vllm.klass(COMMON, "MLACommonImpl").methods["__init__"].parameters})
    assert ours("mla", "AttnplugMLABuilder").methods["__init__"].bind(..., ..., ..., ...)


def test_our_calls_bind_to_vllms_constructors(vllm):
    builder = vllm.klass(COMMON, "MLACommonMetadataBuilder").methods
    assert builder["__init__"].bind(..., ..., ..., ...)
    assert builder["build"].bind(..., ..., ...)
    prefill = (
        "num_heads",
        "scale",
        "kv_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "v_head_dim",
        "vllm_config",
    )
    assert vllm.klass(PREFILL, "MLAPrefillBackend").methods["__init__"].bind(**dict.fromkeys(prefill))
    impl = vllm.klass(COMMON, "MLACommonImpl").methods["__init__"]
    # Ten by place, the rest by name.
    rest = [name for name, one in list(impl.parameters.items())[10:] if one.default is one.empty]
    impl.bind(*[...] * 10, **dict.fromkeys(rest))


def test_the_builder_keeps_its_prefill_backend_where_we_put_ours(vllm):
    builder = vllm.klass(COMMON, "MLACommonMetadataBuilder")
    assert {"_prefill_backend", "query_len_support", "reorder_batch_threshold"} <= builder.members
    text = ast.unparse(builder.node)
    assert "prefill_backend=self._prefill_backend" in text
    assert "self._prefill_backend.prepare_metadata(prefill_metadata)" in text


def test_layers_of_mla_have_what_we_read(vllm):
    layer = vllm.klass(COMMON, "MLAAttention").members
    assert {"kv_cache", "impl", "layer_name", "kv_cache_dtype"} <= layer
    assert {"mla_prefill_backend"} <= vllm.klass("vllm.config.attention", "AttentionConfig").members


def test_chunks_have_what_we_read(vllm):
    prefill = vllm.klass(COMMON, "MLACommonPrefillMetadata")
    assert {"block_table", "query_start_loc", "chunked_context"} <= prefill.members
    nested = {node.name: ast.unparse(node) for node in prefill.node.body if isinstance(node, ast.ClassDef)}
    context = nested["ChunkedContextMetadata"]
    if "chunks:" in context:
        for name in ("index", "request_slice", "query_start_loc", "cu_seq_lens", "seq_lens"):
            assert f"{name}:" in nested["ContextChunk"]
    else:
        assert "cu_seq_lens:" in context and "seq_lens:" in context


def test_kinds_of_query_lengths_are_known(vllm):
    body = vllm.klass(COMMON, "QueryLenSupport").node.body
    names = {target.id for node in body if isinstance(node, ast.Assign) for target in node.targets}
    assert {"SINGLE_ONLY", "UNIFORM", "VARLEN"} <= names
