"""attnplug inside vLLM: every installed attnplug backend as an attention backend there. See ``attnplug_vllm.register``.
"""
