"""Recording of the Triton kernels that an engine launches at start-up, on a GPU without memory."""
