"""Models: their layers, the table of their architectures, and how one is loaded."""
