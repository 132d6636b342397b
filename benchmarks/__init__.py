"""Measurements that use the package as a user would; each module is a command (``python -m benchmarks.train``)."""
