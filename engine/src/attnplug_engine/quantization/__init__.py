"""Quantized weights: one module per scheme, loaded as stored and multiplied without a copy in a wider dtype."""
