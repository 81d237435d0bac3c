"""Settings: parsed and checked values that options are made of. Nothing here imports torch."""
