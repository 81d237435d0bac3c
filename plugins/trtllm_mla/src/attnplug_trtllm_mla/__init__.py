"""Latent attention (MLA) by TRT-LLM's generation kernels, as an attnplug backend, and the parts that variants share."""
