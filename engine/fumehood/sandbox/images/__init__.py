"""The images that containers start from: their recipes, and the catalog of built images."""
