"""vLLM bridge: runs every installed attnplug backend inside vLLM. The entry point is ``attnplug_vllm.register``."""
