"""Drafts inside vLLM. The last file on purpose: after numba was imported, vLLM starts no second engine in a process."""

from __future__ import annotations

import torch

from engines import VOCABULARY, asking, engine, planned_modes, tokens


def test_drafts_are_verified(models, monkeypatch):
    """Uniform batches of four tokens a request, and mixed ones where drafts are shorter."""
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    given = [
        torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(seed)).tolist()[:440] for seed in (7, 8)
    ]
    with engine(models.path("llama"), {**asking(), "block_size": 16, "speculative_config": drafts}) as llm:
        seen = planned_modes(monkeypatch)
        assert tokens(llm, given) == models.expected("llama", given)
        assert "target_verify" in seen
