"""Speculative decoding: a draft proposes tokens, and the target verifies them."""
