"""MLA as a model calls it: absorbed, one-shot and chunked extends, the policy that chooses, and the LSE merge."""
