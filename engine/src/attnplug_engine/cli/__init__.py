"""Commands ``attnplug run``, ``attnplug embed`` and ``attnplug warm``."""
