"""Measured tables: files that hold them, where they lie, and the choice that follows from them."""
