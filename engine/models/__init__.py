"""Decoder architectures: what a checkpoint is (``config``) and what computes it.

Owns the mapping from configuration to layers; does not know where weights come from.
"""
