"""The load generator: what is sent and when, to whom, and what the client measured of it.

Plans (``plan``, ``workloads``, ``traces``, ``arrivals``) and figures (``measures``, ``intervals``)
are pure; targets (``grpc_target``, ``http_target``) and the loop (``drive``) are thin shells.
"""
