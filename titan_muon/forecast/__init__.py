"""Plans without processes: a model on the meta device in a fake world, with its plan, modelled times and memory."""
