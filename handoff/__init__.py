"""The KV handoff: coordinator (pure), wire format, exchange, transports."""
