"""From installed plugins to the backend that runs: loading, selecting, building."""
