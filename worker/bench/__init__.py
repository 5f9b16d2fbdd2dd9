"""``headrace bench``: the same requests through several engines, in turn, on the same machine."""
