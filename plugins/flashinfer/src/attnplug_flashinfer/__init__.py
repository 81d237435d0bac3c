"""MHA and GQA over FlashInfer's paged kernels, as an attnplug backend."""
