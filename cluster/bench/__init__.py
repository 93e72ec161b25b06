"""Measurements inside one process: kernels, engine steps, the scheduler. Loads no Ray."""
