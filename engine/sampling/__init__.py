"""From logits to a token: constraints, filters, one uniform number, log-probabilities.

Nothing in here has state: a token is a function of its row of logits, the request's parameters,
the tokens so far, and (seed, branch, output index).
"""
