"""The functions behind the paths, a file for each family."""
