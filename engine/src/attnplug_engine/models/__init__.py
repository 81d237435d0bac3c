"""Models: layers, architectures, loading."""
