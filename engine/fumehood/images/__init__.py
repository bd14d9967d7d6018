"""Images, a part: builds the images of containers, and adds packages to them on request.

Host side. `command.py` is `fumehood images`, and `build.py` makes an image from its recipe.
`packages.py` is the engine's `ImageMaker`. The kernel reads recipes and finds images
(`sandbox/images/`), so an engine without this part uses the images that exist.
"""
