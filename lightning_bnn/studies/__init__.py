"""Tables and figures of the papers, each a command."""
