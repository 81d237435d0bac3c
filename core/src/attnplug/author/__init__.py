"""Base classes for authors of backends."""
