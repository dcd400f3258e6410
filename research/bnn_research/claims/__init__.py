"""Claims of the papers, and verdicts on them from the numbers of studies."""
