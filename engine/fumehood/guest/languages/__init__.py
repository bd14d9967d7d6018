"""Running a program of each language in its child."""
