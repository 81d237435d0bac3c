"""Default backend: MHA, GQA and MLA with torch alone, on CPU and CUDA."""
