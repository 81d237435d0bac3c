"""Latent attention (MLA) over FlashInfer's kernels, as an attnplug backend."""
