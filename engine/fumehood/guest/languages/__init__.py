"""How a program of each language is run, in the child that was made for it."""
