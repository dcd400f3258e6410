"""What the papers claim, and how numbers of the studies decide whether it holds here."""
