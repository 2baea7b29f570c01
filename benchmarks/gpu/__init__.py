"""First minutes on a machine with GPUs: all checks and figures that need a GPU, by one command, `make gpu`."""
