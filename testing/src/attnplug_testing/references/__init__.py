"""Backends of this repository's plugins on reference kernels in plain torch, or in Triton's interpreter.

One module per plugin, which imports that plugin; attnplug-testing itself requires none of them.
"""
