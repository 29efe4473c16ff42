"""Pure scheduling: commands, blocks, prefix cache, batching and the device contract. No clock, no I/O."""
