"""SGLang bridge: runs every installed attnplug backend inside SGLang. The entry point is ``attnplug_sglang.plugin``."""
