"""What the guests of all walls share: the kernel, filters, limits, and how a run ended."""
