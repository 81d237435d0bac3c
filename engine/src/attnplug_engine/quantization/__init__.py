"""Quantized weights, one module per scheme. They are kept as stored and never dequantized as a whole."""
