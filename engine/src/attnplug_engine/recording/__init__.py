"""Recording of the Triton kernels that an engine launches at start-up, on a fake GPU (shapes without memory)."""
