"""Draws documents: one HTML page that needs nothing else, and pictures of its plots.

``curves`` takes charts out of documents, ``svg`` and ``png`` draw them, ``page`` and ``sections``
write around them. Nothing here measures or decides.
"""
