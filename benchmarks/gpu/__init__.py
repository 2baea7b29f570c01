"""The first minutes on a machine with GPUs: every check and every figure that needs one, by one command, `make gpu`."""
