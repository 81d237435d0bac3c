"""Choice of ``auto``: measured tables, the ranking based on them, and per-batch dispatch to the fastest backend."""
