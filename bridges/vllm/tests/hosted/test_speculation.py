"""Drafts inside vLLM. The last file on purpose: after numba was imported, vLLM starts no second engine in a process."""

from __future__ import annotations

import torch

from engines import NEW, PROMPTS, VOCABULARY, asking, engine, impls, planned, tokens


def test_a_draft_runs_on_a_backend_that_is_named_for_it(models, monkeypatch):
    """The draft equals the target, so every draft is accepted: three tokens and one more per step."""
    drafts = {"method": "draft_model", "model": models.path("llama"), "num_speculative_tokens": 3}
    options = {**asking(), "block_size": 16, "speculative_config": {**drafts, "attention_backend": "CUSTOM"}}
    with engine(models.path("llama"), options) as llm:
        assert impls(llm) == {"AttnplugImpl"}
        seen = planned(monkeypatch)
        assert tokens(llm, PROMPTS[4:5]) == models.expected("llama", PROMPTS)[4:5]
        assert seen.count("target_verify") == -(-(NEW - 1) // 4)


def test_drafts_are_verified(models, monkeypatch):
    """Uniform batches of four tokens per request, and mixed ones with shorter drafts."""
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    given = [
        torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(seed)).tolist()[:440] for seed in (7, 8)
    ]
    with engine(models.path("llama"), {**asking(), "block_size": 16, "speculative_config": drafts}) as llm:
        seen = planned(monkeypatch)
        assert tokens(llm, given) == models.expected("llama", given)
        assert "target_verify" in seen
