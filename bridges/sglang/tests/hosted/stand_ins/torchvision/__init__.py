"""Stands in for torchvision, which SGLang imports for images alone: every name is an empty class."""

__version__ = "0.0.0"


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {"__getattr__": lambda self, key: None})
