"""Template backends of ``attnplug new``: small and correct, to be replaced by the author's kernels."""
