"""The interpreter wall's programs: expressions and restricted Python."""
