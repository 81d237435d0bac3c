"""Commands ``attnplug run`` and ``attnplug embed``."""
