"""Multi-process training: the process group, engines (one process, DDP, FSDP2), DTensor helpers, sharded files."""
