"""Where weights are served from."""
