"""Linear attention for hybrid models, as attnplug backends."""
