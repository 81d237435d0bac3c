"""attnplug inside vLLM: every installed backend as an attention backend there. See ``attnplug_vllm.register``."""
