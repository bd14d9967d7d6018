"""The import path of the jail's attacks: the only directory of the engine's code that the attacks
can read.
"""
