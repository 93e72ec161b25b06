"""Import root of KVFerry.

This folder holds one relative link per package and no code: the packages stand at the top of the
repository and are imported as ``kvferry.engine``, ``kvferry.cluster``, and so on.
"""
