"""Commands of the console script, one function per file."""
