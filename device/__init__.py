"""The model on a device: weights, KV pool, paged attention, sampling, routers."""
