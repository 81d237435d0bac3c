"""MLA decode by FlashInfer's CuTe DSL kernel: a variant of trtllm_mla."""
