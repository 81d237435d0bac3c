"""attnplug: attention backends for LLM inference as plugins.

Names for authors of MHA and MLA backends. Further public modules: ``attnplug.kernels`` (checks, transfers and merges),
``attnplug.linear``, ``attnplug.sparse``, ``attnplug.tables`` (measured) and ``attnplug.host`` (engines and bridges).
No other module is public. Ids such as A9 in docstrings and messages are rules, which docs/rules.md defines.
"""

from attnplug._exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__)
