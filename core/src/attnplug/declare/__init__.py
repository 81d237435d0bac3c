"""What plugins and hosts declare, as plain data: no torch."""
