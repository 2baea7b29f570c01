"""Hooks into FSDP2: updates applied in forward, and FSDP2's private parts."""
