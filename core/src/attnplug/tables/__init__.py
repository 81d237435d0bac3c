"""Measured tables that ship with core, as JSON files: one for each GPU that its backends were measured on."""
