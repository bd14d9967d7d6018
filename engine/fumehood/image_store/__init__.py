"""The store of images (a part): the seam between the parts that build images and those that run
containers.

Host side. `store.py` is the seam, `find.py` finds images by their labels, and `faults.py` explains
why an image was not built. The parts `docker` and `images` use it.
"""
