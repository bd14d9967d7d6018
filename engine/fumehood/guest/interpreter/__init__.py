"""Programs of the interpreter wall: what the node tables admit, and how it is computed."""
