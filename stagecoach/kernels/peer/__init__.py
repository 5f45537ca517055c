"""Writing into the memory of other GPUs; `pipeline/peer_links.py` launches it."""
