"""`make compare`: fumehood beside what a user would pick instead, on the same work."""
