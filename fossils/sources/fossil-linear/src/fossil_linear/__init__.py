"""Lightning attention with torch, one token at a time."""
