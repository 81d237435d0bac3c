"""MHA and GQA with torch, one request at a time."""
