"""Small programs: the tables that one passes, and what it is given to work with."""
