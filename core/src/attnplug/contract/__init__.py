"""Contract between backends and hosts: the protocol, its context, the batch, its geometry and its plan."""
