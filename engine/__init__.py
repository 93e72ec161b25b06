"""One worker's inference engine: request specs, sequences, scheduler, model runner, sampler.

Knows tokens and blocks; does not know other workers, roles, Ray or sockets.
"""
