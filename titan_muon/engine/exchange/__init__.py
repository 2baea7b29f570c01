"""Collectives of a step: buffers, the exchange, and agreement between ranks."""
