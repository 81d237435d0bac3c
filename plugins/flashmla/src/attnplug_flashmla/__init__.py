"""attnplug backend flashmla: MLA decode by FlashMLA. See ``attnplug_flashmla.plugin``."""
