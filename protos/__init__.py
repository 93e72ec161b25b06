"""The public gRPC contract: ``kvferry.proto`` and the code generated from it.

Nothing here is written by hand but the proto and the typing stub of the service classes.
Protobuf messages stay in this room and at the gRPC edge; workers never see them.
"""
