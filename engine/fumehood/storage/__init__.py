"""State: everything that must survive the process. All SQL of the engine is in here."""
