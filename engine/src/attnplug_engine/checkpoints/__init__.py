"""Checkpoint readers: safetensors folders, base models without a head, random weights."""
