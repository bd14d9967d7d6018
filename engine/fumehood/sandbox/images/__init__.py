"""The images that containers start from: their recipes, and what an image is."""
