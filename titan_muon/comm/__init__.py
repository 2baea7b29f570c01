"""Every collective of the step: buffers, the exchange, agreement between ranks, and the report of faults."""
