"""Code shared by the guests of all walls: kernel calls, filters, limits, and how a run ended."""
