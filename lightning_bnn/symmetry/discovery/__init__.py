"""From a module to its symmetries: read its graph, follow its channels, solve, check."""
