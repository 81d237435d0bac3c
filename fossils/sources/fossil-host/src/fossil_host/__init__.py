"""A small host: one prefill and one decode step of a small model, by any backend."""
