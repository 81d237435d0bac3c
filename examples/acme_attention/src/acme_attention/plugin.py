"""Declaration of four backends. Imports neither torch nor the backends themselves."""

from acme_attention.options import AcmeOptions, check_options
from attnplug import (
    AttentionKind,
    BackendSpec,
    CacheLayout,
    Capabilities,
    DType,
    ExtendPath,
    Feature,
    GraphLevel,
    Role,
    hookimpl,
)

DEVICES = frozenset({"cpu", "cuda"})
DTYPES = frozenset({DType.FLOAT32, DType.BFLOAT16})
LAYOUTS = frozenset(CacheLayout)  # any strides: rows are read by the pools

MHA = Capabilities(
    kinds=frozenset({AttentionKind.MHA}),
    devices=DEVICES,
    dtypes=DTYPES,
    kv_dtypes=None,  # any KV format, for the same reason
    layouts=LAYOUTS,
    cuda_graph=GraphLevel.DECODE,
)
MLA = Capabilities(
    kinds=frozenset({AttentionKind.MLA}),
    devices=DEVICES,
    dtypes=DTYPES,
    layouts=LAYOUTS,
    extras=frozenset({"lse"}),
    mla_extend=frozenset(ExtendPath),  # absorbed, one_shot, chunked
)
LINEAR = Capabilities(
    kinds=frozenset({AttentionKind.LIGHTNING}), devices=DEVICES, dtypes=DTYPES, roles=frozenset({Role.LINEAR})
)
SPARSE = Capabilities(
    kinds=frozenset({AttentionKind.MLA}),
    devices=DEVICES,
    dtypes=DTYPES,
    layouts=LAYOUTS,
    features=frozenset({Feature.SPARSE}),
    extras=frozenset({"selected"}),
)


@hookimpl
def attnplug_backends() -> list[BackendSpec]:
    return [
        BackendSpec(
            name="acme_mha",
            summary="MHA in torch, decode in graphs",
            contract="1.0",
            factory="acme_attention.mha:AcmeMHA",
            capabilities=MHA,
            options=AcmeOptions,
            check=check_options,
        ),
        BackendSpec(
            name="acme_mla",
            summary="MLA in torch",
            contract="1.0",
            factory="acme_attention.mla:AcmeMLA",
            capabilities=MLA,
        ),
        BackendSpec(
            name="acme_linear",
            summary="Lightning in torch",
            contract="1.0",
            factory="acme_attention.linear:AcmeLinear",
            capabilities=LINEAR,
        ),
        BackendSpec(
            name="acme_sparse",
            summary="Sparse MLA in torch",
            contract="1.0",
            factory="acme_attention.sparse:AcmeSparse",
            capabilities=SPARSE,
        ),
    ]
