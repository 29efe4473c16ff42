"""The only way in: settings, Ray wiring, HTTP API, command line."""
