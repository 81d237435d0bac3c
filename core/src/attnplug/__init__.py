"""attnplug: attention backends for LLM inference as plugins.

Names for authors of MHA and MLA backends. Further public modules: ``attnplug.kernels`` (checks, transfers, pools and
merges that kernel authors share), ``attnplug.linear``, ``attnplug.sparse``, ``attnplug.tables`` (measured tables) and
``attnplug.host`` (for engines and bridges). No other module is public.
"""

from attnplug._exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__)
