"""One captured graph per batch size: which mode a step runs in, which size it is padded to, and what records it."""
