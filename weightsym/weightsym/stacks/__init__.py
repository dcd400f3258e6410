"""Stacks of networks run at once or one by one, in chunks and threads."""
