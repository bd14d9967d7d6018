"""The images that containers are made from: recipes, builds, and the catalog of what is there."""
