"""The index of sparse layers, for every backend: scores of all visible cache rows, and the best of them (A10)."""
