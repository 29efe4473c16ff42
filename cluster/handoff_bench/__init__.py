"""Handoffs without a model: real nodes, schedulers, exchanges and transports around a device that computes nothing."""
