"""What this machine has, and moving numbers to it."""
