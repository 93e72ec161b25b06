"""The OpenAI-compatible HTTP door: the same core as the gRPC door, other shapes.

``bodies`` says which fields a request may have, ``translate`` turns it into ``kvferry.v1``, whose
ranges and refusals are the intake's; ``shapes`` gives OpenAI's JSON, ``failures`` its errors;
``exchange`` and ``answer`` run requests and stream; ``app`` has the routes, ``server`` listens.
Decides nothing about tokens.
"""
