"""MLA with torch: absorbed, as MHA over chunks of the prefix, and in CUDA graphs."""
