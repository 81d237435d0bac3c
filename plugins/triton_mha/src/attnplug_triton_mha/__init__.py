"""MHA and GQA over a paged cache by Triton kernels, as an attnplug backend."""
