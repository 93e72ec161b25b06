"""A worker: engine, connector, inbox and outbox, audit; and the messages workers exchange.

Knows no role: roles attach to a worker and handle the messages that concern them.
"""
