"""Serving: capacity, start-up, the step loop, and the loop that embeds."""
