"""Backends composed of other backends, on one forwarding base class."""
