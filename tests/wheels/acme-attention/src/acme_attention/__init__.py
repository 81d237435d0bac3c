"""A third party's backend, small and real: MHA and GQA, one request at a time."""
