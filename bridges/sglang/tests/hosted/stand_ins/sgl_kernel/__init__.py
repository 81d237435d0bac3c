"""Stands in for SGLang's compiled kernels, which its CPU modules import by name and, without AMX, do not call."""

__version__ = "0.0.0"


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*given, **settings):
        raise NotImplementedError(f"sgl_kernel.{name} is not here")

    return missing
