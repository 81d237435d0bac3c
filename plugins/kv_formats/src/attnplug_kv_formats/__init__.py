"""KV cache formats with fine scales: fp8 per token and head, and NVFP4."""
