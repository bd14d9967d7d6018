"""The images that containers start from: recipes, builds, and the catalog of built images."""
