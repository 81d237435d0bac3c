"""Triton kernels of the engine. Their modules are imported for tensors on a GPU only."""
