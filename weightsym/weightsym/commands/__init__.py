"""Commands of the console script that are no study: one function per file."""
