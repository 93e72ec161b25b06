"""Many loads against many clusters, and what follows from them.

What to measure (``sweep_plan``, ``arrangements``, ``recipes``) and what it says (``differences``,
``comparing``, ``verdict``, ``drains``, ``summary``) are pure; ``sweeping`` and ``serve_process``
are thin shells. ``report`` draws.
"""
