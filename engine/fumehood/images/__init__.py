"""Images (a part): builds the images of containers, and adds packages to images if callers ask for
them.

Host side. `command.py` is the command `fumehood images`, `build.py` builds an image from its
recipe, and `packages.py` is the engine's `ImageMaker`. The kernel itself reads recipes and finds
images (`sandbox/images/`), so an engine without this part can use the images that exist.
"""
