"""Latent attention (MLA) by TokenSpeed's kernels: a variant of trtllm_mla."""
