"""Loading of draft models by the settings of speculation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from attnplug import ModelSpec, UsageError
from attnplug.hf.config_keys import Config
from attnplug_engine.checkpoints.safetensors import Checkpoint, WeightSource
from attnplug_engine.models.architectures import (
    divide,
    load_model,
    load_spec,
    model_config,
    open_source,
    read_config,
)
from attnplug_engine.models.decoder import LoadedModel
from attnplug_engine.models.weights import Weights, holds_weight
from attnplug_engine.parallel.collectives import (
    SINGLE,
    FirstRank,
    ParallelError,
    TensorParallel,
    even_part,
    kv_head_part,
)
from attnplug_engine.settings.speculation import DRAFT_MODEL, Algorithm, Speculation
from attnplug_engine.speculation.drafts.assistant import (
    ASSISTANT,
    EMBEDDING,
    AssistantDraft,
    assistant_spec,
    is_assistant,
)
from attnplug_engine.speculation.drafts.eagle import EagleDraft
from attnplug_engine.speculation.drafts.eagle3 import Eagle3Draft
from attnplug_engine.speculation.drafts.model import DraftError, DraftModel
from attnplug_engine.speculation.drafts.mtp import build_prediction, prediction_spec
from attnplug_engine.speculation.drafts.standalone import StandaloneDraft

_EAGLE_TYPE = "llama"
_EAGLE_NORM = "hidden_norm.weight"
_TOKEN_MAPS = ("d2t", "t2d")
"""Tensors of EAGLE-3 that are not weights."""


@contextmanager
def naming_draft(speculation: Speculation) -> Iterator[None]:
    """Name the setting of the draft's checkpoint in errors raised inside."""
    try:
        yield
    except UsageError as error:
        if speculation.draft_model is not None and not error.settings:
            error.settings = (DRAFT_MODEL,)
        raise


def draft_spec(speculation: Speculation, target_reference: str) -> ModelSpec:
    """Return the whole draft's layers, from configs only: for the choice of a backend before weights are read."""
    match speculation.algorithm:
        case Algorithm.STANDALONE:
            return load_spec(_draft_model(speculation))
        case Algorithm.MTP:
            target = load_spec(target_reference)
            if speculation.draft_model is not None:
                given = model_config(speculation.draft_model)
                if is_assistant(given):
                    return assistant_spec(speculation, given, target)
                raise DraftError(
                    f"`speculative_algorithm` {speculation.algorithm} reads its layers from the target's own "
                    f"checkpoint, and `speculative_draft_model` is {speculation.draft_model!r}; leave it out, or give "
                    f"an assistant, which is of model type {ASSISTANT!r}"
                )
            return prediction_spec(speculation, target, model_config(target_reference), target_reference)
        case Algorithm.EAGLE | Algorithm.EAGLE3:
            spec = load_spec(_draft_model(speculation))
            if spec.model_type != _EAGLE_TYPE:
                raise DraftError(
                    f"the draft {speculation.draft_model!r} is of model type {spec.model_type!r}, and "
                    f"{speculation.algorithm} drafts are of type {_EAGLE_TYPE!r}; give another "
                    "`speculative_draft_model`, or choose `speculative_algorithm` standalone for an ordinary model"
                )
            return spec
        case Algorithm.NGRAM:
            raise DraftError(
                f"`speculative_algorithm` {speculation.algorithm} has no draft model; those that have one: "
                f"{', '.join(one for one in Algorithm if one is not Algorithm.NGRAM)}"
            )


def load_draft(
    speculation: Speculation,
    source: WeightSource,
    target: LoadedModel,
    target_reference: str,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    parallel: TensorParallel = SINGLE,
) -> DraftModel:
    """Load the draft model for a target from ``open_draft``'s source. Raises UsageError (DraftError, CheckpointError,
    …)."""
    spec = draft_spec(speculation, target_reference)
    if speculation.algorithm is Algorithm.STANDALONE:
        reference = _draft_model(speculation)
        loaded = load_model(reference, dtype=dtype, device=device, parallel=parallel, source=source)
        _check_vocabulary(speculation, loaded, target, target_reference)
        return StandaloneDraft(loaded).eval()
    weights = Weights(source, dtype=dtype, device=torch.device(device), parallel=parallel)
    return _build_draft(weights, source, speculation, spec, target, target_reference)


def open_draft(
    speculation: Speculation,
    target_reference: str,
    *,
    device: torch.device | str,
    seed: int = 0,
    random_weights: bool = False,
) -> WeightSource:
    """Return the source of a draft's weights: the target's own for multi-token prediction."""
    reference = target_reference if speculation.draft_model is None else speculation.draft_model
    with naming_draft(speculation):
        draft_spec(speculation, target_reference)  # its errors are more specific
        return open_source(reference, device=device, seed=seed, random_weights=random_weights)


def divide_draft(
    target: LoadedModel,
    dtype: torch.dtype,
    *,
    checked: bool,
    speculation: Speculation,
    source: WeightSource,
    target_reference: str,
) -> nn.Module:
    """Build one rank's part of a draft without values, for a target's part of the same kind.

    Raises ParallelError if it cannot be divided, and whatever else ``load_draft`` finds without reading weights.
    Tensors are ``checked`` as in ``divide``.
    """
    from attnplug_engine.models.weight_shapes import shapes_of  # imports the quantization schemes

    spec, size = draft_spec(speculation, target_reference), target.spec.ranks
    try:
        with naming_draft(speculation):
            for layer in spec.full_layers:
                even_part(layer.num_heads, FirstRank(size), "attention heads")
                kv_head_part(layer.num_kv_heads, FirstRank(size))
            if speculation.algorithm is Algorithm.STANDALONE:
                draft = divide(source, spec, size, dtype, checked=checked)
                _check_vocabulary(speculation, draft, target, target_reference)
                return draft.module
            weights = shapes_of(source, size, dtype, checked=checked)
            return _build_draft(weights, source, speculation, spec, target, target_reference)
    except ParallelError as error:
        problem = f"the draft {source.name!r}: {error.problem}"
        raise ParallelError(problem, error.what, error.count, error.size) from error


def _build_draft(
    weights: Weights,
    source: WeightSource,
    speculation: Speculation,
    spec: ModelSpec,
    target: LoadedModel,
    target_reference: str,
) -> DraftModel:
    is_own = speculation.draft_model is None
    if speculation.algorithm is Algorithm.MTP and not is_own:
        return _build_assistant(weights, source, speculation, spec, target, target_reference)
    config = read_config(source.config, source.name, spec)
    with torch.no_grad():
        if is_own:
            return build_prediction(weights, source, config, spec, target).eval()
        _check_eagle(speculation, source, config, target, target_reference)
        draft: DraftModel
        if speculation.algorithm is Algorithm.EAGLE:
            draft = EagleDraft(weights, config, spec, target)
        else:
            draft = Eagle3Draft(weights, source, config, spec, target)
    weights.check_all_taken(lambda name: name in _TOKEN_MAPS)
    return draft.eval()


def _build_assistant(
    weights: Weights,
    source: WeightSource,
    speculation: Speculation,
    spec: ModelSpec,
    target: LoadedModel,
    target_reference: str,
) -> DraftModel:
    config = Config(source.config, source.name, ASSISTANT)
    hidden, vocab = config.integer("backbone_hidden_size"), config.integer("vocab_size")
    _check_same(speculation, "a 'backbone_hidden_size'", hidden, target.module.hidden_size, target_reference)
    _check_same(speculation, "a vocabulary", vocab, target.module.vocab_size, target_reference)
    with torch.no_grad():
        draft = AssistantDraft(weights, config, spec, target)
    weights.check_all_taken(lambda name: name == EMBEDDING)
    return draft.eval()


def _check_vocabulary(speculation: Speculation, draft: LoadedModel, target: LoadedModel, target_reference: str) -> None:
    found, wanted = draft.module.vocab_size, target.module.vocab_size
    _check_same(speculation, "a vocabulary", found, wanted, target_reference)


def _check_eagle(
    speculation: Speculation, source: WeightSource, config: Config, target: LoadedModel, target_reference: str
) -> None:
    """Raise if a checkpoint is not a draft of this algorithm, or one for another target."""
    if isinstance(source, Checkpoint):
        names = source.names()
        if not holds_weight(source, "fc.weight"):
            raise DraftError(
                f"the checkpoint {source.name!r} is not a draft of `speculative_algorithm` {speculation.algorithm}: it "
                "has no tensor 'fc.weight'; give another `speculative_draft_model`, or choose standalone for an "
                "ordinary model"
            )
        found = Algorithm.EAGLE3 if any(name.endswith(_EAGLE_NORM) for name in names) else Algorithm.EAGLE
        if found is not speculation.algorithm:
            has = "has a tensor" if found is Algorithm.EAGLE3 else "has no tensor"
            raise DraftError(
                f"the checkpoint {source.name!r} is not a draft of `speculative_algorithm` {speculation.algorithm}: it "
                f"{has} 'midlayer.{_EAGLE_NORM}'; choose {found} for it, or give another `speculative_draft_model`"
            )
    hidden = config.integer("hidden_size")
    if config.optional_integer("target_hidden_size") not in (None, hidden):
        raise config.wrong("target_hidden_size", f"absent, or {hidden} as hidden_size is")
    _check_same(speculation, "a hidden size", hidden, target.module.hidden_size, target_reference)
    vocab = config.integer("vocab_size")
    _check_same(speculation, "a vocabulary", vocab, target.module.vocab_size, target_reference)


def _check_same(speculation: Speculation, what: str, found: int, wanted: int, target_reference: str) -> None:
    if found != wanted:
        raise DraftError(
            f"the draft {speculation.draft_model!r} has {what} of {found}, and the target {target_reference!r} one of "
            f"{wanted}; they must be the same, so give a draft of this target by `speculative_draft_model`",
        )


def _draft_model(speculation: Speculation) -> str:
    assert speculation.draft_model is not None, "what is asked of speculation is checked by itself"
    return speculation.draft_model
