"""attnplug's backends inside SGLang. See ``attnplug_sglang.plugin``."""
