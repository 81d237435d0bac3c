"""Conversion of SGLang's attention modules to ``LayerSpec``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from attnplug import AttentionKind, BackendError, LayerSpec
from attnplug.host import MLADims
from attnplug.sparse import IndexerDims


class Layers:
    """Attention modules of a model on this rank with their specs. Head counts are those of the rank."""

    def __init__(
        self,
        modules: Iterable[Any],
        mla: MLADims | None,
        v_head_dim: int,
        sinks: Iterable[int] = (),
        indexer: IndexerDims | None = None,
    ) -> None:
        """``sinks``: ids of layers that pass sink logits. ``v_head_dim``: of MLA's up-projected values. ``indexer``:
        of a sparse model; SGLang's selects the rows.

        Raises :class:`BackendError` for modules that the contract cannot describe.
        """
        self._mla, self._v_head_dim, self._sinks, self._indexer = mla, v_head_dim, frozenset(sinks), indexer
        self._specs: dict[Any, LayerSpec] = {}
        self._as_mha = set[Any]()
        by_id: dict[int, LayerSpec] = {}
        for module in modules:
            if reasons := list(unsupported(module)):
                raise BackendError(
                    f"layer {module.layer_id} {', and '.join(reasons)}; use one of SGLang's own backends"
                )
            if mla is not None and not self._absorbed(module, mla):
                self._as_mha.add(module)
                continue
            spec = self._specs[module] = self._spec(module)
            if by_id.setdefault(spec.layer_id, spec) != spec:
                raise BackendError(
                    f"layer {spec.layer_id} has two kinds of attention over one cache, {by_id[spec.layer_id]} and "
                    f"{spec}, which attnplug cannot describe; use one of SGLang's own backends"
                )
        for module in self._as_mha:
            if module.layer_id not in by_id:
                raise BackendError(f"layer {module.layer_id} attends as MHA, but has no latent attention beside it")
            self._specs[module] = by_id[module.layer_id]
        self.specs = tuple(by_id[layer_id] for layer_id in sorted(by_id))

    def _absorbed(self, module: Any, mla: MLADims) -> bool:
        """Return True if a module of an MLA layer runs absorbed; its other module runs the same layer as MHA."""
        shape = (module.tp_k_head_num, module.head_dim, module.v_head_dim)
        return bool(shape == (1, mla.row_dim, mla.kv_lora_rank))

    def _spec(self, module: Any) -> LayerSpec:
        heads, mla = module.tp_q_head_num, self._mla
        common = {
            "layer_id": module.layer_id,
            "num_heads": heads,
            "scale": float(module.scaling),
            # SGLang's window excludes the query's own key, attnplug's includes it.
            "sliding_window": None if module.sliding_window_size < 0 else module.sliding_window_size + 1,
            "logit_cap": float(module.logit_cap) or None,
            "sinks": module.layer_id in self._sinks,
        }
        if mla is None:
            return LayerSpec(
                kind=AttentionKind.MHA,
                num_kv_heads=module.tp_k_head_num,
                head_dim=module.head_dim,
                v_head_dim=module.v_head_dim,
                **common,
            )
        head_dim = mla.qk_nope_head_dim + mla.qk_rope_head_dim
        return LayerSpec(
            kind=AttentionKind.MLA,
            num_kv_heads=heads,
            head_dim=head_dim,
            v_head_dim=self._v_head_dim,
            mla=mla,
            indexer=self._indexer,
            **common,
        )

    def spec(self, module: Any) -> LayerSpec:
        """Spec of a module. Raises :class:`BackendError` for a module of another model."""
        spec = self._specs.get(module)
        if spec is None:
            raise BackendError(
                f"layer {module.layer_id} does not belong to the model that this backend was built for; its layers are "
                f"{', '.join(str(each.layer_id) for each in self.specs)}"
            )
        return spec

    def runs_as_mha(self, module: Any) -> bool:
        """Return True if this module runs an MLA layer as MHA, over keys and values passed as arguments."""
        return module in self._as_mha


def unsupported(module: Any) -> Iterator[str]:
    """Reasons against a module: features that the contract lacks."""
    if module.is_cross_attention:
        yield "is cross attention, over an encoder's output"
    kind = getattr(module.attn_type, "value", module.attn_type)
    if kind != "decoder":
        yield f"attends in both directions (attn_type {kind!r})"
    if module.use_irope:
        yield "attends within chunks of the context (use_irope)"
    if module.logit_cap and module.logit_capping_method != "tanh":
        yield f"caps logits by {module.logit_capping_method!r}, not by tanh"
    if module.pos_encoding_mode != "NONE":
        yield f"encodes positions in attention itself ({module.pos_encoding_mode!r})"
    if module.xai_temperature_len > 0:
        yield f"scales queries by position (xai_temperature_len {module.xai_temperature_len})"


def with_sinks(named_modules: Iterable[tuple[str, Any]], attention: type[Any]) -> Iterator[int]:
    """Ids of layers with sink logits, recognized by the attribute names that SGLang's models use."""
    for _, module in named_modules:
        if any(getattr(module, name, None) is not None for name in _SINKS):
            yield from (child.layer_id for child in module.children() if isinstance(child, attention))


_SINKS = ("sinks", "attention_sink_bias", "attn_sink", "learnable_sink_param")
