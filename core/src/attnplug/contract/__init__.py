"""What backends and hosts agree on: the protocol, its context, the batch, its geometry and its plan."""
