"""Checks of the house itself: floors, names, packaging, the list of traps."""
