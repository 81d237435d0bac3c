"""What a model's layers call."""
