"""Tensor parallelism: rank processes and collectives."""
