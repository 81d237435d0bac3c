"""MHA, GQA and MLA prefill over FlashAttention kernels, as an attnplug backend."""
