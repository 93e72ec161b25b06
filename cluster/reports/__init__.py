"""The JSON documents that commands print: made from protobuf messages and what the client saw."""
