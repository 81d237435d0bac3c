"""attnplug backend triton_mla: MLA by Triton kernels. See ``attnplug_triton_mla.plugin``."""
