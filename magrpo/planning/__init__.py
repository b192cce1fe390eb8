"""A plan before the money: whether a configuration fits a place, what starts there, and how fast it will be."""
