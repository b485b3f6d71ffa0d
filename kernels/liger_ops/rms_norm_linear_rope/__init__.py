"""RMSNorm, the projection to queries, keys and values, and the rotary embedding as one kernel."""
