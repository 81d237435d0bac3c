"""Devices of this machine, host-to-device copies, and signal handling."""
