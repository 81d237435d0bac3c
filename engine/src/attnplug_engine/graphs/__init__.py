"""CUDA graphs of decode and prefill steps."""
