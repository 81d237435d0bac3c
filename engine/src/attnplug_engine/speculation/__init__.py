"""Speculative decoding: a draft proposes tokens, the target verifies them, and its own choice decides."""
