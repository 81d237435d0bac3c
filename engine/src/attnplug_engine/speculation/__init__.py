"""Speculative decoding: a draft proposes tokens, the target verifies them, and the target's own choice decides."""
