"""The engine on a GPU. None of it is imported if the engine runs on a CPU."""
