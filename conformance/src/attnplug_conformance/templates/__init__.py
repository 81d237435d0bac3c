"""Backends that ``attnplug new`` starts an author with: small, right, and to be replaced."""
