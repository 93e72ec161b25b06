"""Measurements beside other projects. Part of the repository, not of the package."""
