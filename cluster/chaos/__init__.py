"""Killing and stopping real processes under load, in every state of a request, and counting."""
