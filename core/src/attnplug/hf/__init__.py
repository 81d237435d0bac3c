"""Conversion of Hugging Face configs, including built-in tiny models, to model specs."""
