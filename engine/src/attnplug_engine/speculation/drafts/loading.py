"""From what a user asks of speculation to a draft model that runs."""

from __future__ import annotations

import torch

from attnplug import ModelSpec
from attnplug.host import load_model as load_spec
from attnplug_engine.models.architectures import LoadedModel, load_model, model_config, open_source, read_config
from attnplug_engine.parallel import SINGLE, TensorParallel
from attnplug_engine.speculation.drafts.model import DraftError, DraftModel
from attnplug_engine.speculation.drafts.prediction import build_prediction, prediction_spec
from attnplug_engine.speculation.drafts.standalone import StandaloneDraft
from attnplug_engine.speculation.options import Algorithm, Speculation


def draft_spec(speculation: Speculation, target_reference: str) -> ModelSpec:
    """The whole draft as attention sees it, by configs alone: for choosing a backend before weights are read."""
    match speculation.algorithm:
        case Algorithm.STANDALONE:
            return load_spec(_draft_model(speculation))
        case Algorithm.MTP:
            _refuse_draft_model(speculation)
            target = load_spec(target_reference)
            return prediction_spec(speculation, target, model_config(target_reference), target_reference)
    raise _not_a_model(speculation)


def load_draft(
    speculation: Speculation,
    target: LoadedModel,
    target_reference: str,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    parallel: TensorParallel = SINGLE,
    seed: int = 0,
    random_weights: bool = False,
) -> DraftModel:
    """Read the draft model for a target. Raises UsageError for all that can be wrong (DraftError, CheckpointError, …).

    With ``random_weights`` only configs are read.
    """
    match speculation.algorithm:
        case Algorithm.STANDALONE:
            draft = load_model(
                _draft_model(speculation),
                dtype=dtype,
                device=device,
                parallel=parallel,
                seed=seed,
                random_weights=random_weights,
            )
            _check_vocabulary(speculation, draft.module.vocab_size, target, target_reference)
            return StandaloneDraft(draft).eval()
        case Algorithm.MTP:
            spec = draft_spec(speculation, target_reference)
            source = open_source(target_reference, device=device, seed=seed, random_weights=random_weights)
            config = read_config(source.config, source.name, spec)
            return build_prediction(spec, source, config, target, dtype=dtype, device=device, parallel=parallel).eval()
    raise _not_a_model(speculation)


def _draft_model(speculation: Speculation) -> str:
    if speculation.draft_model is None:
        raise DraftError(
            f"`speculative_algorithm` {speculation.algorithm} needs a draft model; give the folder of its checkpoint "
            "by `speculative_draft_model`"
        )
    return speculation.draft_model


def _refuse_draft_model(speculation: Speculation) -> None:
    if speculation.draft_model is not None:
        raise DraftError(
            f"`speculative_algorithm` {speculation.algorithm} reads its layers from the target's own checkpoint, and "
            f"`speculative_draft_model` is {speculation.draft_model!r}; leave it out"
        )


def _check_vocabulary(speculation: Speculation, found: int, target: LoadedModel, target_reference: str) -> None:
    wanted = target.module.vocab_size
    if found != wanted:
        raise DraftError(
            f"the draft {speculation.draft_model!r} has a vocabulary of {found} tokens, and the target "
            f"{target_reference!r} one of {wanted}; they must be the same, so give a draft of the target's family by "
            "`speculative_draft_model`"
        )


def _not_a_model(speculation: Speculation) -> DraftError:
    return DraftError(
        f"`speculative_algorithm` {speculation.algorithm} has no draft model; those that have one: "
        f"{', '.join(algorithm for algorithm in Algorithm if algorithm is not Algorithm.NGRAM)}"
    )
