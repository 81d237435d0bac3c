"""Hugging Face configs, and the built-in tiny models, as model specs."""
