"""The embedded default: MHA, GQA and MLA with torch alone, on the CPU and on CUDA."""
