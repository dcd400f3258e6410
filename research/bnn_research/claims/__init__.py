"""The papers' claims, and the verdicts that numbers of the studies give on them."""
