"""Draft models: EAGLE, EAGLE-3, multi-token prediction, assistants and standalone models."""
