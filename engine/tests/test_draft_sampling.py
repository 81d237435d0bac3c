"""Proposals of a draft with the sampler's noise: the target's choices if the draft equals the target."""

from __future__ import annotations

import torch
from torch import Tensor

from attnplug_engine.execution.sampler import Sampler, gumbel, sample
from attnplug_engine.execution.sampling_inputs import sampling_metadata
from attnplug_engine.kernels.sampling_metadata import SamplingMetadata
from attnplug_engine.request import Request, SamplingParams
from attnplug_engine.speculation.draft_sampling import gumbel_topk
from attnplug_testing.devices import nothing_waits

HEATS = [0.0, 1.0, 0.6, 0.0, 1.7, 0.01]
VOCAB = 5000
"""More than two chunks of the kernel."""


def rows_of(device: str, heats: list[float] = HEATS) -> SamplingMetadata:
    requests = [
        Request(row, (1,), SamplingParams(99, temperature=heat), output=[0] * row) for row, heat in enumerate(heats)
    ]
    return sampling_metadata(requests, Sampler(5).seed_of, torch.device(device))


def some_logits(vocab: int = VOCAB) -> Tensor:
    return torch.randn(len(HEATS), vocab, generator=torch.Generator().manual_seed(3)) * 3


def judged(logits: Tensor, batch: SamplingMetadata) -> Tensor:
    """Logits with temperature and noise applied in float64."""
    noise = gumbel(0, logits.shape[1], batch.seed.cpu(), batch.position.cpu()).double()
    heat = batch.temperature.cpu().double().unsqueeze(1)
    return torch.where(heat > 0, logits.double() / heat.clamp(min=1e-9) + noise, logits.double())


def test_the_best_with_noise_and_how_likely_they_are(kernel_device: str) -> None:
    logits, batch = some_logits(), rows_of(kernel_device)
    given = logits.to(kernel_device)
    with nothing_waits(kernel_device):
        tokens, logprobs = gumbel_topk(given, batch, 4)
    expected = judged(logits, batch).log_softmax(1).topk(4)
    assert tokens.tolist() == expected.indices.tolist()
    torch.testing.assert_close(logprobs.cpu(), expected.values.float(), rtol=1e-4, atol=1e-3)


def test_the_best_one_is_what_the_sampler_chooses(kernel_device: str) -> None:
    logits, batch = some_logits().to(kernel_device), rows_of(kernel_device)
    assert gumbel_topk(logits, batch, 1)[0][:, 0].tolist() == sample(logits, batch).tolist()


def test_a_draft_with_fewer_tokens_has_the_noise_of_the_targets(kernel_device: str) -> None:
    """The noise is that of the target's full vocabulary; its other tokens cannot be chosen."""
    logits, batch = some_logits(300), rows_of(kernel_device)
    ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(1))[:300].sort().values
    whole = torch.full((len(HEATS), VOCAB), -torch.inf).index_copy_(1, ids, logits)
    few = gumbel_topk(logits.to(kernel_device), batch, 3, ids.to(kernel_device))
    all_of_them = gumbel_topk(whole.to(kernel_device), batch, 3)
    assert few[0].tolist() == all_of_them[0].tolist()
    torch.testing.assert_close(few[1], all_of_them[1], rtol=1e-4, atol=1e-3)


def test_of_equals_the_first(kernel_device: str) -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, [4, 2500, 17, 4999]] = 1.0
    tokens, _ = gumbel_topk(logits.to(kernel_device), rows_of(kernel_device, [0.0]), 3)
    assert tokens.tolist() == [[4, 17, 2500]]


def test_bad_logits_are_not_proposed(kernel_device: str) -> None:
    """If a whole row is bad, its tokens are proposed with no probability."""
    logits = some_logits()[:4]
    logits[:2, ::2], logits[:2, 1] = float("nan"), float("inf")
    logits[2:] = float("nan")
    tokens, logprobs = gumbel_topk(logits.to(kernel_device), rows_of(kernel_device, [0.0, 1.0, 0.0, 1.0]), 2)
    assert ((tokens >= 0) & (tokens < VOCAB)).all()
    assert (tokens[:2] % 2 == 1).all() and (tokens[:2] > 1).all() and logprobs[:2].isfinite().all()
    assert logprobs[2:].tolist() == [[-float("inf")] * 2] * 2
