"""A wrapper with one child for prefill and one for decode."""
